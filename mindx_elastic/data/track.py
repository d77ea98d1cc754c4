"""Follows what a loader hands out, so that the position of what was *used* is known where batches are fetched ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from mindx_elastic.data.look_ahead import Fetches

__all__ = ["Mark", "Track"]


class Mark(NamedTuple):
    """A position: what a loader's ``state_dict()`` holds beside its settings."""

    epoch: int
    batch: int
    samples: int
    finished: bool
    start: dict[str, Any] | None


class Track:
    """One per loader while a guard is entered. Any one thread may fetch; the training thread asks."""

    def __init__(self, now: Mark) -> None:
        """`now`: the loader's position."""
        self._marks: deque[Mark] = deque([now])  # after batch number `_oldest`, and after each one since
        self._oldest = 0
        self._keeps_marks = True
        self._handed = self._asked = self._iterations = 0
        self._exhausted = False
        self._thread = threading.get_ident()
        self.other_thread: str | None = None
        """The name of a thread that has fetched beside the training thread."""

    @property
    def fetches(self) -> Fetches:
        return Fetches(self._handed, self._asked, self._iterations, self._exhausted)

    def mark_after(self, number: int) -> Mark:
        """The position after `number` batches, which are at least those of the last `forget_before`."""
        return self._marks[number - self._oldest]

    def forget_before(self, number: int) -> None:
        """Positions before that batch are not asked for again."""
        while self._oldest < number:
            self._marks.popleft()
            self._oldest += 1

    def forget_all(self) -> int:
        """No position will be asked for. Returns how many batches were handed out."""
        self._keeps_marks = False
        self._marks.clear()
        return self._handed

    # --- called by the loader ---

    def begin(self) -> None:
        self._iterations += 1

    def ask(self) -> None:
        self._asked += 1
        if threading.get_ident() != self._thread:
            self.other_thread = threading.current_thread().name

    def hand_out(self, mark: Callable[[], Mark]) -> None:
        """`mark` gives the position after this batch."""
        if self._keeps_marks:
            self._marks.append(mark())
        self._handed += 1
        self._exhausted = False  # not sooner: until then batches of the epoch before may still be used

    def end(self, *, exhausted: bool) -> None:
        self._exhausted = exhausted
