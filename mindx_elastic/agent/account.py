"""Keeps the ledger: turns what the agent sees (pages, endings, its own clock) into the records of its attempts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindx_elastic.agent.attempt import Attempt
from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.ledger import FAILED, FINISHED, NEW_NODE, STOPPED, AttemptRecord, Ledger
from mindx_elastic.agent.restarts import Failure
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status

__all__ = ["Account"]

_NS = 1_000_000_000
_OUTCOMES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED, "membership": NEW_NODE}


@dataclass
class _Pause:
    """The time after an attempt that ended early, until training goes on."""

    attempt: int
    began: float
    """`time.monotonic` of the failure."""
    step_reached: int


class Account:
    """Main thread only."""

    def __init__(self, events: EventLog) -> None:
        self.ledger = Ledger(events)
        self._events = events
        self._number, self._num_workers = -1, 0
        self._pause: _Pause | None = None
        self._resumed = False

    @property
    def is_eventful(self) -> bool:
        """Whether anything happened that is worth a table."""
        records = self.ledger.records
        return len(records) > 1 or any(record.outcome == FAILED for record in records)

    def start_attempt(self, number: int, *, world_size: int, num_workers: int, node: int, restarts: int) -> None:
        """The workers run."""
        self._number, self._num_workers, self._resumed = number, num_workers, False
        self._events.attempt = number
        record = AttemptRecord(attempt=number, world_size=world_size, node=node, started=time.time())
        self.ledger.add(record)
        self._events.rank = node
        self._events.emit(
            "attempt_start",
            world_size=world_size,
            node=node,
            started=record.started,
            restarts=restarts,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        if self._pause is not None:
            self.ledger.update(self._pause.attempt, restart_s=time.monotonic() - self._pause.began)

    def look(self, statuses: Mapping[int, Status]) -> None:
        """What the pages say while the attempt runs: from where it went on, and when it got further."""
        if len(statuses) < self._num_workers:
            return
        if not self._resumed and all(status.entered_ns for status in statuses.values()):
            self._resumed = True
            self._note_resume(statuses)
        if self._pause is not None and all(status.first_boundary_ns for status in statuses.values()):
            first = max(status.first_boundary_ns for status in statuses.values()) / _NS
            self.ledger.update(self._pause.attempt, first_step_s=max(0.0, first - self._pause.began))
            self._pause = None

    def _note_resume(self, statuses: Mapping[int, Status]) -> None:
        resumed = min(status.resumed_step for status in statuses.values())
        path = next((status.resumed_path for status in statuses.values() if status.resumed_path), "")
        self.ledger.update(self._number, resumed_step=resumed, resumed_path=path or None)
        if self._pause is None:
            return
        lost = max(0, self._pause.step_reached - max(0, resumed))
        record = next(r for r in self.ledger.records if r.attempt == self._pause.attempt)
        saved = resumed if record.saved_step is None or resumed > record.saved_step else record.saved_step
        self.ledger.update(record.attempt, steps_lost=lost, saved_step=saved)

    def end_attempt(self, attempt: Attempt, ending: Ending) -> None:
        """All workers have ended."""
        statuses = attempt.workers.last_statuses()
        self.look(statuses)
        reached = min((status.step for status in statuses.values()), default=-1)
        began = _began(attempt, statuses.values())
        saved = max((status.saved_step for status in statuses.values()), default=-1)
        saved_ns = max((status.saved_ns for status in statuses.values()), default=0)
        failed = ending.outcome == "failed"
        self.ledger.update(
            self._number,
            cause=ending.cause or None,
            cause_rank=ending.rank if ending.rank >= 0 else None,
            step_reached=reached if statuses else None,
            saved_step=saved if saved >= 0 else None,
            steps_lost=max(0, reached - saved) if ending.outcome == "stopped" and saved >= 0 else None,
            detect_s=max(0.0, attempt.noticed_at - began) if failed and attempt.noticed_at is not None else None,
            save_s=max(0.0, saved_ns / _NS - began) if saved_ns else None,
            outcome=_OUTCOMES[ending.outcome],
        )
        again = ending.outcome in ("failed", "membership")
        self._pause = _Pause(self._number, began, reached) if again and statuses else None
        if again and not statuses:
            self._pause = _Pause(self._number, began, -1)

    def note_flushed(self, step: int | None) -> None:
        """The newest step that was written from memory in the end."""
        records = self.ledger.records
        if step is not None and records and (records[-1].saved_step is None or step > records[-1].saved_step):
            self.ledger.update(records[-1].attempt, saved_step=step)

    def settle(self, ending: Ending) -> None:
        """No attempt will follow: what the last one lost, as far as it can be known without one."""
        records = self.ledger.records
        if ending.outcome != "failed" or not records or records[-1].outcome != FAILED:
            return
        last = records[-1]
        safe = max((s for s in (last.saved_step, last.resumed_step) if s is not None), default=None)
        if last.step_reached is None or safe is None:
            return
        if last.saved_step is not None or safe >= last.step_reached:  # else memory may hold more
            self.ledger.update(last.attempt, steps_lost=max(0, last.step_reached - max(0, safe)))

    def failure(self, attempt: Attempt, ending: Ending) -> Failure:
        """The attempt's failure as `CrashLoop` wants to know it."""
        statuses = list(attempt.workers.last_statuses().values())
        guarded = len(statuses) == len(attempt.workers.processes) and not ending.elsewhere
        return Failure(
            cause=ending.cause,
            rank=ending.rank,
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
