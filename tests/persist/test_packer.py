"""The small state of one boundary after another: what is read is what was packed, whatever shapes it has in between."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.errors import CorruptCheckpointError, UnsupportedStateError
from mindx_elastic.persist.packer import SectionPacker, StatePacker, unpack_sections
from tests.persist.states import assert_same

_KEYS = st.text(max_size=5)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.builds(lambda size, value: torch.full((size,), value), st.integers(0, 3), st.integers(0, 5)),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(st.integers(0, 5), max_size=2),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_TREES, min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_any_states_one_after_the_other(states: list[Any], order: list[int]) -> None:
    own, whole = SectionPacker("part"), StatePacker("plain")
    for number in order:
        state = states[number % len(states)]
        assert_same(unpack_sections(b"".join(own.pack(state))), {"part": state})
        both = {"a": state, "last": {"n": number}, "plain": {"x": state, "y": number}}
        assert_same(unpack_sections(whole.pack(both)), both)


NAN = struct.unpack("<d", bytes.fromhex("0100000000000cff".rjust(16, "0"))[::-1])[0]


@pytest.mark.parametrize(
    "pair",
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (math.nan, NAN),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        (1, 1 << 64),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(4)[::2]),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (torch.zeros(0), torch.zeros(0, 3)),
    ],
    ids=str,
)
def test_a_state_that_only_looks_the_same(pair: tuple[Any, Any]) -> None:
    for nested in (lambda value: value, lambda value: {"k": [1, value, 2.5, "s"]}):
        section = SectionPacker("part")
        for value in (*pair, *pair, pair[1]):
            assert_same(unpack_sections(b"".join(section.pack(nested(value)))), {"part": nested(value)})


def test_a_shape_that_changes_now_and_then_is_worked_out_each_time() -> None:
    packer, record = StatePacker("plain"), b""
    for number in range(30):
        for _ in range(2):
            record = packer.pack({"rng": [1] * number})
    assert b'"shape"' in record


def test_the_shape_of_what_is_never_changed_in_place_is_worked_out_once() -> None:
    """As of generators that each step draws from."""
    packer, calls = StatePacker(frozen="rng"), list[int]()
    for step in range(3):
        state = {"rng": {"words": step.to_bytes(2500, "little"), "gauss": 0.5}, "step": step}
        calls.append(0)
        sys.setprofile(lambda _, event, __: calls.append(calls.pop() + (event == "call")))
        try:
            packed = packer.pack(state)
        finally:
            sys.setprofile(None)
        assert unpack_sections(packed) == state
    assert calls[2] <= calls[1] < calls[0] / 2


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedStateError, match=r"inner: value of type builtins\.object"):
        StatePacker("plain").pack({"a": {"inner": object()}})


def _section(content: Any, body: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + body


WHOLE = StatePacker("plain").pack({"a": {"n": 1, "t": torch.ones(4)}, "plain": {"x": [1.5, b"abc"]}})


def test_cut_off() -> None:
    between = len(b"".join(SectionPacker().pack({"a": {"n": 1, "t": torch.ones(4)}})))  # the ring's digest is over both
    for size in {*range(len(WHOLE))} - {between}:
        with pytest.raises(CorruptCheckpointError):
            unpack_sections(WHOLE[:size])


@pytest.mark.parametrize(
    "data",
    [
        WHOLE + b"\0",
        _section({"tree": 1, "tensors": []}),
        _section({"at": [], "tree": 1, "tensors": []}),
        _section({"at": ["a"], "shape": {"$blob": 0}, "numbers": "", "blobs": [-1]}),
        _section({"at": ["a"], "shape": {"$blob": 0}, "numbers": "", "blobs": [["int64", [1 << 40]]]}),
        _section({"at": ["a"], "shape": 1, "numbers": "s", "blobs": []}, b"x"),
        _section({"at": ["a"], "shape": 1}),
        _section({"at": 5, "shape": 1, "numbers": "", "blobs": []}),
        _section({"at": ["a"], "shape": 1, "numbers": "", "blobs": []})
        + _section({"at": ["a", "b"], "shape": 1, "numbers": "", "blobs": []}),
        *map(_section, ([], None, 3, "text", {}, {"at": ["a"], "tree": 1}, {"at": ["a"], "tree": 1, "tensors": 5})),
        *(
            _section({"at": ["a"], "tree": 1, "tensors": [entry]})
            for entry in (1, ["a", "F32"], ["a", "X9", [1]], [["a"], "U8", []])
        ),
        *(
            _section({"at": ["a"], "tree": 1, "tensors": [["a", "F64", shape]]})
            for shape in ([-1], [2**80], [2**40, 2**40])
        ),
        *(_section({"at": ["a"], "tree": tree, "tensors": []}) for tree in ({"$tensor": "a"}, {"$what": 1})),
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        unpack_sections(data)
