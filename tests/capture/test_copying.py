"""Copies of nested state share nothing with it that could change under them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.capture.copying import copy_tree, to_host
from mindx_elastic.persist.flatten import flatten
from tests.capture.round_trip import assert_same, through_format


def sample() -> dict[str, Any]:
    return {
        "tensor": torch.arange(4.0),
        "array": np.arange(3, dtype=np.int16),
        "list": [1, [2, torch.zeros(2)]],
        "tuple": (1, [2]),
        "ordered": OrderedDict(b=[1], a=[2]),
        "default": defaultdict(list, a=[1], b=[torch.ones(1)]),
        "deque": deque([[1], torch.ones(2)], maxlen=5),
        "counter": Counter("abca"),
        "set": {1, 2},
        "frozen": frozenset({3}),
        "atoms": [None, True, 2**80, -0.0, float("nan"), "x", b"y", 1j, torch.float16, torch.Size([1, 2])],
        "device": torch.device("cpu"),
        "scalar": np.float32(0.1),
    }


def change_everything(value: Any) -> None:
    """Change every mutable thing in place, at any depth."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value += 100
    elif isinstance(value, set):
        value.add("new")
    elif isinstance(value, (dict, list, deque, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            change_everything(item)
        if isinstance(value, dict):
            value["new"] = 1
        elif not isinstance(value, tuple):
            value.append("new")


def test_changes_do_not_reach_the_copy_and_it_goes_through_the_format() -> None:
    value = sample()
    copy = copy_tree(value)
    change_everything(value)
    assert_same(copy, sample())
    del copy["default"]
    assert_same(through_format(copy), copy)


def test_tied_weights_stay_tied_in_a_copy() -> None:
    """`state_dict` gives a new tensor object for each name of a tied weight; they must be stored once all the same."""
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    state = nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()
    copy = to_host(state)
    assert copy["embedding.weight"] is copy["head.weight"]
    assert len(flatten(copy)[1]) == 1
