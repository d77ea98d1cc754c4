"""Which ranks the others wait for, step by step. Pure.

In a synchronous job all ranks take the same time for a step, and each spends a part of it waiting for the others: the
slow one waits least. Each rank's last waits are in its status page (`StatusPage.note_wait`). Their quantiles are enough
to compare ranks, also of several nodes, whose clocks and looks differ.

A rank is one that the others wait for if more than half of them wait longer than it does, in nearly all of their last
`NUM_STEPS` steps (nine of ten of its own and of theirs), and by more than `LEAST_S` and `LEAST_SHARE` of the step. So
it is none where the work goes from rank to rank (batches of uneven length), in single long steps (a save, an
evaluation), and where half of the ranks or more are as slow as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindx_elastic.core.status_page import NUM_STEPS, Status, WorkerPhase

__all__ = ["LEAST_S", "LEAST_SHARE", "Pace", "SlowRank", "pace_of", "paces_of", "slow_ranks"]

LEAST_S, LEAST_SHARE = 0.005, 0.1
_FEW = NUM_STEPS // 10
"""Steps in which it may be otherwise."""


@dataclass(frozen=True)
class Pace:
    """One rank's last steps, in microseconds."""

    rank: int
    low: int
    """It has waited as long in nearly all of them."""
    middle: int
    """Median of its waits."""
    high: int
    """It has waited no longer in nearly all of them."""
    step: int
    """Median length of the steps."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for."""

    rank: int
    lag: int
    """Microseconds of nearly each step that more than half of the others wait longer than it does."""
    step: int

    def __str__(self) -> str:
        return (
            f"the others wait for rank {self.rank}, {self.lag / 1000:.0f} ms or more in nearly each of the last "
            f"{NUM_STEPS} steps of {self.step / 1000:.0f} ms"
        )


def pace_of(rank: int, status: Status) -> Pace | None:
    """None: its waits are not known in nearly all of so many steps."""
    waits = sorted(wait for wait in status.waits_ns if wait >= 0)
    if len(waits) < NUM_STEPS - _FEW:
        return None
    low, middle, high = waits[_FEW], waits[len(waits) // 2], waits[-1 - _FEW]
    step = sorted(status.steps_ns)[len(status.steps_ns) // 2]
    return Pace(rank, low // 1000, middle // 1000, high // 1000, step // 1000)


def paces_of(statuses: Mapping[int, Status]) -> tuple[Pace, ...]:
    """Of the ranks that train."""
    phases = (WorkerPhase.TRAINING, WorkerPhase.BETWEEN)
    found = (pace_of(rank, status) for rank, status in statuses.items() if status.phase in phases)
    return tuple(pace for pace in found if pace is not None)


def slow_ranks(paces: Iterable[Pace]) -> tuple[SlowRank, ...]:
    """The ranks of one job that the others wait for, the slowest first."""
    paces = list(paces)
    # More than half of the others wait as long in nearly all of their steps. Whoever waits less is not among those.
    bar = sorted((pace.low for pace in paces), reverse=True)[(len(paces) - 1) // 2] if len(paces) > 1 else 0
    found = [SlowRank(pace.rank, bar - pace.high, pace.step) for pace in paces]
    slow = [each for each in found if each.lag > max(1e6 * LEAST_S, LEAST_SHARE * each.step)]
    return tuple(sorted(slow, key=lambda each: -each.lag))
