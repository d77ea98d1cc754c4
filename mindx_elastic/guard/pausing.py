"""A rank's side of `mindx-elastic pause` and `resume`: waits at the boundary that all ranks have agreed on.

A pause is a stop that ends with a wait. The command gives its order to the watcher (`cli.pause`), which closes the
step gate and offers the coming boundary in a round as that of a stop. The training thread arrives there, finds no
alarm, and waits in the gate; a second round says that all ranks do. Nothing is saved or freed. Whatever comes meanwhile
(a signal, a fault, a dead rank) is a stop like any other: it takes the gate over, and the training thread saves the
boundary at which it waits.

No call waits for another rank, so the thread that hears alarms is never held up: `_work` does whatever is to be done
for the newest order that is known, and is called when the command or another rank has given one, when the training
thread has arrived, and again and again while an answer of the others is missing or the store fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mindx_elastic.agreement.exchange import Exchange, PauseRequest
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.guard.agent_link import between_steps
from mindx_elastic.memory.agent_folder import PAUSE

__all__ = ["Pauses"]

_AGAIN_S, _MOST_LOOK_S, _MOST_AGAIN_S = 0.05, 1.0, 60.0


class Pauses:
    """One per guard. `wait` belongs to the training thread, the rest to the watcher thread unless said otherwise."""

    def __init__(
        self,
        gate: StepGate,
        exchange: Exchange,
        watcher: Watcher,
        events: EventLog,
        page: StatusPage,
        *,
        rank: int,
        why_not: Callable[[], str | None],
    ) -> None:
        """`why_not`: why this rank cannot pause (it stops, it has finished); empty: it stops, and the others hear of
        that; None: it can."""
        self._gate, self._exchange, self._watcher, self._events, self._page = gate, exchange, watcher, events, page
        self._rank, self._why_not = rank, why_not
        self._wanted: tuple[bool, str, int] | None = None
        """The commands' newest order (whether to pause, why, its number), until it is given to the ranks."""
        self._order = PauseRequest()
        self._step: int | None = None
        """Where the ranks wait; None: not agreed yet."""
        self._offered = self._complete = False
        self._arrived_at: float | None = None
        self._passed_on = 0
        self._again_s, self._looks_again, self._has_failed = _AGAIN_S, False, False
        # It may be that of this process's guard before.
        page.set(pause_heard=0, pause_order=0, paused_step=-1, paused_ns=0, all_paused=0)
        page.set_text("pause_reason", "")

    def hear(self, kind: str, reason: str, number: int) -> None:
        """The order of a command: `PAUSE` or `RESUME`. `number`: the page says that it was passed on."""
        self._wanted = kind == PAUSE, reason, number
        self._work()

    def hear_order(self, order: PauseRequest) -> None:
        """Another rank has given it."""
        if self._why_not() != "":
            self._begin(order)
            self._work()

    def hear_end(self) -> None:
        """The training of this rank has ended: it comes to no further boundary, so no rank may wait."""
        if self._order.is_pause:
            self._work()

    def wait(self) -> bool:
        """Training thread, at the gate's limit without an alarm: wait as long as the job is paused. False: go on; True:
        there is an alarm, and the limit is its."""
        with between_steps(self._page):
            try:
                return self._gate.wait_out_pause(lambda: self._watcher.post(self._work))
            finally:
                self._page.set(paused_ns=0, paused_step=-1, all_paused=0)

    # --- the orders -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            is_waiting = self._catch_up()
        except Exception as error:
            if not self._has_failed:
                logger.warning("the ranks cannot be asked about the pause now (%s); trying again", error)
            self._has_failed = True
            if self._wanted is not None and not self._wanted[0]:
                self._gate.resume()  # a rank that does not hear it is held by its own node's order alone
            self._look_again(_MOST_AGAIN_S)
        else:
            self._has_failed = False
            if is_waiting:
                self._look_again(_MOST_LOOK_S)
            else:
                self._again_s = _AGAIN_S

    def _look_again(self, most_s: float) -> None:
        if self._looks_again:
            return

        def look() -> None:
            self._looks_again = False
            self._work()

        self._looks_again = True
        self._watcher.call_at(time.monotonic() + self._again_s, look)
        self._again_s = min(most_s, 2 * self._again_s)

    def _catch_up(self) -> bool:
        """Returns whether an answer of the other ranks is missing. Raises what the store raises, and can be called
        again then."""
        if self._why_not() == "":
            return False
        if self._wanted is not None:
            pause, reason, number = self._wanted
            self._begin(self._exchange.order(pause=pause, reason=reason))
            self._wanted, self._passed_on = None, number
        is_waiting = self._order.is_pause and self._follow()
        self._page.set(pause_heard=self._passed_on)
        return is_waiting

    def _begin(self, order: PauseRequest) -> None:
        """Obey `order`, if it is newer."""
        if order.number <= self._order.number:
            return
        was_pause, arrived_at = self._order.is_pause, self._arrived_at
        self._order, self._step, self._arrived_at = order, None, None
        self._offered = self._complete = False
        self._again_s = _AGAIN_S
        if not order.is_pause:
            self._gate.resume()
            if was_pause:
                waited_s = None if arrived_at is None else time.monotonic() - arrived_at
                self._say("training goes on: %s", order.reason)
                self._events.emit("pause_end", step=self._gate.step, reason=order.reason, duration_s=waited_s)
        self._page.set_text("pause_reason", order.reason)
        self._page.set(pause_order=order.number, all_paused=0)

    def _follow(self) -> bool:
        """What this rank has to do in a pause. Returns whether an answer of the other ranks is missing."""
        if (problem := self._why_not()) is not None:
            self._take_back(problem)
            return False
        where, here = f"pause/{self._order.number}", f"pause/{self._order.number}/here"
        if not self._offered:
            offer = self._gate.pause()
            if offer is None:
                return False  # a stop
            self._exchange.announce(where, offer, is_stop=False)
            self._offered = True
        if self._step is None:
            decision = self._exchange.decided(where)
            if decision is None or decision.step is None:
                return decision is None or self._take_back(decision.reason)
            self._step = decision.step
            self._gate.pause_at(self._step)
        if self._arrived_at is None:
            if not self._gate.waits_at(self._step):
                return False  # the training thread tells when it does
            self._arrive(here)
        if not self._complete:
            decision = self._exchange.decided(here)
            if decision is None or decision.step is None:
                return decision is None or self._take_back(decision.reason)
            self._complete = True
            self._page.set(all_paused=self._order.number)
            self._say("paused: every rank waits at step %d; mindx-elastic resume lets them go on", self._gate.step)
        return False

    def _arrive(self, here: str) -> None:
        step = self._gate.step
        self._exchange.announce(here, step, is_stop=False)
        self._arrived_at = time.monotonic()
        self._page.set(paused_step=step, paused_ns=time.monotonic_ns())
        self._events.emit("pause", step=step, reason=self._order.reason)

    def _say(self, text: str, *values: object) -> None:
        """Once a job."""
        logger.log(logging.INFO if self._rank == 0 else logging.DEBUG, text, *values)

    def _take_back(self, problem: str) -> bool:
        """False: no answer is waited for."""
        if not problem:
            return False
        logger.warning("the pause is taken back: %s", problem)
        self._begin(self._exchange.order(pause=False, reason=f"the pause was taken back: {problem}"))
        return False
