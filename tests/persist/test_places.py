"""Where tensors stand in a file's tree, by the names that people and strategies use."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.persist.flatten import MAX_DEPTH, flatten
from mindx_elastic.persist.format import Header, read_header
from mindx_elastic.persist.places import SharedPlaces, places_in, shape_of_node
from mindx_elastic.persist.shared_json import SharedJson
from mindx_elastic.persist.writer import write_checkpoint
from tests.persist import states
from tests.persist.test_reader import INFO


def header_of(folder: Path, state: object) -> Header:
    path = folder / "x.safetensors"
    write_checkpoint(path, state, INFO)
    return read_header(path)


def shapes(header: Header) -> dict[str, tuple[int, ...]]:
    return {place: shape_of_node(node, header) for place, node in places_in(header.tree).items()}


def test_model_and_optimizer(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    header = header_of(tmp_path, {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "n": 3})
    found = shapes(header)
    assert {place for place in found if place.startswith("model.")} == {f"model.{n}" for n in network.state_dict()}
    assert found["model.0.weight"] == found["optimizer.state.0.exp_avg"] == (2, 3)
    assert found["optimizer.state.3.step"] == ()
    assert len(found) == 7 + 4 * 3, "what is not a tensor has no place"


def test_numbers_as_keys_and_tied_tensors_have_a_place_each(tmp_path: Path) -> None:
    weight = torch.ones(4, 2)
    header = header_of(tmp_path, {0: weight, 7: {8: weight}})
    assert shapes(header) == {"0": (4, 2), "7.8": (4, 2)} and len(header.entries) == 1


def shared_places(shared: SharedJson, places: SharedPlaces, tree: Any) -> list[tuple[str, Any]]:
    read = shared.loads(json.dumps(tree, separators=(",", ":")), "tree", lambda *_: None)
    return [item for part, _ in places.parts_of(read) for item in part.items()]


@settings(max_examples=60, deadline=None)
@given(
    trees=st.lists(st.dictionaries(st.sampled_from(["a", "b", "rng", "$map"]), states.states, max_size=3), max_size=4)
)
def test_trees_looked_through_together_have_the_same_places(trees: list[dict[str, Any]]) -> None:
    shared = SharedJson()
    places = SharedPlaces(shared, without=["rng"])
    for state in trees:
        tree, _ = flatten({**state, "model": {f"layer.{number}": torch.ones(1) for number in range(9)}})
        expected = [item for item in places_in(tree).items() if item[0].partition(".")[0] != "rng"]
        assert shared_places(shared, places, tree) == expected


@pytest.mark.parametrize(
    "tree",
    [
        reduce(lambda inner, _: {"a": inner}, range(10 * MAX_DEPTH), dict[str, Any]({"$tensor": "t"})),
        {"$tensor": 3},
        {"$tensor": ["x"]},
        {"$map": [3, [1], ["a", 1, 2], [[1], {"$tensor": "x"}]]},
        {"$unknown": {"$tensor": "x"}},
    ],
    ids=["bottomless", "a number", "a list", "odd pairs", "unknown"],
)
def test_a_tree_that_says_nonsense_or_has_no_bottom_has_no_places(tree: Any) -> None:
    assert places_in({"here": tree}) == {}
