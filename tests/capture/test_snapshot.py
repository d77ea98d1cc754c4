"""State in host memory that nobody else writes to."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.snapshot import map_tensors, to_host
from mindx_elastic.persist.format import flatten
from tests.capture.round_trip import assert_same


def test_every_tensor_is_replaced_wherever_it_lies() -> None:
    one = torch.ones(2)
    state = {"a": [one, (one * 2, {"b": one * 3})], "d": deque([one * 4], maxlen=3), "o": OrderedDict(x=one * 5), 1: 2}
    changed = map_tensors(state, lambda t: -t)
    assert changed["a"][0].tolist() == [-1, -1]
    assert changed["a"][1][0].tolist() == [-2, -2]
    assert changed["a"][1][1]["b"].tolist() == [-3, -3]
    assert changed["d"][0].tolist() == [-4, -4] and changed["d"].maxlen == 3
    assert type(changed["o"]) is OrderedDict and changed["o"]["x"].tolist() == [-5, -5]
    assert changed[1] == 2
    assert one.tolist() == [1, 1] and state["a"][0] is one  # type: ignore[index]


def test_a_copy_is_independent_and_equal() -> None:
    state: dict[str, Any] = {
        "w": torch.arange(6.0).reshape(2, 3).t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3),
    }
    copy = to_host(state, boundary_event=None, copy=True)
    assert_same(copy, state)
    assert copy["w"].stride() == state["w"].stride()
    state["w"].zero_()
    assert copy["w"].sum() == 15


def test_without_copy_host_tensors_are_taken_as_they_are() -> None:
    tensor = torch.ones(2)
    assert to_host([tensor], boundary_event=None, copy=False)[0] is tensor


def test_tied_weights_stay_tied_in_a_copy() -> None:
    """`state_dict` gives a new tensor object for each name of a tied weight; they must be stored once all the same."""
    embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    head.weight = embedding.weight
    state = nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()
    copy = to_host(state, boundary_event=None, copy=True)
    assert copy["embedding.weight"] is copy["head.weight"]
    assert len(flatten(copy)[1]) == 1


def test_neighbours_in_one_storage_are_not_tied() -> None:
    block = torch.arange(12.0)
    state = {"a": block[:4], "b": block[4:8], "c": block[:4].view(2, 2), "d": torch.empty(0), "e": torch.empty(0, 2)}
    assert_same(to_host(state, boundary_event=None, copy=True), state)


def test_a_conjugate_view_is_not_its_base() -> None:
    base = torch.tensor([1 + 2j])
    copy = to_host({"a": base, "b": base.conj()}, boundary_event=None, copy=True)
    assert copy["a"].item() == 1 + 2j and copy["b"].item() == 1 - 2j
