"""A packed state is the state, bit for bit; anything else is a named error."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.packed import pack_state, unpack_section
from tests.persist.states import assert_same, states

STATE = {"rng": torch.arange(9, dtype=torch.uint8), "nested": [1, (2.5, "x")], "w": torch.ones(2, 3).t()}


def packed(state: object) -> bytes:
    return b"".join(pack_state(state))


def unpacked(data: bytes) -> Any:
    at, state, end = unpack_section(data, 0)
    assert at == [] and end == len(data)
    return state


@given(states)
def test_any_state_comes_back(state: Any) -> None:
    assert_same(unpacked(packed(state)), state)


def test_pieces_look_into_the_state_and_the_result_does_not() -> None:
    tensor = torch.zeros(1000)
    pieces = pack_state({"t": tensor})
    data = b"".join(pieces)
    tensor.fill_(1.0)
    assert bytes(pieces[1]) == tensor.numpy().tobytes(), "not copied"
    again = unpacked(data)["t"]
    again.add_(5.0)
    assert unpacked(data)["t"].sum() == 0


def test_cut_off_at_every_byte() -> None:
    data = packed(STATE)
    for size in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="malformed packed state"):
            unpack_section(data[:size], 0)


@given(st.data())
def test_a_changed_byte_is_another_state_or_a_named_error(data: st.DataObject) -> None:
    """Whoever keeps it keeps a digest too; here nothing but a named error may come out."""
    raw = bytearray(packed(STATE))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CorruptCheckpointError):
        unpack_section(bytes(raw), 0)


@pytest.mark.parametrize(
    "content",
    [
        *(
            None,
            3,
            [],
            "text",
            {},
            {"tree": 1},
            {"tensors": []},
            {"tree": 1, "tensors": 5},
            {"tree": 1, "tensors": [1]},
        ),
        *({"tree": 1, "tensors": [["a", "F32"]]}, {"tree": 1, "tensors": [["a", "X9", [1]]]}),
        *({"tree": 1, "tensors": [["a", "F32", [-1]]]}, {"tree": 1, "tensors": [["a", "F32", [2**80]]]}),
        *({"tree": 1, "tensors": [[["a"], "U8", []]]}, {"tree": 1, "tensors": [["a", "F64", [2**40, 2**40]]]}),
        *({"tree": {"$tensor": "a"}, "tensors": []}, {"tree": {"$what": 1}, "tensors": []}),
    ],
)
def test_a_wrong_table_of_contents(content: Any) -> None:
    text = json.dumps(content).encode()
    with pytest.raises(CorruptCheckpointError):
        unpack_section(struct.pack("<Q", len(text)) + text, 0)
