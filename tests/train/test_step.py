"""What a batch and an output are to a step."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from mindx_elastic.errors import UsageError
from mindx_elastic.train.step import batch_size, detach, move_batch, split_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def test_batches_of_all_shapes_are_moved() -> None:
    device = torch.device("meta")
    one = torch.ones(2)
    moved = move_batch([one, (one, "name"), {"a": one}, Pair(one, 3), OrderedDict(b=one)], device)
    assert moved[0].device == device
    assert moved[1][1] == "name"
    assert moved[2]["a"].device == device
    assert type(moved[3]) is Pair
    assert type(moved[4]) is OrderedDict


def test_what_is_input_and_what_is_target() -> None:
    assert split_batch([1, 2, 3]) == ((1, 2), {}, 3)
    assert split_batch({"x": 1}) == ((), {"x": 1}, {"x": 1})
    assert split_batch((1, 2), takes_targets=True) == ((1, 2), {}, None)
    assert split_batch("b", takes_targets=True) == (("b",), {}, None)
    for bad in (torch.ones(3), [torch.ones(3)]):
        with pytest.raises(UsageError, match="without targets"):
            split_batch(bad)
    assert batch_size({"a": [torch.ones(5, 2)]}) == 5
    assert batch_size([3, "x"]) == 1


def test_outputs_lose_their_graph_and_keep_their_form() -> None:
    one = torch.ones(2, requires_grad=True) * 2
    detached = detach((one, [one, "name"], {"a": one}, Pair(one, 3)))
    assert not any(value.requires_grad for value in (detached[0], detached[1][0], detached[2]["a"], detached[3].x))
    assert detached[1][1] == "name" and type(detached[3]) is Pair
