"""Follows what a loader hands out, so that the position of what was *used* is known where batches are fetched ahead."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mindx_elastic.data.look_ahead import Fetches

__all__ = ["LoaderMark", "Track", "fetching"]

_FIRST = 3

fetching: set[int] = set()
"""Threads in which a followed loader is fetching: what a data set does with its own DataLoaders is its business."""


class LoaderMark(NamedTuple):
    """A position: what a loader's ``state_dict()`` holds besides its settings."""

    epoch: int
    batch: int
    samples: int
    finished: bool
    start: dict[str, Any] | None


class Track:
    """One per loader of a guard. Any one thread may fetch; the training thread asks."""

    def __init__(self) -> None:
        self.settings: Any = None
        """Sees what making batches changes on the data set (`guard.loops.data_settings`), from the first entry on."""
        self.count_from(None)

    def count_from(self, now: LoaderMark | None) -> None:
        """`now`: the loader's position as it is followed from here on; None: it is not."""
        self._marks: deque[LoaderMark] = deque(() if now is None else (now,))
        """After batch number `_oldest`, and after each one since."""
        self._oldest = 0
        self.keeps_marks = True
        """`use_all` has something to do."""
        self.handed = self.iterations = self._asked = 0
        """Batches handed out, and the number of the newest iteration."""
        self._exhausted = False
        self._dropped: Fetches | None = None
        self._first_batches: list[weakref.ref[torch.Tensor]] = []
        self.handed_before = self.boundaries = 0
        """Batches handed out up to the last boundary, and how many boundaries there were: set by the guard."""
        self._handed_at_begin = 0
        self._left_at_boundary = False
        self.ended_behind = self.left_behind = 0
        """After how many boundaries an iteration last came to its end, and one was last given up right after a step."""
        self.left_early = False
        """An epoch was left right after a boundary, with batches left."""
        self._thread = threading.get_ident()
        self.other_thread: str | None = None
        """The name of a thread that has fetched in parallel with the training thread."""
        self.at_next_ask: Callable[[], None] | None = None
        """Called once, when the training thread asks for another batch of this iteration."""
        self.at_every_ask: Callable[[], None] | None = None
        """Called in the training thread whenever a batch is asked for."""
        self.at_exhaustion: Callable[[], None] | None = None
        """Called when the training thread has asked for a batch in vain, and has got none since the last boundary."""

    @property
    def fetches(self) -> Fetches:
        return Fetches(self.handed, self._asked, self.iterations, self._exhausted, self._dropped)

    def mark_after(self, number: int) -> LoaderMark:
        """The position after `number` batches, which are at least those of the last `forget_before`."""
        return self._marks[number - self._oldest]

    def marks_from(self, number: int) -> list[LoaderMark]:
        """The same after that number of batches, and after each one since."""
        return list(self._marks)[number - self._oldest :]

    def forget_before(self, number: int) -> None:
        """Positions before that batch are not asked for again."""
        while self._oldest < number:
            self._marks.popleft()
            self._oldest += 1

    def use_all(self) -> None:
        """From now on all batches are used at each boundary, and no older position will be asked for."""
        self.keeps_marks = False
        self._marks.clear()

    @property
    def kept_batches(self) -> int:
        """How many of its first batches the program has kept, as far as that can be seen."""
        return sum(one() is not None for one in self._first_batches)

    # --- called by the loader ---

    def iteration_begins(self) -> None:
        """Its workers have no copy of the data set yet."""
        self.iterations += 1
        self.at_next_ask = None
        self._handed_at_begin = self.handed
        self.left_early |= self._left_at_boundary
        self._left_at_boundary = False

    def iteration_is_open(self) -> None:
        """They have one, and what was used of the epoch is skipped."""
        if self.settings is not None:
            self.settings.at_opened()

    def is_dropped(self) -> None:
        """The iteration was given up, and its epoch has more batches."""
        self._left_at_boundary = self.handed == self.handed_before
        if self._left_at_boundary:
            self.left_behind = self.boundaries
        self._dropped = Fetches(self.handed, self._asked, self.iterations)

    def is_asked(self) -> None:
        self._asked += 1
        thread = threading.get_ident()
        if thread != self._thread:
            self.other_thread = threading.current_thread().name
            return
        if self.at_every_ask is not None:
            self.at_every_ask()
        if self.at_next_ask is not None:
            look, self.at_next_ask = self.at_next_ask, None
            look()
        if self.settings is not None:
            self.settings.begin_making()

    def has_made(self, batch: Any) -> None:
        """The next batch to be handed out."""
        if (number := self.handed - self._handed_at_begin) < _FIRST:
            if not number:
                self._first_batches.clear()
            tensor = _some_tensor(batch)
            if tensor is not None:
                self._first_batches.append(weakref.ref(tensor))
        if self.settings is not None and threading.get_ident() == self._thread:
            self.settings.end_making()

    def hands_out(self, mark: Callable[[], LoaderMark]) -> None:
        """`mark` gives the position after this batch."""
        if self.keeps_marks:
            self._marks.append(mark())
        self.handed += 1
        self._exhausted = False  # not sooner: until then batches of the epoch before may still be used

    def has_ended(self, *, exhausted: bool) -> None:
        self._exhausted = exhausted
        if exhausted and self.handed == self.handed_before:
            self.ended_behind = self.boundaries
            if self.at_exhaustion is not None and threading.get_ident() == self._thread:
                self.at_exhaustion()


def _some_tensor(batch: Any) -> torch.Tensor | None:
    for _depth in range(4):
        if isinstance(batch, torch.Tensor):
            return batch
        if isinstance(batch, dict):
            batch = list(batch.values())
        if not isinstance(batch, (list, tuple)) or not batch:
            return None
        batch = batch[0]
    return None
