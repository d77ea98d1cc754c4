"""What happened to a job, in one screen: its attempts, why each failed, what that cost.

The agent keeps a `Ledger`, prints it at each restart and at its end, and through it writes to the run directory's
``events.jsonl``:

=============  ============================================================================================
event          when
=============  ============================================================================================
`attempt_end`  at once when the attempt has ended, so that it is there when the agent is killed
`attempt`      once for each attempt, when its record is as complete as it will be: the seconds to the first step
               after a failure are known only in the attempt that follows
`rejoin`       for each recovery in place; see `rejoin.record`
=============  ============================================================================================

Their fields are those of `AttemptRecord` (`cause` is the event's `reason`, `step_reached` its `step`), and `pid` and
`host` of the agent. `run_log` reads them back.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mindx_elastic.agent.pausing import who_waits, why_gone_on
from mindx_elastic.agent.restarts import Failure
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.printable import counted, printable, printable_block
from mindx_elastic.core.status_page import Status
from mindx_elastic.rejoin.record import IN_PLACE, RecoveryRecord, as_event, as_lines

if TYPE_CHECKING:
    from mindx_elastic.agent.attempt import Attempt
    from mindx_elastic.agent.endings import Ending

__all__ = [
    "FAILED",
    "FINISHED",
    "NEW_NODE",
    "STOPPED",
    "AttemptRecord",
    "Ledger",
    "Totals",
    "add_up",
    "as_attempt_event",
    "count_recovery",
    "print_block",
    "render",
    "totals_line",
]


FAILED, FINISHED, STOPPED, NEW_NODE = "failed", "finished", "stopped", "restarted for a new node"
REHEARSED = "restarted for its rehearsal"
"""Values of `AttemptRecord.outcome`: ended by a failure, by itself, by request, by a change of the nodes, to try the
resume."""
_OUTCOMES = {
    "finished": FINISHED,
    "stopped": STOPPED,
    "failed": FAILED,
    "membership": NEW_NODE,
    "rehearsed": REHEARSED,
}
"""By `Ending.outcome`."""
_NS = 1_000_000_000
WIDTH = 100
_CAUSE_CHARS = 150


@dataclass(kw_only=True, slots=True)
class AttemptRecord:
    """One start of the workers of one node and how it ended; None where something is not known (yet).

    The four times are seconds *since the failure*, not since each other: survivors may have saved before the agent has
    noticed anything. So the last of them is how long the job did not train.
    """

    attempt: int
    world_size: int | None = None
    node: int | None = None
    """Rank of the node of the agent that wrote this."""
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
    paused_s: float | None = None
    """How long its ranks waited by command (`mindx-elastic pause`), in all; None: they did not."""
    stall_s: float | None = None
    """How long periodic saves have held up its training: the rank that they have held up longest."""
    in_place: int | None = None
    """Failures that it has outlived: recoveries in place; None: there were none."""
    in_place_s: float | None = None
    """How long its ranks did not train because of them, in all."""
    in_place_steps_lost: int | None = None
    """By them, in all."""
    outcome: str | None = None
    """`FAILED`, `FINISHED`, `STOPPED`, `NEW_NODE`, `REHEARSED` or another word; None while it runs."""
    full_size: int | None = None
    """How many ranks the job is meant to have, where it has fewer."""
    why_fewer: str | None = None

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
    """Those that were recovered from in place, too."""
    steps_lost: int
    unknown_losses: int
    """Failures of which it is not known how many steps they cost."""
    not_training_s: float
    """After failures."""
    paused_s: float = 0.0
    """By command."""
    in_place: int = 0
    """Failures that were recovered from in place."""


@dataclass
class _Pause:
    """The time after an attempt that ended early, until training goes on."""

    record: AttemptRecord
    began: float
    """`time.monotonic` of the failure."""


class Ledger:
    """The agent's account of its attempts: takes what the agent sees (pages, endings, its own clock). One thread.

    events: where the events go; the caller gives the log of its run directory.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.records: list[AttemptRecord] = []
        """All attempts so far, the oldest first."""
        self.recoveries: list[RecoveryRecord] = []
        """In place, and those that came to nothing; the oldest first."""
        self._open: list[AttemptRecord] = []
        """Those of which more may become known: the event `attempt` is still to come."""
        self._num_workers = 0
        self._pause: _Pause | None = None
        self._resumed = False
        self._wait_order, self._wait_step, self._wait_began = 0, -1, 0.0
        """The pause in which every rank waits (0: they do not), its step, and since when (`time.monotonic`)."""
        self._directories: dict[str, None] = {}
        """Those that the attempts have saved in, the oldest first."""

    @property
    def is_eventful(self) -> bool:
        """Whether anything happened that is worth a table."""
        return len(self.records) > 1 or bool(self.recoveries) or any(each.outcome == FAILED for each in self.records)

    def start_attempt(
        self,
        number: int,
        *,
        world_size: int,
        num_workers: int,
        node: int,
        restarts: int,
        full_size: int | None = None,
        why_fewer: str = "",
    ) -> None:
        """The workers run. `full_size`, `why_fewer`: where they are fewer than the job is meant to have."""
        self._num_workers, self._resumed = num_workers, False
        self._events.attempt = number
        record = AttemptRecord(attempt=number, world_size=world_size, node=node, started=time.time())
        if why_fewer:
            record.full_size, record.why_fewer = full_size, why_fewer
        self.records.append(record)
        self._open.append(record)
        self._events.rank = node
        self._events.emit(
            "attempt_start",
            world_size=world_size,
            node=node,
            started=record.started,
            restarts=restarts,
            pid=os.getpid(),
            host=socket.gethostname(),
            full_size=record.full_size,
            why_fewer=record.why_fewer,
        )
        if self._pause is not None:
            self._pause.record.restart_s = time.monotonic() - self._pause.began

    def look(self, statuses: Mapping[int, Status]) -> None:
        """What the pages say while the attempt runs: from where it went on, and when it got further."""
        if len(statuses) < self._num_workers:
            return
        if not self._resumed and all(status.entered_ns for status in statuses.values()):
            self._resumed = True
            self._note_resume(statuses)
        if self._pause is not None and all(status.first_boundary_ns for status in statuses.values()):
            first = max(status.first_boundary_ns for status in statuses.values()) / _NS
            self._pause.record.first_step_s = max(0.0, first - self._pause.began)
            self._settle(self._pause.record)
            self._pause = None

    def _note_resume(self, statuses: Mapping[int, Status]) -> None:
        own, before = self.records[-1], self._pause
        own.resumed_step = resumed = min(status.resumed_step for status in statuses.values())
        own.resumed_path = next((status.resumed_path for status in statuses.values() if status.resumed_path), None)
        self._compare_directory(statuses[min(statuses)])
        if before is not None:
            before.record.steps_lost = max(0, (before.record.step_reached or 0) - max(0, resumed))
            if before.record.saved_step is None or resumed > before.record.saved_step:
                before.record.saved_step = resumed

    def _compare_directory(self, status: Status) -> None:
        """A restart that starts over in another directory than the job had: its name may have the time of the start."""
        own, known = status.directory, list(self._directories)
        if own and known and own not in known and status.resumed_step < 0:
            reason = (
                f"this restart saves in {own}, and the job had saved in {known[-1]}: what it has done so far is not "
                "found, and all steps are done again. Give a directory whose name is the same in each start"
            )
            logger.warning("%s", reason)
            self._events.emit("directory", reason=reason)
        if own:
            self._directories[own] = None

    def look_at_pause(self, statuses: Mapping[int, Status]) -> None:
        """Whether the ranks, which live, wait by command (`agent.pausing`)."""
        order = who_waits(statuses)
        if order == self._wait_order:
            return
        if self._wait_order:
            self._end_wait(why_gone_on(statuses) or "ranks stop, or were replaced")
        if order:
            self._wait_order, self._wait_began = order, max(status.paused_ns for status in statuses.values()) / _NS
            self._wait_step = max(status.paused_step for status in statuses.values())
            self._events.emit("pause", step=self._wait_step)
            logger.warning("paused at step %d: every rank waits until mindx-elastic resume", self._wait_step)

    def _end_wait(self, why: str) -> None:
        seconds = time.monotonic() - self._wait_began
        self._wait_order = 0
        self._events.emit("pause_end", step=self._wait_step, reason=why, duration_s=seconds)
        self.records[-1].paused_s = (self.records[-1].paused_s or 0.0) + seconds
        logger.info("the pause at step %d has ended after %.1f s: %s", self._wait_step, seconds, why)

    def note_recovery(self, record: RecoveryRecord) -> None:
        """A recovery in place of this attempt is over, whether it has succeeded or not."""
        record = replace(record, attempt=self.records[-1].attempt, time=time.time())
        self.recoveries.append(record)
        self._events.emit("rejoin", **as_event(record), **_identity())
        count_recovery(self.records[-1], record)

    def end_attempt(self, attempt: Attempt, ending: Ending) -> None:
        """All workers have ended."""
        statuses = attempt.workers.last_statuses()
        self.look(statuses)
        if self._wait_order:
            self._end_wait(f"attempt {self.records[-1].attempt} has ended ({ending.cause or 'the job has finished'})")
        reached = min((status.step for status in statuses.values()), default=-1)
        began = _began(attempt, statuses.values())
        saved = max((status.saved_step for status in statuses.values()), default=-1)
        if ending.outcome == "finished":  # what is on disk in the end is whole
            saved = max((saved, *(status.durable_step for status in statuses.values())))
        saved_ns = max((status.saved_ns for status in statuses.values()), default=0)
        record, failed = self.records[-1], ending.outcome == "failed"
        record.cause = ending.cause or None
        record.cause_rank = ending.rank if ending.rank >= 0 else None
        record.step_reached = reached if statuses else None
        record.saved_step = saved if saved >= 0 else None
        if ending.outcome == "stopped" and saved >= 0:
            record.steps_lost = max(0, reached - saved)
        if failed and attempt.noticed_at is not None:
            record.detect_s = max(0.0, attempt.noticed_at - began)
        if saved_ns:
            record.save_s = max(0.0, saved_ns / _NS - began)
        record.stall_s = round(max((status.stall_ns for status in statuses.values()), default=0) / _NS, 6) or None
        record.outcome = _OUTCOMES[ending.outcome]
        self._events.emit("attempt_end", **as_attempt_event(record))
        for other in self._open[:-1]:  # no first step after it can become known any more
            self._settle(other)
        again = ending.outcome in ("failed", "membership", "rehearsed")
        self._pause = _Pause(record, began) if again else None

    def note_flushed(self, step: int | None) -> None:
        """The newest step that was written from memory in the end."""
        if step is not None and self.records:
            last = self.records[-1]
            last.saved_step = step if last.saved_step is None else max(step, last.saved_step)

    def close(self) -> Totals:
        """The end of the agent: no attempt will follow, so that what the last one has lost is known as far as it can be
        without one. Records what is still open."""
        last = self.records[-1] if self.records else None
        if last is not None and last.outcome == FAILED and last.step_reached is not None:
            safe = max((s for s in (last.saved_step, last.resumed_step) if s is not None), default=-2)
            if last.saved_step is not None or safe >= last.step_reached:  # else memory may hold more
                last.steps_lost = max(0, last.step_reached - max(0, safe))
        for record in list(self._open):
            self._settle(record)
        return add_up(self.records)

    def _settle(self, record: AttemptRecord) -> None:
        self._open.remove(record)
        self._events.emit("attempt", **as_attempt_event(record))

    def failure(self, attempt: Attempt, ending: Ending) -> Failure:
        """The attempt's failure as `CrashLoop` wants to know it."""
        statuses = list(attempt.workers.last_statuses().values())
        guarded = len(statuses) == len(attempt.workers.processes) and not ending.elsewhere
        return Failure(
            cause=ending.cause,
            step=min((status.step for status in statuses), default=-1),
            resumed_step=min((status.resumed_step for status in statuses), default=-1),
            resumed_path=next((status.resumed_path for status in statuses if status.resumed_path), ""),
            boundaries=min((status.boundaries for status in statuses), default=0),
            guarded=guarded,
        )


def as_attempt_event(record: AttemptRecord) -> dict[str, Any]:
    """The arguments of `EventLog.emit` after the event's name."""
    content = asdict(record)
    cause, step = content.pop("cause"), content.pop("step_reached")
    return {"step": step, "reason": cause, **content, **_identity()}


def _identity() -> dict[str, Any]:
    """The agent that writes: several may write to one file, after one another or at the same time."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def count_recovery(record: AttemptRecord, recovery: RecoveryRecord) -> None:
    """What a recovery in place has cost its attempt. One that came to nothing is part of the failure that follows."""
    if recovery.outcome == IN_PLACE:
        record.in_place = (record.in_place or 0) + 1
        record.in_place_s = round((record.in_place_s or 0.0) + (recovery.duration_s or 0.0), 6)
        record.in_place_steps_lost = (record.in_place_steps_lost or 0) + (recovery.steps_lost or 0)


def _began(attempt: Attempt, statuses: Iterable[Status]) -> float:
    """When it happened: by the agent's clock, or earlier if a survivor had heard of it before."""
    alarms = [s.alarm_ns / _NS for s in statuses if s.alarm_ns]
    known = [*alarms, *([attempt.failed_at] if attempt.failed_at is not None else [])]
    return min(known, default=time.monotonic())


def add_up(records: Iterable[AttemptRecord]) -> Totals:
    """The totals of some attempts."""
    records = list(records)
    failed = [record for record in records if record.outcome == FAILED]
    in_place = sum(record.in_place or 0 for record in records)
    return Totals(
        attempts=len(records),
        failures=len(failed) + in_place,
        steps_lost=sum((record.steps_lost or 0) + (record.in_place_steps_lost or 0) for record in records),
        unknown_losses=sum(record.steps_lost is None for record in failed),
        not_training_s=round(sum((record.pause_s or 0.0) + (record.in_place_s or 0.0) for record in records), 3),
        paused_s=round(sum(record.paused_s or 0.0 for record in records), 3),
        in_place=in_place,
    )


def totals_line(totals: Totals) -> str:
    """For example ``3 failures (2 recovered in place), 0 steps lost, 4.1 s not training``."""
    lost = counted(totals.steps_lost, "step") + " lost"
    if totals.unknown_losses == totals.failures > 0:
        lost = "steps lost: not known yet"
    elif totals.unknown_losses:
        lost += f" (not known yet for {counted(totals.unknown_losses, 'failure')})"
    paused = f", {_seconds(totals.paused_s)} s paused by command" if totals.paused_s else ""
    failures = counted(totals.failures, "failure")
    if totals.in_place:
        failures += f" ({'' if totals.in_place == totals.failures else f'{totals.in_place} '}recovered in place)"
    return f"{failures}, {lost}, {_seconds(totals.not_training_s)} s not training{paused}"


def render(
    records: Sequence[AttemptRecord],
    recoveries: Sequence[RecoveryRecord] = (),
    *,
    still_open: str = "running",
    width: int = WIDTH,
) -> str:
    """The attempts as a table, the recoveries in place and the totals as plain text, without a line break at the end.

    still_open: text for an attempt without a recorded end. width: columns, `WIDTH` at least.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, row in enumerate(_cells(record, still_open) for record in records):
        for name in () if number else row:
            is_cause = name == _CAUSE
            table.add_column(Text(name), justify="left" if is_cause else "right", no_wrap=not is_cause, overflow="fold")
        table.add_row(*map(Text, row.values()))
    stream = io.StringIO()
    console = Console(
        file=stream, width=max(width, WIDTH), color_system=None, highlight=False, markup=False, emoji=False
    )
    console.print(table if records else "no attempt yet")
    if recoveries:
        console.print()
        console.print("\n".join(as_lines(recoveries)))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join([*lines, "", totals_line(add_up(records))])


_CAUSE = "how it ended"


def _cells(record: AttemptRecord, still_open: str) -> dict[str, str]:
    """What the columns say, by their headings; the second line of a heading is the unit."""
    return {
        "#": str(record.attempt),
        "ranks": _ranks(record),
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


def _ranks(record: AttemptRecord) -> str:
    fewer = "" if record.full_size is None else f" of {record.full_size}"
    return _number(record.world_size) + fewer


def _ending(record: AttemptRecord, still_open: str) -> str:
    recovered = f"; {record.in_place} recovered in place" if record.in_place else ""
    return _how_it_ended(record, still_open) + recovered


def _how_it_ended(record: AttemptRecord, still_open: str) -> str:
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


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def print_block(text: str) -> None:
    """Print several lines for a person, without a prefix on each. Text from others in them is escaped."""
    with suppress(OSError, ValueError):  # a closed stderr must not stop the job
        sys.stderr.write(f"{printable_block(text)}\n")
        sys.stderr.flush()
