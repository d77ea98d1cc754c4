"""Tells which batches the steps have used, where a loop fetches some ahead. Pure arithmetic.

A loop that fetches ahead (a batch primed before the loop and replaced after the forward, a prefetching generator) has,
at each boundary, fetched more than it has used. Two numbers describe it: the batches that a step uses (1, or more with
gradient accumulation), and those that are outstanding at a boundary, constant but for an epoch's end, where they drain.
Both follow from what was fetched up to the first two boundaries:

====================================  =====================  ======================================
fetched up to the first two           per step, ahead        for example
====================================  =====================  ======================================
1, 2                                  1, 0                   ``for batch in loader``
2, 3                                  1, 1                   ``X, Y = next(it)`` after the forward
2, 4                                  2, 0                   one step for two batches
3, 5                                  2, 1                   the same, with a prefetcher
====================================  =====================  ======================================

A first boundary with one batch is clear by itself. One with more is not, so the position is not known there.

Steps that take varying numbers of batches, two to begin with, look the same at first. `is_doubtful` tells of a later
step with another number: a loop that leaves batches out takes more, and all else stays as learned; where a step takes
fewer than `per_step`, what was learned is wrong, and nothing counts as fetched ahead any more.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Fetches", "LookAhead"]


class Fetches(NamedTuple):
    """What was asked of a loader up to some moment, since the process began to train."""

    handed: int = 0
    """Batches that the program has got."""
    asked: int = 0
    """The same, and the requests that the end of an epoch has answered."""
    iteration: int = 0
    """Number of the newest iteration, from 1."""
    exhausted: bool = False
    """The newest iteration has given all it had."""
    dropped: Fetches | None = None
    """The same when an iteration was last given up before its end: what it had handed out is not outstanding."""


class LookAhead:
    """One per loader. Call `at_boundary` at every boundary; `used` is then the number of batches that steps have used.

    `ahead` and `per_step` are known at once where a checkpoint has them.
    """

    def __init__(self, ahead: int | None = None, per_step: int = 1) -> None:
        self.ahead = ahead
        """Batches outstanding at a boundary; None: not known yet."""
        self.per_step = per_step
        self.used = 0
        self._base = Fetches()
        self._first: Fetches | None = None
        self._last: Fetches | None = None  # at the boundary before
        self.is_doubtful = False
        """A step in the middle of an epoch took another number of batches than was learned."""

    def pass_over(self, seen: Fetches) -> None:
        """What was fetched so far belongs to no step, as in an evaluation: learn from what follows."""
        if self.ahead is None:
            self._base, self._first, self.used = seen, None, seen.handed

    def at_boundary(self, seen: Fetches) -> bool:
        """A step has ended. Returns whether `used` is known."""
        if self.ahead is None and not self._learn(seen):
            return False
        if self.ahead:
            self._compare(seen)
        self.used = self.used_by(seen)
        return True

    def _compare(self, seen: Fetches) -> None:
        last, self._last = self._last, seen
        if last is None or last.iteration != seen.iteration or last.exhausted or seen.exhausted:
            return
        taken = seen.handed - last.handed
        if taken != self.per_step and seen.dropped == last.dropped:
            self.is_doubtful = True
            if 0 < taken < self.per_step:
                self.ahead = 0

    def used_by(self, seen: Fetches) -> int:
        """What `used` would be if a step ended now."""
        if not self.ahead:
            return seen.handed
        used = max(self.used, seen.handed - self.ahead)
        if seen.exhausted:  # they drain
            used = max(used, self.used + self.per_step)
        return min(used, seen.handed)

    def take_all_as_used(self, seen: Fetches) -> None:
        """The training ends before the second boundary: what was fetched was used."""
        if self.ahead is None:
            self.used = seen.handed

    def _learn(self, seen: Fetches) -> bool:
        if seen.dropped is not None and seen.dropped.handed > self._base.handed:
            self._base, self._first = seen.dropped, None
        base, first = self._base, self._first
        handed, asked = seen.handed - base.handed, seen.asked - base.asked
        if handed == 0:
            return True
        if handed == 1:
            if seen.exhausted:  # nothing was left to fetch ahead: the next epoch tells
                self._base = seen
            else:
                self.ahead = 0
            return True
        if first is None:
            self._first = seen
            return False
        had, per_step = first.handed - base.handed, seen.handed - first.handed
        if seen.iteration == first.iteration == base.iteration + 1:
            # Requests count like batches: of an epoch of two batches, a loop that reads one ahead asks for three.
            had, per_step = first.asked - base.asked, asked - (first.asked - base.asked)
            if per_step == 0:  # all at once, then one a step: list(loader), or a long queue
                per_step = 1 if first.exhausted else had
        self.per_step = max(1, min(per_step, had))
        self.ahead = had - self.per_step
        self.used = base.handed + min(self.per_step, first.handed - base.handed)
        return True
