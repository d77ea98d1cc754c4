"""A pickle as data: plain values come back, and what is damaged is a ValueError."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.convert.inert_pickle import read_inert

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(value=_values, protocol=st.sampled_from([3, 4, 5]))
@settings(max_examples=100, deadline=None)
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert read_inert(pickle.dumps(value, protocol)) == value


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_pickles_and_any_bytes(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"a": [torch.Size([1]), (1, 2.0)], "b": {1: "x"}}))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    for damaged in (bytes(whole[: data.draw(st.integers(place, len(whole)))]), data.draw(st.binary(max_size=200))):
        with contextlib.suppress(ValueError):
            read_inert(damaged)
