"""After an error the variables of the calls that it has ended are given up at once, also where they were looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from mindx_elastic.guard.running import _end_frames


def closing(closed: list[str]) -> Iterator[int]:
    try:
        yield 1
    finally:
        closed.append("closed")


def train(closed: list[str], *, looks: bool) -> None:
    batches = closing(closed)
    for _ in batches:
        if looks:
            assert "batches" in sys._getframe().f_locals
        raise RuntimeError("a rank has died")


@pytest.mark.parametrize("looks", [False, True])
def test_a_generator_ends_before_the_connections_are_new(looks: bool) -> None:
    closed: list[str] = []
    with pytest.raises(RuntimeError, match="died") as caught:
        train(closed, looks=looks)
    assert not closed
    _end_frames(caught.value)
    assert closed == ["closed"]
