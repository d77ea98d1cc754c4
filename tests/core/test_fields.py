"""Data classes out of JSON of others: what was written is read, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.fields import Between, Text, Words, read


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    name: Annotated[str, Text(8, "[a-z]*")]
    number: int = 7


@dataclass(frozen=True)
class Whole:
    code: Annotated[int, Between(-3, 255)]
    seconds: Annotated[float, Between(0, 10)]
    flag: bool
    how: Literal["done", "left"]
    colour: Colour
    part: Part
    other: Part | None
    pair: tuple[str, int]
    many: tuple[int, ...]
    by_rank: Mapping[int, list[Part]]
    folder: Path
    why: Annotated[str, Words(20)] = ""
    score: float = 0.0


PARTS = st.builds(Part, st.text("abc", max_size=8), st.integers(0, 1 << 60))
WHOLES = st.builds(
    Whole,
    code=st.integers(-3, 255),
    seconds=st.floats(0, 10),
    flag=st.booleans(),
    how=st.sampled_from(["done", "left"]),
    colour=st.sampled_from(Colour),
    part=PARTS,
    other=st.none() | PARTS,
    pair=st.tuples(st.text(), st.integers(0, 5)),
    many=st.lists(st.integers(0, 1 << 60)).map(tuple),
    by_rank=st.dictionaries(st.integers(0, 1 << 20), st.lists(PARTS)),
    folder=st.just(Path("/a/b")),
    why=st.text("abc", max_size=20),
    score=st.floats(allow_nan=False, allow_infinity=False),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def content_of(whole: Whole) -> dict[str, Any]:
    found = {**asdict(whole), "colour": whole.colour.value, "folder": str(whole.folder)}
    return dict(json.loads(json.dumps(found)))


@settings(max_examples=50)
@given(WHOLES, st.data())
def test_what_was_written_is_read_and_anything_else_in_a_field_is_of_its_type_or_an_error(
    whole: Whole, data: st.DataObject
) -> None:
    content = content_of(whole)
    assert read(Whole, {**content, "of a later version": 1}) == whole
    name = data.draw(st.sampled_from(sorted(content.keys() - {"why"})))  # words that were escaped are longer
    change = data.draw(JSON)
    try:
        found = read(Whole, {**content, name: change})
    except ValueError:
        return
    assert read(Whole, content_of(found)) == found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"code": 256}, "its code is not a whole number from -3 to 255"),
        ({"seconds": float("nan")}, "its seconds is not a number from 0 to 10"),
        *(({"score": value}, "its score is not a number from -1.79769e") for value in (10**400, math.inf, math.nan)),
        ({"part": {"name": "A"}}, "its name 'A' is not a valid text of at most 8 characters"),
        ({"part": {}}, "it has no name"),
        ({"how": ["done"]}, "its how is none of done, left"),
        ({"pair": ["a"]}, "its pair has 1 parts instead of 2"),
        ({"by_rank": {"x": []}}, "its by_rank is not a whole number"),
    ],
)
def test_an_error_says_which_field_and_what_it_may_be(change: dict[str, Any], why: str) -> None:
    good: dict[str, Any] = {"code": 0, "seconds": 1, "flag": True, "how": "done", "colour": "red", "many": []}
    good |= {"part": {"name": ""}, "other": None, "pair": ["a", 1], "by_rank": {}, "folder": "/"}
    assert read(Whole, good).part == Part("", 7)
    with pytest.raises(ValueError, match=f"^{why}"):
        read(Whole, {**good, **change})


def test_words_are_cut_and_escaped() -> None:
    @dataclass
    class Said:
        why: Annotated[str, Words(5)]

    assert read(Said, {"why": "a\x1bbcdefgh"}) == Said("a\\x1bbcd")
