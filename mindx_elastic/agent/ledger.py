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
`host` of the agent. `history` has the model and reads them back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mindx_elastic.agent.history import (
    FAILED,
    NEW_NODE,
    REHEARSED,
    AttemptRecord,
    Totals,
    add_up,
    as_attempt_event,
    count_recovery,
    identity,
)
from mindx_elastic.agent.restarts import Failure
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.printable import printable_block
from mindx_elastic.core.status_page import Status, who_waits, why_gone_on
from mindx_elastic.rejoin.record import RecoveryRecord, as_event

if TYPE_CHECKING:
    from mindx_elastic.agent.attempt import Attempt
    from mindx_elastic.agent.endings import Ending

__all__ = ["Ledger", "print_block"]


_OUTCOMES = {"membership": NEW_NODE, "rehearsed": REHEARSED}
"""By `Ending.outcome`; others are the same word."""
_NS = 1_000_000_000


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
            full_size=record.full_size,
            why_fewer=record.why_fewer,
            **identity(),
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
            if before.record.step_reached is not None or before.record.resumed_step is None:  # else the pages were gone
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
        """Whether the ranks, which live, wait by command (`core.status_page.who_waits`)."""
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
        self._events.emit("rejoin", **as_event(record), **identity())
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
        record.outcome = _OUTCOMES.get(ending.outcome, ending.outcome)
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


def _began(attempt: Attempt, statuses: Iterable[Status]) -> float:
    """When it happened: by the agent's clock, or earlier if a survivor had heard of it before."""
    alarms = [s.alarm_ns / _NS for s in statuses if s.alarm_ns]
    known = [*alarms, *([attempt.failed_at] if attempt.failed_at is not None else [])]
    return min(known, default=time.monotonic())


def print_block(text: str) -> None:
    """Print several lines for a person, without a prefix on each. Text from others in them is escaped."""
    with suppress(OSError, ValueError):  # a closed stderr must not stop the job
        sys.stderr.write(f"{printable_block(text)}\n")
        sys.stderr.flush()
