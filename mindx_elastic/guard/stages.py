"""Joins the stages of a stop in one worker: alarms are heard, a step is agreed on, the last boundary is saved.

Listeners (alarms) -> Watcher (the thread that hears them) -> Stopper -> StepGate (where the training thread stops) ->
Saver. The last resort is separate, for a training thread that does not come.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.guard.last_resort import LastResort
from mindx_elastic.guard.listeners import Listeners
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.rejoin.member import Member

__all__ = ["Stages"]


class Stages:
    """One per entered guard. Main thread."""

    def __init__(
        self,
        stack: ExitStack,
        opening: Opening,
        update_gate: UpdateGate,
        *,
        step: int,
        already_durable: Callable[[], Path | None],
        member: Member | None = None,
    ) -> None:
        """The state is back, at boundary `step`. `stack` ends all; the last resort only when `opening.closing` does, so
        that it keeps the deadline while other things are closed. `already_durable`: as of `Stopper`."""
        self._opening = opening
        around, saver, relay, peers = opening.around, opening.saver, opening.relay, opening.start.peers
        self.step_gate = StepGate(step)
        stack.callback(peers.close)
        self.listeners = Listeners(opening.settings, opening.policies, saver.ranks)
        watcher, last_resort = Watcher(self.listeners.hear_signal), LastResort()
        opening.closing.callback(last_resort.stop)
        self.stopper = Stopper(
            step_gate=self.step_gate,
            update_gate=update_gate,
            exchange=around.exchange,
            watcher=watcher,
            saver=saver,
            settings=opening.settings,
            policies=opening.policies,
            already_durable=lambda: None if saver.flags.waiting else already_durable(),
            peers_gone=peers.look,
            page=around.page,
            arm_last_resort=last_resort.arm,
            leave_by=last_resort.leave_by,
            relay=relay,
            member=member,
        )
        watcher.start()
        last_resort.start(self.stopper)
        relay.threads |= {watcher.ident, last_resort.ident}
        stack.callback(watcher.stop)
        saver.prepare(asynchronous=any(policy.asynchronous for policy in opening.periodic))
        stack.callback(self._close_saver)  # the watcher still guards the deadline meanwhile

    def listen(self, stack: ExitStack) -> None:
        """Let alarms stop the job from now on. Call it last: one may have come already."""
        around = self._opening.around
        self.listeners.start(stack, self.stopper, around.exchange, self._opening.start.peers, around.link)

    def _close_saver(self) -> None:
        bounded = self.stopper.alarm is not None and not self.stopper.finished
        self._opening.saver.close(max(0.0, self.stopper.time_left_s) if bounded else None)
