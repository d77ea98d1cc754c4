"""What happened to a job, in one screen: its attempts, why each failed, what that cost.

The agent keeps a `Ledger`, prints it at each restart and at its end, and through it writes to the run directory's
``events.jsonl``:

=============  ============================================================================================
event          when
=============  ============================================================================================
`attempt_end`  at once when the attempt has ended, so that a killed agent leaves it behind
`attempt`      once for each attempt, when its record is as complete as it will be: the seconds to the first step
               after a failure are known only in the attempt that follows
`summary`      once, at the end: the totals
=============  ============================================================================================

Their fields are those of `AttemptRecord` (`cause` is the event's `reason`, `step_reached` its `step`), and `pid` and
`host` of the agent. `mindx_elastic.agent.ledger_file` reads them back.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.core.events import EventLog
from mindx_elastic.core.printable import printable

__all__ = [
    "FAILED",
    "FINISHED",
    "NEW_NODE",
    "STOPPED",
    "AttemptRecord",
    "Ledger",
    "Totals",
    "add_up",
    "draw",
    "render",
    "totals_line",
]

FAILED, FINISHED, STOPPED, NEW_NODE = "failed", "finished", "stopped", "restarted for a new node"
"""Values of `AttemptRecord.outcome`: ended by a failure, by itself, by request, by a change of the nodes."""
WIDTH = 100
_CAUSE_CHARS, _LEAST_CAUSE_WIDTH = 150, 16


@dataclass(kw_only=True)
class AttemptRecord:
    """One start of the workers of one node and how it ended; None where something is not known (yet).

    The four times are seconds *since the failure*, not since each other: survivors may have saved before the agent has
    noticed anything. So the last of them is how long the job did not train.
    """

    attempt: int
    world_size: int | None = None
    node: int | None = None
    """Rank of the node whose agent says so."""
    started: float | None = None
    """Unix seconds."""
    cause: str | None = None
    """Why it ended, for a person; None when it finished."""
    cause_rank: int | None = None
    step_reached: int | None = None
    """Last boundary that every rank of the node had passed; -1: none."""
    resumed_step: int | None = None
    """Step it went on from; -1: a fresh start."""
    resumed_path: str | None = None
    saved_step: int | None = None
    """Newest step that can be gone on from after the end."""
    steps_lost: int | None = None
    detect_s: float | None = None
    """Until the failure was noticed."""
    save_s: float | None = None
    """Until the newest step was safe."""
    restart_s: float | None = None
    """Until new workers were started."""
    first_step_s: float | None = None
    """Until the next attempt has passed its first boundary: the time to recovery."""
    outcome: str | None = None
    """`FAILED`, `FINISHED`, `STOPPED`, `NEW_NODE` or another word; None while it runs."""

    @property
    def pause_s(self) -> float | None:
        """Seconds without training that followed this attempt, as far as they are known."""
        return max(
            (t for t in (self.detect_s, self.save_s, self.restart_s, self.first_step_s) if t is not None), default=None
        )


@dataclass(frozen=True)
class Totals:
    """The sums over a job's attempts."""

    attempts: int
    failures: int
    steps_lost: int
    unknown_losses: int
    """Failures of which it is not known how many steps they cost."""
    not_training_s: float


class Ledger:
    """The agent's account of its attempts. One thread.

    events: where the events go; the caller gives the log of its run directory.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._records: dict[int, AttemptRecord] = {}
        self._ended: set[int] = set()
        self._settled: set[int] = set()
        self._closed = False

    @property
    def records(self) -> list[AttemptRecord]:
        """All attempts so far, the oldest first; live objects, to be changed through `update`."""
        return [self._records[attempt] for attempt in sorted(self._records)]

    def add(self, record: AttemptRecord) -> AttemptRecord:
        """A new attempt has begun. Raises ValueError when there is one of that number."""
        if record.attempt in self._records:
            raise ValueError(f"attempt {record.attempt} is in the ledger already")
        self._records[record.attempt] = record
        self._note_progress()
        return record

    def update(self, attempt: int, **changes: Any) -> AttemptRecord:
        """Set fields of the record of `attempt`. Raises KeyError for an unknown attempt, TypeError for such a field."""
        record = self._records[attempt]
        unknown = changes.keys() - {field.name for field in fields(record)}
        if unknown:
            raise TypeError(f"an attempt has no {', '.join(sorted(unknown))}")
        for name, value in changes.items():
            setattr(record, name, value)
        self._note_progress()
        return record

    def close(self, outcome: str = "", **more: Any) -> None:
        """The end of the agent: record what is still open, and the totals. Called again it does nothing.

        outcome: how the job ended. more: further fields of the event.
        """
        if self._closed:
            return
        self._closed = True
        for record in self.records:
            self._settle(record)
        totals = add_up(self.records)
        more = {**asdict(totals), **more, **_identity()}
        self._events.emit("summary", reason=totals_line(totals), outcome=outcome or None, **more)

    def render(self, width: int = WIDTH) -> str:
        """The screen: see the function `render`."""
        return render(self.records, width=width)

    def _note_progress(self) -> None:
        for record in self.records:
            if record.outcome is None:
                continue
            if record.attempt not in self._ended:
                self._ended.add(record.attempt)
                self._events.emit("attempt_end", **_facts(record))
            if record.first_step_s is not None or record.outcome in (FINISHED, STOPPED) or self._is_superseded(record):
                self._settle(record)

    def _is_superseded(self, record: AttemptRecord) -> bool:
        """Whether a later attempt has ended too, so that no first step after this one can become known any more."""
        return any(other.attempt > record.attempt and other.outcome for other in self._records.values())

    def _settle(self, record: AttemptRecord) -> None:
        if record.attempt not in self._settled:
            self._settled.add(record.attempt)
            self._events.emit("attempt", **_facts(record))


def _facts(record: AttemptRecord) -> dict[str, Any]:
    """What an event says of an attempt."""
    content = asdict(record)
    cause, step = content.pop("cause"), content.pop("step_reached")
    return {"step": step, "reason": cause, **content, **_identity()}


def _identity() -> dict[str, Any]:
    """Which agent says so: several may write to one file, after or beside one another."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def add_up(records: Iterable[AttemptRecord]) -> Totals:
    """The totals of some attempts."""
    records = list(records)
    failed = [record for record in records if record.outcome == FAILED]
    return Totals(
        attempts=len(records),
        failures=len(failed),
        steps_lost=sum(record.steps_lost or 0 for record in records),
        unknown_losses=sum(record.steps_lost is None for record in failed),
        not_training_s=round(sum(record.pause_s or 0.0 for record in records), 3),
    )


def totals_line(totals: Totals) -> str:
    """For example ``3 failures, 0 steps lost, 4.1 s not training``."""
    lost = _count(totals.steps_lost, "step") + " lost"
    if totals.unknown_losses == totals.failures > 0:
        lost = "steps lost: not known yet"
    elif totals.unknown_losses:
        lost += f" (not known yet for {_count(totals.unknown_losses, 'failure')})"
    return f"{_count(totals.failures, 'failure')}, {lost}, {_seconds(totals.not_training_s)} s not training"


def draw(records: Sequence[AttemptRecord], *, still_open: str = "running", width: int = WIDTH) -> Table | Text:
    """The attempts as a table; as lines where `width` columns are too few for one.

    still_open: what to say of an attempt whose end is not recorded.
    """
    rows = [_cells(record, still_open) for record in records]
    if not rows:
        return Text("no attempt yet")
    if _width_without_cause(rows) + _LEAST_CAUSE_WIDTH > width:
        return Text("\n".join(_as_line(row) for row in rows))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        is_cause = name == _CAUSE
        table.add_column(Text(name), justify="left" if is_cause else "right", no_wrap=not is_cause, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row.values()))
    return table


def render(records: Sequence[AttemptRecord], *, still_open: str = "running", width: int = WIDTH) -> str:
    """The attempts and the totals as plain text of at most `width` columns, without a line break at the end."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    console.print(draw(records, still_open=still_open, width=width))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join([*lines, "", totals_line(add_up(records))])


_CAUSE = "how it ended"


def _cells(record: AttemptRecord, still_open: str) -> dict[str, str]:
    """What the columns say, by their headings; the second line of a heading is the unit."""
    return {
        "#": str(record.attempt),
        "ranks": _number(record.world_size),
        "from\nstep": "fresh" if record.resumed_step == -1 else _number(record.resumed_step),
        "to\nstep": "none" if record.step_reached == -1 else _number(record.step_reached),
        _CAUSE: _ending(record, still_open),
        "saved\nstep": "none" if record.saved_step == -1 else _number(record.saved_step),
        "steps\nlost": _number(record.steps_lost),
        "detect\ns": _seconds(record.detect_s),
        "save\ns": _seconds(record.save_s),
        "restart\ns": _seconds(record.restart_s),
        "1st step\ns": _seconds(record.first_step_s),
    }


def _ending(record: AttemptRecord, still_open: str) -> str:
    if record.outcome is None:
        return still_open
    cause, outcome = printable(record.cause or ""), printable(record.outcome)
    if len(cause) > _CAUSE_CHARS:
        cause = cause[: _CAUSE_CHARS - 3].rstrip() + "..."
    if cause and record.cause_rank is not None and record.cause_rank >= 0:
        cause = f"rank {record.cause_rank}: {cause}"
    if outcome == FAILED and cause:
        return cause
    return f"{outcome}: {cause}" if cause else outcome


def _width_without_cause(rows: Sequence[dict[str, str]]) -> int:
    names = [name for name in rows[0] if name != _CAUSE]
    widths = [
        max(len(line) for text in (name, *(row[name] for row in rows)) for line in text.split("\n")) for name in names
    ]
    return sum(widths) + 2 * len(names)


def _as_line(row: dict[str, str]) -> str:
    words = {name.replace("\n", " "): cell for name, cell in row.items() if cell != "-"}
    first = f"attempt {words.pop('#')}: {words.pop(_CAUSE)}"
    return "; ".join([first, *(_phrase(name, cell) for name, cell in words.items())])


def _phrase(name: str, cell: str) -> str:
    return f"{name.removesuffix(' s')} {cell} s" if name.endswith(" s") else f"{name} {cell}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
