"""Which faults come one after another in one job, and what of the job belongs to which of them (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from mindx_elastic.drill.faults import Fault
from mindx_elastic.prove.records import Life

__all__ = ["GAP", "Share", "Start", "divide", "make_rows"]

GAP = 3
"""Steps between two faults of one job, at least: several ranks may stop one step later than asked for, and a job must
have gone on from one fault before the next one."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job."""

    code: int
    fired: Sequence[int]
    """Which faults have happened in it, by their numbers in the row."""
    left: Sequence[str] = ()
    """Processes that have outlived it."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one fault has made of the job: until the next one happened."""

    begin: float
    """`time.monotonic` when it happened. The first fault answers for all that was before it, too."""
    end: float
    """When the next one happened; infinity: it was the last."""
    codes: Sequence[int] = ()
    """Exit codes of the starts in which the job was busy with it."""
    left: Sequence[str] = ()
    lives: Sequence[Life] = field(default=(), repr=False)
    """The processes, with their steps of this time only."""
    until: Sequence[Life] = field(default=(), repr=False)
    """All processes that had begun by its end, with all steps until then."""

    @property
    def is_last(self) -> bool:
        return self.end == float("inf")


def make_rows(faults: Iterable[Fault], most: int) -> list[list[Fault]]:
    """At most `most` faults a job, in the order in which they can happen: each one in the first row that has room."""
    rows: list[list[Fault]] = []
    for fault in faults:
        for row in rows:
            if len(row) < most and (joined := _with(row, fault)) is not None:
                row[:] = joined
                break
        else:
            rows.append([fault])
    return rows


def _with(row: Sequence[Fault], fault: Fault) -> list[Fault] | None:
    joined = sorted([*row, fault], key=lambda each: (each.guard, each.boundaries_before))
    for one, other in pairwise(joined):
        # Shared memory is asked for when a process starts.
        is_late = other.kind == "full-memory"
        if is_late or (one.guard == other.guard and other.boundaries_before - one.boundaries_before < GAP):
            return None
    return joined


def divide(
    notes: Sequence[Mapping[str, Any] | None], starts: Sequence[Start], lives: Sequence[Life]
) -> list[Share | None]:
    """The share of each fault. `notes`: when each has happened; None: it has not, and has no share."""
    happened = [number for number, note in enumerate(notes) if note is not None]
    clocks = {number: float(note["clock"]) for number, note in enumerate(notes) if note is not None}
    starts_of = {number: at for at, start in enumerate(starts) for number in start.fired}
    shares: list[Share | None] = [None] * len(notes)
    for place, number in enumerate(happened):
        following = happened[place + 1] if place + 1 < len(happened) else None
        first = starts_of.get(number, 0)
        until = len(starts) if following is None else starts_of.get(following, first)
        begin, end = clocks[number], float("inf") if following is None else clocks[following]
        seen_from = begin if place else float("-inf")
        shares[number] = Share(
            begin=begin,
            end=end,
            codes=[start.code for start in starts[first:until]],
            left=[each for start in starts[first:until] for each in start.left],
            lives=[cut for life in lives if (cut := _cut(life, seen_from, end)) is not None],
            until=[cut for life in lives if (cut := _cut(life, float("-inf"), end)) is not None],
        )
    return shares


def _cut(life: Life, begin: float, end: float) -> Life | None:
    """`life` with its steps between `begin` and `end`; None: it has none of them, and has not begun then."""
    steps = [step for step in life.steps if begin < step.clock <= end]
    if life.clock > end or not (steps or life.clock > begin):
        return None
    return replace(life, steps=steps)
