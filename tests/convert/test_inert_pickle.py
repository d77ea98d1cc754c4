from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.convert.inert_pickle import Table, read_inert
from tests.convert.samples import Marker


def plain(value: Any) -> Any:
    """As Python has it."""
    if isinstance(value, Table):
        return {plain(key): plain(item) for key, item in value.pairs}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return value


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(value=_values, protocol=st.sampled_from([3, 4, 5]))
@settings(max_examples=100, deadline=None)
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert plain(read_inert(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_runs(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"a": Marker(tmp_path / "mark")}, protocol)
    try:
        found = read_inert(data)
    except ValueError:  # text operations of the oldest protocol
        assert protocol == 0
    else:
        (made,) = found.by_text().values()
        assert str(made.called) == f"{os.name}.mkdir"
    assert not (tmp_path / "mark").exists()


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_inert(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_pickles(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"a": [torch.Size([1]), (1, 2.0)], "b": {1: "x"}}))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        read_inert(bytes(whole[: data.draw(st.integers(place, len(whole)))]))
