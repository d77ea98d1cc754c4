"""Sees whether the program draws random numbers for batches that it fetches ahead.

::

    for next_x, next_y in self.loader:           # a prefetcher, as timm writes it
        next_x = self.random_erasing(next_x)     # from the training's streams, in front of the step before its own
        if not first:
            yield x, y
        ...

At a boundary the streams are behind such draws, and a resumed run, which gets those batches again, draws for them once
more. No source tells it: the prefetcher may be a library's, and its draws in C. So a few fetches are looked at as a
debugger does, from where the loader gives a batch up to where the generator or function between it and the loop gives
it on. What the loop itself does with a batch belongs to its step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from mindx_elastic.capture.rng import capture_rng, moved_streams

__all__ = ["AheadDraws"]

_LOOKS = 3


class AheadDraws:
    """One per loader, from the boundary on at which it is found that the loop fetches ahead. Training thread."""

    def __init__(self) -> None:
        self.found: tuple[list[str], str] | None = None
        """The streams that have moved, and the function in which."""
        self._left = _LOOKS
        self._steps: set[tuple[int, object]] = set()  # the frames that run at a boundary
        self._iteration = 0
        self._watched: FrameType | None = None
        self._before: dict[str, Any] = {}

    def at_boundary(self, frame: FrameType | None, iteration: int) -> bool:
        """`frame`: that of the call. `iteration`: the number of the loader's. Returns whether more is to be seen."""
        self._end()
        self._steps, self._iteration = set(), iteration
        while frame is not None:
            self._steps.add((id(frame), frame.f_code))
            frame = frame.f_back
        return self._left > 0 and self.found is None

    def at_batch(self, frame: FrameType | None, iteration: int) -> None:
        """The loader gives a batch, in `frame`."""
        if self._left <= 0 or iteration != self._iteration or self._watched is not None or sys.gettrace() is not None:
            return
        below: FrameType | None = None  # the last one that is not in the loop
        while frame is not None and (id(frame), frame.f_code) not in self._steps:
            below, frame = frame, frame.f_back
        if frame is None or below is None or _is_ours(below):
            return  # the loop asks the loader itself
        self._left -= 1
        self._watched, self._before = below, capture_rng()
        below.f_trace, below.f_trace_lines = self._see, False
        sys.settrace(_trace_nothing)

    def _see(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event != "return":  # of a generator each yield is one
            return self._see
        moved = moved_streams(self._before, capture_rng())
        if moved and self.found is None:
            self.found = moved, f"{frame.f_code.co_name}() in line {frame.f_lineno}"
        self._end()
        return None

    def _end(self) -> None:
        watched, self._watched, self._before = self._watched, None, {}
        if watched is not None:
            watched.f_trace, watched.f_trace_lines = None, True
            if sys.gettrace() is _trace_nothing:
                sys.settrace(None)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("mindx_elastic", "torch")


def _trace_nothing(frame: FrameType, event: str, argument: object) -> None:
    """Frames that have no function of their own are not traced, but those that have one are while this is set."""
