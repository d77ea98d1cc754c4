"""Texts that have much in common are read as `json` reads each of them, and their tensors are found as in each."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.persist.flatten import MAX_DEPTH, flatten
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.places import SharedPlaces, places_in, shape_of_node
from mindx_elastic.persist.shared_json import SharedJson
from mindx_elastic.persist.writer import write_checkpoint
from tests.checkpoint_files import info_of
from tests.persist import states

LONG = {f"layers.{number}.weight": {"$tensor": f"model.layers.{number}.weight"} for number in range(20)}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
_values = st.recursive(
    _plain, lambda inner: st.lists(inner) | st.dictionaries(st.text('ab$\\"é', max_size=3), inner), max_leaves=12
)
_long = st.sampled_from([LONG, {"state": LONG, "lr": 0.1}, {"state": LONG, "lr": 0.2}, [LONG, 1], [LONG]])
_texts = st.dictionaries(st.sampled_from(["model", "optimizer", "rng", "$map"]), _values | _long, max_size=4)


@given(st.lists(st.tuples(_texts | _values, st.sampled_from([compact, json.dumps])), min_size=1, max_size=6))
def test_each_is_read_as_json_reads_it(contents: list[tuple[Any, Any]]) -> None:
    shared = SharedJson()
    for content, write in contents:
        text = write(content)
        assert repr(shared.loads(text, "tree")) == repr(json.loads(text))


@given(_texts, st.data())
def test_a_damaged_text_is_judged_as_json_judges_it(content: Any, data: st.DataObject) -> None:
    """One that begins as a known one, and then goes on in another way."""
    shared, text = SharedJson(), compact(content)
    shared.loads(text, "tree")
    place = data.draw(st.integers(0, len(text)))
    damaged = (
        text[:place] + data.draw(st.text('{}[],:"\\ 1a', max_size=3)) + text[place + data.draw(st.integers(0, 2)) :]
    )
    try:
        expected = repr(json.loads(damaged))
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            shared.loads(damaged, "tree")
        return
    assert repr(shared.loads(damaged, "tree")) == expected


# --- the places of tensors in them ---


def test_numbers_as_keys_and_tied_tensors_have_a_place_each(tmp_path: Path) -> None:
    weight = torch.ones(4, 2)
    write_checkpoint(tmp_path / "x", {0: weight, 7: {8: weight}}, info_of())
    header = read_header(tmp_path / "x")
    places = places_in(header.tree).items()
    assert {place: shape_of_node(node, header) for place, node in places} == {"0": (4, 2), "7.8": (4, 2)} and len(
        header.entries
    ) == 1


def shared_places(shared: SharedJson, places: SharedPlaces, tree: Any) -> list[tuple[str, Any]]:
    read = shared.loads(compact(tree), "tree")
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
