"""A state that is flattened with what is remembered of the one before, beside the same state flattened anew."""

from __future__ import annotations

import copy
import gc
import json
import random
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.persist.entries import place_tensors
from mindx_elastic.persist.flatten import Tree, flatten
from mindx_elastic.persist.format import CheckpointInfo, HeaderDraft
from mindx_elastic.persist.remembered_tables import RememberedTables, tree_text
from mindx_elastic.persist.unflatten import unflatten
from tests.persist.states import assert_same

INFO = CheckpointInfo(
    run_id="r",
    world_size=1,
    rank=0,
    step=3,
    epoch=1,
    step_in_epoch=3,
    batch_num=9,
    reason="",
    kind="periodic",
    created=1.0,
)


def adam() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 3}


def is_computed(state: Any) -> bool:
    """Whether it has a tensor that is stored otherwise than it lies in memory."""
    return any(v.is_neg() or v.is_conj() for v in state.get("model", {}).values())


def same_as_anew(state: Any, tables: RememberedTables) -> Tree:
    tree, tensors = flatten(state, tables)
    expected_tree, expected = flatten(state)
    assert tree == expected_tree
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        other = expected[name]
        assert tensor.data_ptr() == other.data_ptr() or is_computed(state)
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype and tensor.stride() == other.stride()
        assert tensor.requires_grad == other.requires_grad
    text = json.loads(tree_text(tree))
    assert text == json.dumps(expected_tree, separators=(",", ":"))
    assert_same(unflatten(json.loads(text), tensors), state)
    return tree


def test_a_state_of_the_same_kind_takes_over_the_trees_of_its_tables() -> None:
    tables = RememberedTables()
    first, second = same_as_anew(adam(), tables), same_as_anew(adam(), tables)
    assert first["model"] is second["model"]
    assert first["optimizer"]["state"] is second["optimizer"]["state"]


def freeze(state: dict[str, Any]) -> None:
    state["model"]["0.bias"].requires_grad_()


def make_parameter(state: dict[str, Any]) -> None:
    state["model"]["0.bias"] = torch.nn.Parameter(state["model"]["0.bias"])


def rename(state: dict[str, Any]) -> None:
    state["model"] = {name.replace("0.", "first."): value for name, value in state["model"].items()}


def reorder(state: dict[str, Any]) -> None:
    state["model"] = dict(reversed(state["model"].items()))


def retype(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][1]["exp_avg"] = state["optimizer"]["state"][1]["exp_avg"].double()


def retype_in_place(state: dict[str, Any]) -> None:
    state["model"]["0.weight"] = state["model"]["0.weight"].view(torch.int32)


def transpose(state: dict[str, Any]) -> None:
    state["model"]["0.weight"] = state["model"]["0.weight"].t().contiguous().t()


def spread_out(state: dict[str, Any]) -> None:
    state["model"]["0.bias"] = torch.zeros(8)[::2]


def resize(state: dict[str, Any]) -> None:
    state["model"]["0.bias"] = torch.ones(5)


def empty(state: dict[str, Any]) -> None:
    state["model"]["0.bias"] = torch.ones(0)


def tie(state: dict[str, Any]) -> None:
    state["model"]["2.bias"] = state["model"]["1.bias"]


def tie_a_part(state: dict[str, Any]) -> None:
    state["model"]["2.bias"] = state["model"]["1.bias"][:2]


def tie_across(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][1]["exp_avg"] = state["model"]["0.bias"]


def tie_to_what_comes_first(state: dict[str, Any]) -> None:
    rest = dict(state)
    state.clear()
    state.update({"ema": [rest["model"]["1.bias"]], **rest})


def share_a_name(state: dict[str, Any]) -> None:
    rest = dict(state)
    state.clear()
    state.update({"model.0.weight": torch.ones(2), **rest})


def negate(state: dict[str, Any]) -> None:
    state["model"]["0.bias"] = torch._neg_view(state["model"]["0.bias"])


def conjugate(state: dict[str, Any]) -> None:
    state["model"]["0.bias"] = torch.ones(4, dtype=torch.complex64).conj()


def half(state: dict[str, Any]) -> None:
    model = state["model"].items()
    state["model"] = {name: value.bfloat16() if value.is_floating_point() else value for name, value in model}


def forget_a_moment(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"][0]["exp_avg"]


def number_among_tensors(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["step"] = 3


def other_keys(state: dict[str, Any]) -> None:
    state["optimizer"]["state"] = {float(key): value for key, value in state["optimizer"]["state"].items()}


def true_for_one(state: dict[str, Any]) -> None:
    state["optimizer"]["state"] = {True if k == 1 else k: v for k, v in state["optimizer"]["state"].items()}


def odd_key(state: dict[str, Any]) -> None:
    state["optimizer"]["state"] = {(0, key): value for key, value in state["optimizer"]["state"].items()}


def dollar_inside(state: dict[str, Any]) -> None:
    for values in state["optimizer"]["state"].values():
        values["$m"] = values["exp_avg"].clone()


def dollar(state: dict[str, Any]) -> None:
    state["model"]["$tensor"] = torch.ones(2)


def drop_a_parameter(state: dict[str, Any]) -> None:
    del state["optimizer"]["state"][3]


CHANGES = [
    freeze,
    make_parameter,
    rename,
    reorder,
    retype,
    retype_in_place,
    transpose,
    spread_out,
    resize,
    empty,
    tie,
    tie_a_part,
    tie_across,
    tie_to_what_comes_first,
    share_a_name,
    negate,
    conjugate,
    half,
    forget_a_moment,
    number_among_tensors,
    other_keys,
    true_for_one,
    odd_key,
    dollar_inside,
    dollar,
    drop_a_parameter,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change: Any) -> None:
    tables = RememberedTables()
    same_as_anew(adam(), tables)
    changed = adam()
    change(changed)
    same_as_anew(changed, tables)
    same_as_anew(changed, tables)
    again = adam()
    change(again)
    same_as_anew(again, tables)
    same_as_anew(adam(), tables)


@settings(max_examples=25)
@given(st.lists(st.sets(st.sampled_from(range(len(CHANGES))), max_size=3), max_size=5), st.randoms())
def test_any_series_of_changes_shows(series: list[set[int]], order: random.Random) -> None:
    tables = RememberedTables()
    for numbers in series:
        state = adam()
        for number in order.sample(sorted(numbers), len(numbers)):
            try:
                CHANGES[number](state)
            except (KeyError, RuntimeError, TypeError):  # does not go with the one before
                continue
        same_as_anew(state, tables)
        same_as_anew(state, tables)


def test_a_sparse_tensor_is_refused_as_ever() -> None:
    tables = RememberedTables()
    flatten(state := adam(), tables)
    state["model"]["0.weight"] = state["model"]["0.weight"].to_sparse()
    with pytest.raises(UnsupportedStateError, match="sparse"):
        flatten(state, tables)


def test_headers_are_those_of_states_flattened_anew() -> None:
    tables = RememberedTables()
    for _ in range(3):
        state = adam()
        tree, tensors = flatten(state, tables)
        draft = HeaderDraft(place_tensors(tensors))
        assert draft.header(INFO, tree) == draft.header(INFO, flatten(state)[0])


def test_what_is_remembered_keeps_no_tensor_alive() -> None:
    tables = RememberedTables()
    state = adam()
    there = weakref.ref(state["optimizer"]["state"][0]["exp_avg"].untyped_storage())
    assert there() is not None, "it lives as long as its tensor"
    flatten(state, tables)
    flatten(state, tables)
    del state
    gc.collect()
    assert there() is None


def test_keys_that_are_equal_and_not_the_same() -> None:
    tables = RememberedTables()
    values = [torch.ones(2) * n for n in range(4)]
    for keys in (
        [0, 1, 2, 3],
        [0, True, 2, 3],
        [0.0, 1, 2, 3],
        [-0.0, 1, 2, 3],
        [(0, 1), 1, 2, 3],
        [(0.0, True), 1, 2, 3],
    ):
        same_as_anew({"model": dict(zip(keys, values, strict=True))}, tables)


def test_a_tensor_that_gets_other_memory_behind_the_snapshot_is_the_old_one_in_it() -> None:
    tables = RememberedTables()
    flatten(adam(), tables)
    state = adam()
    _, tensors = flatten(state, tables)
    live = state["model"]["0.weight"]
    before = live.data_ptr()
    live.data = torch.zeros(100)
    assert tensors["model.0.weight"].data_ptr() == before and tensors["model.0.weight"].shape == (4, 3)


def test_places_that_are_gone_are_forgotten() -> None:
    tables = RememberedTables()
    made = []
    for step in range(3):
        table = {str(n): torch.ones(n + 1) for n in range(4)}
        tree, _ = flatten({"cache": {str(step): table}}, tables)
        made.append(tree["cache"][str(step)])
    again, _ = flatten({"cache": {"0": {str(n): torch.ones(n + 1) for n in range(4)}}}, tables)
    assert again["cache"]["0"] == made[0] and again["cache"]["0"] is not made[0]


# --- parts without tensors ---


class ReprOfOne:
    def __repr__(self) -> str:
        return "1"


PARTS: list[Any] = [
    {"lr": 0.5, "betas": (0.9, 0.95), "names": ["a", "b"], "on": True, "none": None},
    {"lr": 1.0},
    {"lr": 1},
    {"lr": True},
    {"lr": -0.0},
    {"lr": 0.0},
    {"lr": float("nan")},
    {"lr": float("inf")},
    {"lr": 1 << 80},
    {"lr": "1.0"},
    {"lr": 10**5000},
    {"lr": -float("nan")},
    {"lr": ReprOfOne()},
    {"lr": np.float32(1.0)},
    {"lr": [1, 2]},
    {"lr": (1, 2)},
    {"lr": [1.0, 2]},
    {"lr": b"\x01\x02"},
    {"lr": bytearray(b"\x01\x02")},
    {"lr": np.array([1, 2], dtype=np.uint8)},
    {"lr": np.array([1, 2], dtype=np.int8)},
    {"lr": np.float64(1.0)},
    {"lr": torch.ones(2)},
    {"lr": {1, 2}},
    {"lr": OrderedDict(a=1)},
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    {1: "a"},
    {True: "a"},
    {"$tensor": "model"},
    {"deep": {"in": [{"it": [1, 2.0, "x"]}]}},
    {},
]


def test_a_part_of_plain_values_that_stays_the_same_is_taken_over() -> None:
    tables = RememberedTables()
    part = {"training": ["a", "b"], "frozen": [], "lr": 0.1, "betas": (0.9, 0.99)}
    trees = [same_as_anew({**adam(), "extras": copy.deepcopy(part)}, tables)["extras"] for _ in range(4)]
    assert trees[2] is trees[3]
    part["frozen"] = ["a"]
    assert same_as_anew({**adam(), "extras": part}, tables)["extras"] is not trees[3]


@pytest.mark.parametrize("before", range(len(PARTS)))
def test_a_part_of_other_values_is_not_taken_for_the_same(before: int) -> None:
    for after in PARTS:
        tables = RememberedTables()
        for part in (PARTS[before], PARTS[before], PARTS[before], after, after, after):
            state = {"part": part, "model": {"weight": torch.ones(2)}}
            assert made(state, tables) == made(state, None)


def made(state: Any, tables: RememberedTables | None) -> tuple[str, str, list[str]] | str:
    try:
        tree, tensors = flatten(state, tables)
    except UnsupportedStateError as error:
        return str(error)
    return json.dumps(tree), tree_text(tree), list(tensors)
