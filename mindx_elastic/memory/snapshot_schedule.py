"""When to take a snapshot: every N steps, or as often as costs less than one percent of the step time. Pure."""

from __future__ import annotations

from statistics import median

__all__ = ["SnapshotSchedule"]

_BUDGET = 0.0075  # of the step time: of the one percent that a guard may cost; a boundary needs some itself
_PLAIN_STEPS = 8  # measured before the first snapshot
_TRIALS = 5  # the first two get the memory of the slots as well
_LONGEST = 1 << 14


class SnapshotSchedule:
    """When to take a snapshot: every N steps, or as often as costs less than one percent of the step time.

    Pure. `due` and `note` belong to the training thread.

    All ranks must take the same steps, so an interval that was measured counts only after all ranks have agreed on it
    (`proposal`, `agree`); until then the trials are at fixed steps. Intervals are powers of two.
    """

    def __init__(self, every: int | None, *, start: int = 0) -> None:
        """`every` steps; 0: never; None: by measuring. `start`: the step that the attempt begins at."""
        self.every = every
        self._last = self.newest = start
        self._taken = -1
        self._boundaries = 0
        self._plain: list[float] = []
        self._trials: list[float] = []

    @property
    def synchronous(self) -> bool:
        """At every step: the step is not over before its snapshot is, or a kill would cost it."""
        return self.every == 1

    def due(self, step: int) -> bool:
        """Whether the boundary `step` is to be kept. Asked once more of the `newest`, which has got more that belongs
        to it: whether it was.

        Boundaries need not come at every step, nor at multiples of anything: inside an accumulation window there is
        none. So the first one in each stretch of N steps is due; on every rank the same.
        """
        if step == self.newest:
            return step == self._taken
        self._boundaries += 1
        if self.every is None:
            due = self._boundaries > _PLAIN_STEPS and self._boundaries % 4 == 0 and len(self._trials) < _TRIALS
        else:
            due = self.every > 0 and step // self.every > self._last // self.every
        self.newest = step
        if due:
            self._last = self._taken = step
        return due

    def note(self, step_s: float, *, extra: bool) -> None:
        """One step took `step_s` seconds; `extra`: it had a snapshot at its start."""
        if self.every is None:
            (self._trials if extra else self._plain).append(step_s)
            del self._plain[:-64]

    def proposal(self, copy_s: float = 0.0) -> int | None:
        """The interval that the measurements call for; None while there are not enough. `copy_s`: a snapshot's way to
        other nodes, which must be there in half of the interval, or the ranks would have no step in common."""
        if self.every is not None or len(self._trials) < _TRIALS or len(self._plain) < _PLAIN_STEPS:
            return None
        usual = max(median(self._plain), 1e-6)
        cost = max(0.0, median(self._trials) - usual)
        interval = 2  # 1 would mean synchronous
        while interval < _LONGEST and (cost > _BUDGET * usual * interval or 2 * copy_s > usual * interval):
            interval *= 2
        return interval

    def agree(self, proposals: list[int]) -> None:
        """What all ranks have proposed; the rarest is taken."""
        self.every = max(proposals)
        self._last = self.newest
