"""Carries out `mindx-elastic pause` and `resume` on one node: takes the commands, tells the workers, answers.

What is to be done is decided in `pausing`. A worker that has not heard an order is told again at each look: it may not
have entered its guard yet when it was told before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from mindx_elastic.agent.pause_requests import answer, take_requests
from mindx_elastic.agent.pausing import Order, PauseWatch
from mindx_elastic.agent.workers import Workers
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.guard.agent_link import CONTROL_SIGNAL
from mindx_elastic.memory.agent_folder import AgentFolder

__all__ = ["PauseDesk", "is_between_steps"]

_BUSY_S = 0.05


class PauseDesk:
    """One per agent. Main thread."""

    def __init__(self, folder: AgentFolder, events: EventLog, note_pause: Callable[[float], None]) -> None:
        """`note_pause` is told for how many seconds every rank has waited, once they go on."""
        self._folder, self._events, self._note_pause = folder, events, note_pause
        self._watch = PauseWatch()
        self._written: Order | None = None
        self._number = 0
        self._was_paused: int | None = None
        """The step at which every rank waited when the attempt's end began."""

    def begin_attempt(self, number: int) -> None:
        """New workers run."""
        if self._was_paused is not None:
            logger.warning(
                "attempt %d trains: the pause at step %d has ended with attempt %d (mindx-elastic pause pauses again)",
                number,
                self._was_paused,
                self._number,
            )
        self._number, self._was_paused, self._written = number, None, None

    def end_attempt(self, cause: str) -> None:
        """All workers have ended."""
        self._end(f"attempt {self._number} has ended ({cause or 'the job has finished'})")

    def look(self, workers: Workers, *, stopping: bool) -> float:
        """Do what is due. Returns in how many seconds to look again, at most; 0: with the next usual look."""
        now = time.monotonic()
        for request in take_requests(self._folder.path):
            self._watch.ask(request, now)
        if stopping:
            self._end("the job is stopping")
            return 0.0
        statuses = workers.statuses()
        order = self._watch.look(statuses, len(workers.live), now)
        if order is not None:
            self._give(order, workers, statuses)
        self._hand_out()
        return _BUSY_S if self._watch.is_busy else 0.0

    def _give(self, order: Order, workers: Workers, statuses: dict[int, Status]) -> None:
        if order is not self._written:
            try:
                number = self._folder.order(order.kind, order.reason, grace_s=0.0, exit_code=0)
            except OSError as error:
                logger.warning("%s: no order can be written (%s); trying again", self._folder.path, error)
                return
            self._watch.note_written(number)
            self._written = order
        for rank, status in statuses.items():
            if self._watch.needs(status):
                workers.send(rank, CONTROL_SIGNAL)

    def _end(self, why: str) -> None:
        step = self._watch.end(why, time.monotonic())
        self._was_paused = step if self._was_paused is None else self._was_paused
        self._hand_out()

    def _hand_out(self) -> None:
        for change in self._watch.changes:
            if change.begins:
                self._events.emit("pause", step=change.step, duration_s=change.seconds)
                logger.warning("paused at step %d: every rank waits until mindx-elastic resume", change.step)
            else:
                self._events.emit("pause_end", step=change.step, reason=change.why, duration_s=change.seconds)
                self._note_pause(change.seconds)
                logger.info("the pause at step %d has ended after %.1f s: %s", change.step, change.seconds, change.why)
        self._watch.changes.clear()
        for request, content in self._watch.answers:
            with suppress(OSError):  # the command may have gone; the log has it
                answer(self._folder.path, request, content)
        self._watch.answers.clear()


def is_between_steps(status: Status) -> bool:
    """Whether a rank may be at work between two steps, so that no step need be expected of it. Not in a pause."""
    return status.phase == WorkerPhase.BETWEEN and not status.paused_ns
