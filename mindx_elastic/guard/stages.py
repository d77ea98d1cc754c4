"""Joins the stages of a stop in one worker: alarms are heard, a step is agreed on, the last boundary is saved.

Listeners (alarms) -> Watcher (the thread that hears them) -> Stopper -> StepGate (where the training thread stops) ->
Saver. The last resort stands beside them, for a training thread that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.peers import PeerWatch
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import Settings
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.last_resort import LastResort
from mindx_elastic.guard.listeners import Listeners
from mindx_elastic.guard.policy import ExitPolicy
from mindx_elastic.guard.process_end import LogRelay
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.rejoin.member import Member

__all__ = ["Stages"]


class Stages:
    """One per entered guard. Main thread."""

    def __init__(
        self,
        stack: ExitStack,
        closing: ExitStack,
        *,
        step: int,
        update_gate: UpdateGate,
        saver: Saver,
        settings: Settings,
        policies: Sequence[ExitPolicy],
        around: Connections,
        peers: PeerWatch,
        relay: LogRelay,
        already_durable: Callable[[], Path | None],
        member: Member | None = None,
    ) -> None:
        """The state is back, at boundary `step`. `stack` ends all; the last resort only when `closing` does, so that it
        keeps the deadline while other things are closed. `already_durable`: as of `Stopper`."""
        self.step_gate = StepGate(step)
        stack.callback(peers.close)
        listeners = self.listeners = Listeners(settings, policies, saver.ranks)
        self._peers, self._around, self._saver = peers, around, saver
        self.watcher = Watcher(listeners.hear_signal)
        last_resort = LastResort()
        closing.callback(last_resort.stop)
        self.stopper = Stopper(
            step_gate=self.step_gate,
            update_gate=update_gate,
            exchange=around.exchange,
            watcher=self.watcher,
            saver=saver,
            settings=settings,
            policies=policies,
            already_durable=lambda: None if saver.flags.waiting else already_durable(),
            peers_gone=peers.look,
            page=around.page,
            arm_last_resort=last_resort.arm,
            leave_by=last_resort.leave_by,
            relay=relay,
            member=member,
        )
        self.watcher.start()
        last_resort.start(self.stopper)
        relay.threads |= {self.watcher.ident, last_resort.ident}
        stack.callback(self.watcher.stop)

    def open_saver(self, stack: ExitStack, *, asynchronous: bool) -> None:
        """`asynchronous`: some saves are made beside the training."""
        self._saver.prepare(asynchronous=asynchronous)
        stack.callback(self._close_saver)  # the watcher still guards the deadline meanwhile

    def listen(self, stack: ExitStack) -> None:
        """From here on alarms stop the job. The last thing to do: one may have come already."""
        self.listeners.start(stack, self.stopper, self._around.exchange, self._peers, self._around.link)

    def _close_saver(self) -> None:
        bounded = self.stopper.alarm is not None and not self.stopper.finished
        self._saver.close(max(0.0, self.stopper.time_left_s) if bounded else None)
