"""Messages are cut out of any pieces of their bytes, and other bytes are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.core.frames import FrameError, Frames, frame

MOST = 100


@given(st.lists(st.binary(max_size=MOST), max_size=5), st.lists(st.integers(1, 50), min_size=1))
def test_contents_come_as_they_were_sent_in_pieces_of_any_size(contents: list[bytes], sizes: list[int]) -> None:
    data, frames = b"".join(map(frame, contents)), Frames(MOST)
    found: list[bytes] = []
    while data:
        for size in sizes:
            found += frames.feed(data[:size])
            data = data[size:]
    assert found == contents


@given(st.lists(st.binary(max_size=MOST), max_size=3), st.binary(min_size=8, max_size=200))
def test_other_bytes_are_refused_behind_what_was_whole(contents: list[bytes], rest: bytes) -> None:
    frames = Frames(MOST)
    assert list(frames.feed(b"".join(map(frame, contents)))) == contents
    with pytest.raises(FrameError):
        list(frames.feed(b"x" + rest))


@pytest.mark.parametrize("length", [MOST + 1, 2**32 - 1])
def test_a_receiver_takes_no_more_than_it_has_said(length: int) -> None:
    with pytest.raises(FrameError, match=f"{length} bytes"):
        list(Frames(MOST).feed(struct.pack(">4sI", frame(b"")[:4], length)))
