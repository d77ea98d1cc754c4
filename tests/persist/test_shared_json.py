"""Texts that have much in common are read as `json` reads each of them, and share what they have in common."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.persist.shared_json import SharedJson

LONG = {f"layers.{number}.weight": {"$tensor": f"model.layers.{number}.weight"} for number in range(20)}


def no_check(value: Any, level: int, length: int) -> None:
    pass


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
        assert repr(shared.loads(text, "tree", no_check)) == repr(json.loads(text))


@given(_texts, st.data())
def test_a_damaged_text_is_judged_as_json_judges_it(content: Any, data: st.DataObject) -> None:
    """One that begins as a known one, and then goes on in another way."""
    shared, text = SharedJson(), compact(content)
    shared.loads(text, "tree", no_check)
    place = data.draw(st.integers(0, len(text)))
    damaged = (
        text[:place] + data.draw(st.text('{}[],:"\\ 1a', max_size=3)) + text[place + data.draw(st.integers(0, 2)) :]
    )
    try:
        expected = repr(json.loads(damaged))
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            shared.loads(damaged, "tree", no_check)
        return
    assert repr(shared.loads(damaged, "tree", no_check)) == expected


def test_a_part_is_checked_until_it_is_sound() -> None:
    def refuse(value: Any, level: int, length: int) -> None:
        raise ValueError("too deep")

    shared = SharedJson()
    assert (
        shared.loads(compact({"model": LONG}), "tree", no_check)["model"]
        is shared.loads(compact({"model": LONG, "lr": 1}), "tree", refuse)["model"]
    ), "what was checked is known"
    for _ in range(2):
        with pytest.raises(ValueError, match="too deep"):
            shared.loads(compact({"model": [LONG]}), "tree", refuse)
