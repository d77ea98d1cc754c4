"""State -> tree and tensors -> state, without a file."""

from __future__ import annotations

import enum
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from mindx_elastic.errors import CorruptCheckpointError, UnsupportedStateError
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten, unflatten
from tests.persist.states import assert_same, states


class Color(enum.IntEnum):
    RED = 1


class MyTensor(torch.Tensor):
    pass


def through_json(state: object) -> Any:
    tree, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(tree)), tensors)


@given(states)
def test_any_state_comes_back_as_it_was(state: object) -> None:
    assert_same(through_json(state), state)


def test_real_training_state_comes_back_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": {key: value for key, value in scheduler.state_dict().items() if not callable(value)},
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
    }
    back = through_json(state)
    assert_same(back, state)
    assert back["model"]._metadata == state["model"]._metadata, "load_state_dict() looks at the versions"
    assert back["optimizer"]["state"][0]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_a_part_of_a_transposed_matrix_keeps_the_order_of_its_axes() -> None:
    """As GaLore's projector, the first rows of what svd() gives. Products have other last bits in another order."""
    part = torch.arange(12.0).reshape(4, 3).t()[:2]
    back = through_json({"part": part, "same": part})
    assert back["part"].stride() == (1, 2)
    assert torch.equal(back["part"], part)
    assert back["same"] is back["part"]


def test_colliding_names_are_made_unique() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2)}
    tree, tensors = flatten(state)
    assert len(tensors) == 3
    assert "__metadata__" not in tensors
    assert_same(unflatten(tree, tensors), state)


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight, empty = torch.nn.Parameter(torch.randn(3, 3)), torch.empty(0)
    state = {"embed": weight, "head": weight, "view": weight.detach(), "other": weight.detach().clone()}
    tree, tensors = flatten({**state, "empty": [empty, torch.empty(0), empty]})
    assert len(tensors) == 4
    back = unflatten(tree, tensors)
    assert back["embed"] is back["head"]
    assert back["view"].data_ptr() == back["embed"].data_ptr()
    assert back["other"].data_ptr() != back["embed"].data_ptr()
    assert back["empty"][0] is back["empty"][2] and back["empty"][0] is not back["empty"][1]


def test_big_tensors_are_not_copied() -> None:
    weight = torch.randn(5, 7)
    (stored,) = flatten({"w": weight.t()})[1].values()
    assert stored.data_ptr() == weight.data_ptr()


def test_equal_sets_give_equal_trees() -> None:
    one, other = {0, 8}, {8, 0}  # they collide in a small hash table, so that the order of insertion shows
    assert list(one) != list(other)
    assert flatten(one) == flatten(other)


def _nested_too_deep() -> object:
    state: list[object] = []
    for _ in range(MAX_DEPTH + 1):
        state = [state]
    return state


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).as_subclass(MyTensor), "MyTensor"),
        (Color.RED, "Color"),
        (np.array([object()]), "object"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy"),
        ({torch.ones(1): 1}, r"part\.Tensor: a tensor cannot be a dictionary key"),
        (_nested_too_deep(), "deeper"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # the same in every process
)
def test_what_cannot_be_stored_is_named(value: object, says: str) -> None:
    with pytest.raises(UnsupportedStateError, match=says) as caught:
        flatten({"model": {"part": value}})
    assert caught.value.where.startswith("model.part")


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_are_named() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    for value, says in ((quantized, "quantized"), (nested, "nested")):
        with pytest.raises(UnsupportedStateError, match=says):
            flatten([value])


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "missing"},
        {"$tensor": "w", "dtype": "complex64"},
        {"$tensor": "w", "dtype": "float64"},
        {"$tensor": "w", "strides": [1, 1]},
        {"$tensor": "w", "strides": [-1]},
        {"$tensor": "i", "grad": True},
        {"$ndarray": "w", "dtype": "O8"},
        {"$ndarray": "w", "dtype": "<f8"},
        {"$ndarray": "w", "dtype": "<U3", "shape": [5]},
        {"$blob": "missing"},
        {"$unknown": 1},
        {"$default": [], "factory": "eval"},
        {"$map": [[1, 2], [1, 3]]},
        {"$map": [[[], 2]]},
        {"$set": [[]]},
        {"$int": "xyz"},
        {"$float": "00"},
        {"$complex": "zz"},
        {"$scalar": ["<f4", "00"]},
        {"$scalar": ["O", ""]},
        json.loads("[" * 150 + "]" * 150),
    ],
    ids=str,
)
def test_malformed_trees_are_a_named_error(tree: object) -> None:
    tensors = {"w": torch.ones(3), "i": torch.ones(3, dtype=torch.int32)}
    with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors: malformed state tree"):
        unflatten(tree, tensors, path="x.safetensors")
