"""The fast way through a header's text never says anything else than the slow one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.persist.dtypes import NAMES
from mindx_elastic.persist.entries import described_by, entries_of, entries_of_own_text, entry_texts, place_tensors

NAME = st.text(st.characters(codec="utf-8"), max_size=6)
SHAPE = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(NAME, st.tuples(SHAPE, st.sampled_from(list(NAMES))), max_size=6)


def text_of(tensors: dict[str, Any]) -> str:
    """As it is in a header, behind the metadata."""
    made = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    return "".join(f",{text}" for text in entry_texts(place_tensors(made))) + "}   "


def slowly(text: str) -> Any:
    """What the checks of each tensor say, or None where they refuse it."""
    try:
        return list(entries_of(json.loads("{" + text.removeprefix(","))).items())
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


@given(TENSORS)
def test_both_ways_give_the_same(tensors: dict[str, Any]) -> None:
    text = text_of(tensors)
    found = entries_of_own_text(text)
    if tensors and all(name.isascii() and name.isprintable() and not {*'"\\'} & {*name} for name in tensors):
        assert found is not None
    if found is not None:
        assert list(found.items()) == slowly(text)
    assert list(described_by(text).entries.items()) == slowly(text)


@given(TENSORS, st.randoms(use_true_random=False))
def test_a_text_that_is_not_sound_is_left_to_the_checks(tensors: dict[str, Any], chance: random.Random) -> None:
    text = text_of(tensors)
    for _ in range(20):
        place = chance.randrange(len(text) + 1)
        what = chance.choice(["", *'0129,:"{}[]-. \\', '"F32"', "null", ',"a":1', text[place : place + 30]])
        damaged = text[:place] + what + text[place + chance.choice([0, 1, 1, 3]) :]
        found = entries_of_own_text(damaged)
        if found is not None:
            assert list(found.items()) == slowly(damaged)


@pytest.mark.parametrize(
    "text",
    [
        ',"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        ',"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        ',"a":{"dtype":"X32","shape":[2],"data_offsets":[0,8]}}',
        ',"a":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}',
        ',"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},}',
        ',"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',
        ',"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}',
        f',"a":{{"dtype":"U8","shape":[{",".join("1" * 65)}],"data_offsets":[0,1]}}}}',
    ],
)
def test_what_the_fast_way_leaves_alone(text: str) -> None:
    assert entries_of_own_text(text) is None
