"""What a recovery in place was: who died, who stood in, how long it took, and how it ended.

Each is one event `rejoin`, written by the agent. `as_event` and `from_event` are its two sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from mindx_elastic.core.fields import Between, Text, read
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import rank_list

__all__ = [
    "FINISHED",
    "FORKED",
    "IN_PLACE",
    "REJOIN",
    "RESTART",
    "SPARE",
    "STOPPED",
    "RecoveryRecord",
    "Replacement",
    "as_event",
    "as_lines",
    "from_event",
]

REJOIN = "rejoin"
"""The event."""
IN_PLACE, RESTART, STOPPED, FINISHED = "in place", "restart", "stopped", "finished"
"""Values of `RecoveryRecord.outcome`: it has succeeded; the job is restarted; the job was stopped meanwhile; a rank had
finished its training meanwhile, so that there is a restart only if another one of that node has not."""
SPARE, FORKED = "spare", "zygote"
"""Values of `Replacement.by`: a warm spare, a fork of the zygote."""
_OUTCOMES = (IN_PLACE, RESTART, STOPPED, FINISHED)
_STANDS_IN = {SPARE: "a spare", FORKED: "a fork of the zygote"}
_MOST_LINES, _LONGEST = 20, 150
_Words = Annotated[str, Text(1 << 16)]


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """The new process in the place of a dead one."""

    rank: int
    pid: int
    by: str
    """How it was started: `SPARE` or `FORKED`."""


@dataclass(frozen=True, kw_only=True)
class RecoveryRecord:
    """One recovery in place, or one that was tried or refused."""

    attempt: int = 0
    generation: int
    """Its number within the attempt, from 1."""
    outcome: str
    cause: _Words = ""
    """What became of the rank, for a person."""
    reason: _Words = ""
    """Why it was not in place; empty: it was."""
    ranks: tuple[int, ...] = ()
    """Whose processes were gone."""
    stood_in: tuple[Replacement, ...] = ()
    behind: tuple[int, ...] = ()
    """Survivors that took the donor's state as well."""
    donor: Annotated[int, Between(-1, 1 << 60)] | None = None
    """-1: no rank's state was taken."""
    step: int | None = None
    """The boundary that all go on from."""
    steps_lost: int | None = None
    """How many steps that every rank had passed are done again."""
    duration_s: float | None = None
    """Seconds from the failure until every rank had passed a step again, it came to nothing, or the next rank died."""
    time: float | None = None
    """Unix seconds of the event."""


# --- the event ---


def as_event(record: RecoveryRecord) -> dict[str, Any]:
    """The arguments of `EventLog.emit` after the event's name."""
    found = asdict(record)
    del found["attempt"], found["time"]  # the log's own
    reason = record.reason or record.cause
    return {name: value if value != "" else None for name, value in found.items()} | {"reason": reason or None}


def from_event(line: Mapping[str, Any]) -> RecoveryRecord | None:
    """The record in an event; None: it makes no sense."""
    try:
        found = read(RecoveryRecord, {name: value for name, value in line.items() if value is not None})
    except ValueError:
        return None
    if found.outcome not in _OUTCOMES:
        return None
    return replace(found, reason="") if found.outcome == IN_PLACE else found  # there it repeats the cause


# --- for a person ---


def as_lines(records: Sequence[RecoveryRecord]) -> list[str]:
    """The newest of them, a line each, the oldest first, below a heading; nothing where there are none."""
    if not records:
        return []
    shown, dropped = records[-_MOST_LINES:], max(0, len(records) - _MOST_LINES)
    lines = ["recoveries in place (attempt.number)"]
    if dropped:
        lines.append(f"{dropped} earlier ones are not shown: mindx-elastic status --json has them")
    return lines + [f"{record.attempt}.{record.generation}  {_what(record)}" for record in shown]


def _what(record: RecoveryRecord) -> str:
    who = f"{rank_list(record.ranks)}: " if record.ranks else ""
    words = [who + (_short(record.cause) or "gone")]
    if record.outcome != IN_PLACE:
        words.append({RESTART: "not in place", STOPPED: "stopped meanwhile", FINISHED: "not in place"}[record.outcome])
        if record.reason:
            words[-1] += f": {_short(record.reason)}"
        return "; ".join(words)
    if record.stood_in:
        words.append(f"{_STANDS_IN.get(record.stood_in[0].by, 'a new process')} stands in")
    if record.step is not None:
        words.append(f"on from step {record.step}")
    if record.duration_s is not None:
        words.append(f"{record.duration_s * 1000:.0f} ms")
    return "; ".join(words)


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3].rstrip() + "..."
