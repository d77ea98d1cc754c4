"""A rank's side of `mindx-elastic pause` and `resume`: waits at the boundary that all ranks have agreed on.

A pause is an agreed step at which the step gate stays closed. The agent gives its order to the watcher, which closes
the gate and offers the coming boundary to the other ranks (`agreement.pause_rounds`). The training thread arrives
there as for a stop, finds no alarm, and waits in the gate. Nothing is saved or freed. Whatever comes meanwhile (a
signal, a fault, a dead rank) is a stop like any other: it takes the gate over, and the training thread saves the
boundary at which it waits.

`_work` does whatever is to be done for the newest order that is known, and may be called at any time: when the agent
or another rank has news, when the training thread has arrived, and again after an error of the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mindx_elastic.agreement.pause_rounds import PauseNews, PauseRounds
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import StatusPage, WorkerPhase
from mindx_elastic.memory.agent_folder import PAUSE, RESUME

__all__ = ["Pauses"]

_AGAIN_S, _MOST_AGAIN_S = 0.5, 60.0


class Pauses:
    """One per guard. `wait` belongs to the training thread, the rest to the watcher thread unless said otherwise."""

    def __init__(
        self,
        gate: StepGate,
        rounds: PauseRounds,
        watcher: Watcher,
        events: EventLog,
        page: StatusPage,
        *,
        rank: int,
        why_not: Callable[[], str | None],
    ) -> None:
        """`why_not`: why this rank cannot pause (it stops, it has finished); empty: it stops, and the others hear of
        that; None: it can."""
        self._gate, self._rounds, self._watcher, self._events, self._page = gate, rounds, watcher, events, page
        self._rank, self._why_not = rank, why_not
        self._wanted: tuple[str, str, int] | None = None
        """The agent's newest order, its reason and its number, until it is given to the ranks."""
        self._number = 0
        self._offered = self._arrived = self._complete = False
        self._step: int | None = None
        """Where the ranks wait; None: not agreed yet."""
        self._since = 0.0
        self._passed_on = 0
        self._again_s, self._retries = _AGAIN_S, False
        # It may be that of this process's guard before.
        page.set(pause_heard=0, pause_order=0, paused_step=-1, paused_ns=0, all_paused=0)
        page.set_text("pause_reason", "")
        rounds.listen(lambda: watcher.post(self._work))

    def hear(self, kind: str, reason: str, number: int) -> None:
        """The agent's order: `PAUSE` or `RESUME`. `number`: the page says that it was passed on."""
        self._wanted = kind, reason, number
        self._work()

    def hear_end(self) -> None:
        """The training of this rank has ended: it comes to no further boundary, so no rank may wait."""
        if self._number % 2:
            self._work()

    def wait(self) -> bool:
        """Training thread, at the gate's limit without an alarm: wait as long as the job is paused. False: go on; True:
        there is an alarm, and the limit is its."""
        with self._not_judged():
            return self._gate.wait_out_pause(lambda: self._watcher.post(self._work))

    @contextmanager
    def _not_judged(self) -> Iterator[None]:
        """Training thread: the agent does not take the time inside for a hang; nor does it afterwards."""
        page = self._page
        if page.phase not in (WorkerPhase.TRAINING, WorkerPhase.BETWEEN):
            yield
            return
        before = page.phase
        page.set(phase=WorkerPhase.BETWEEN)
        try:
            yield
        finally:
            page.set(paused_ns=0, paused_step=-1, all_paused=0)
            if page.started:
                page.set(boundary_ns=time.monotonic_ns())
            if page.phase == WorkerPhase.BETWEEN:  # else a stop has begun
                page.set(phase=before)

    # --- the orders -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._catch_up()
        except Exception as error:
            if self._again_s == _AGAIN_S:
                logger.warning("the ranks cannot be asked about the pause now (%s); trying again", error)
            if self._wanted is not None and self._wanted[0] == RESUME:
                self._gate.resume()  # a rank that does not hear it is held by its own agent's order alone
            if not self._retries:
                self._retries = True
                self._watcher.call_at(time.monotonic() + self._again_s, self._work_again)
                self._again_s = min(_MOST_AGAIN_S, 2 * self._again_s)

    def _work_again(self) -> None:
        self._retries = False
        self._work()

    def _catch_up(self) -> None:
        """Raises what the store raises, and can be called again then."""
        if self._why_not() == "":
            return
        news = self._rounds.news()
        if self._wanted is not None:
            kind, reason, number = self._wanted
            if news.is_pause != (kind == PAUSE):
                self._rounds.order(news.number + 1, reason)
                news = self._rounds.news()
            self._wanted, self._passed_on = None, number
        if news.number != self._number:
            self._begin(news)
        if news.is_pause:
            self._follow(news)
        self._page.set(pause_heard=self._passed_on)
        self._again_s = _AGAIN_S

    def _begin(self, news: PauseNews) -> None:
        was_pause = bool(self._number % 2)
        self._number, self._step = news.number, None
        self._offered = self._complete = False
        if not news.is_pause:
            self._gate.resume()
            if was_pause:
                waited_s = time.monotonic() - self._since if self._arrived else None
                self._say("training goes on: %s", news.reason)
                self._events.emit("pause_end", step=self._gate.step, reason=news.reason, duration_s=waited_s)
        self._arrived = False
        self._page.set_text("pause_reason", news.reason)
        self._page.set(pause_order=news.number, all_paused=0)

    def _follow(self, news: PauseNews) -> None:
        """What this rank has to do for the pause `news`."""
        if (problem := self._why_not()) is not None:
            self._take_back(problem)
            return
        if not self._offered:
            offer = self._gate.pause()
            if offer is None:
                return  # a stop
            self._rounds.offer(news.number, offer)
            self._offered, news = True, self._rounds.news()
        if self._step is None and news.decision is not None:
            if news.decision.step is None:
                self._take_back(news.decision.reason)
                return
            self._step = news.decision.step
            self._gate.pause_at(self._step)
        if self._step is not None and not self._arrived and self._gate.waits_at(self._step):
            self._arrive(news)
            news = self._rounds.news()
        if news.all_here and not self._complete:
            self._complete = True
            self._page.set(all_paused=news.number)
            self._say("paused: every rank waits at step %d; mindx-elastic resume lets them go on", self._gate.step)

    def _arrive(self, news: PauseNews) -> None:
        self._rounds.arrive(news.number)
        self._arrived, self._since = True, time.monotonic()
        step = self._gate.step
        self._page.set(paused_step=step, paused_ns=time.monotonic_ns())
        self._events.emit("pause", step=step, reason=news.reason)

    def _say(self, text: str, *values: object) -> None:
        """Once a job."""
        logger.log(logging.INFO if self._rank == 0 else logging.DEBUG, text, *values)

    def _take_back(self, problem: str) -> None:
        if problem:
            logger.warning("the pause is taken back: %s", problem)
            self._rounds.order(self._number + 1, f"the pause was taken back: {problem}")
            news = self._rounds.news()
            if news.number != self._number:
                self._begin(news)
