"""What is done beside a training thread that does not come: its last boundary is saved, the process ends without it.

The watcher does both, at its own time: a *salvage* where the deadline is near, a rank has died, or no step could be
agreed on; the end of the process when the training thread does not come out behind it. The training thread salvages by
itself where it has left its loop (an exception, a recovery in place that has come to nothing).
"""

from __future__ import annotations

import time

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.stop_step import CANNOT, Decision
from mindx_elastic.alarm.alarm import REFUSAL, Alarm
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.config import Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.leaving import Leaving, note_leaving
from mindx_elastic.guard.process_end import LogRelay, end_process
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stop_save import GATE_S, StopSave
from mindx_elastic.guard.stop_state import SETTLED, StopPhase, StopState
from mindx_elastic.rejoin.member import Member

__all__ = ["LAST_MOMENT_S", "Salvage"]

LAST_MOMENT_S = 0.3
"""How long before the deadline a settled process ends, whatever its training thread does."""
_PATIENCE_S = 3.0  # a salvaged rank's training thread may come out by itself for so long
_CONNECTED_S = 0.3  # what ranks take for that in a recovery in place, if all of them are there
_RECHECK_S = 1.0


class Salvage:
    """One per stopper. `save`: watcher or training thread; the rest as it says."""

    def __init__(
        self,
        state: StopState,
        save: StopSave,
        *,
        step_gate: StepGate,
        update_gate: UpdateGate,
        exchange: Exchange,
        watcher: Watcher,
        saver: Saver,
        settings: Settings,
        relay: LogRelay,
        member: Member | None,
    ) -> None:
        self.decision: Decision | None = None
        """Of the second round, over held boundaries; None: there was none."""
        self.is_coming_out = False
        """The training thread is leaving the guard after a graceful stop, perhaps exporting the network on its way."""
        self._state, self._save = state, save
        self._step_gate, self._update_gate, self._exchange, self._watcher = step_gate, update_gate, exchange, watcher
        self._saver, self._settings, self._relay, self._member = saver, settings, relay, member

    def save(self, alarm: Alarm, *, can_wait: bool = True) -> None:
        """Save the last boundary beside the training thread, or at the failing end of its block. Either thread.

        `can_wait`: the training thread still runs, so it can reach a boundary that another rank is already at.
        """
        if self._state.finished:
            return
        while not self._state.claim():
            if can_wait or self._state.wait_while(StopPhase.SAVING) in SETTLED:
                return
        try:
            if alarm.kind == REFUSAL or self._saver.is_refused:
                self._save_nothing(alarm, can_wait=can_wait)
            else:
                self._save_claimed(alarm, can_wait=can_wait)
        except BaseException:
            # An error of ours: the other thread must not wait for ever. (Without one the claim may be its own by now.)
            if self._state.is_mine:
                self._state.move(StopPhase.FAILED)
            raise

    def _save_nothing(self, alarm: Alarm, *, can_wait: bool) -> None:
        for name in ("stop", "salvage"):
            self._exchange.announce(name, CANNOT)  # no rank waits for this one
        self._save.write(alarm, None)
        if can_wait:
            self._be_patient(alarm)

    def _save_claimed(self, alarm: Alarm, *, can_wait: bool) -> None:
        self._exchange.announce("stop", CANNOT)  # ends the first round for ranks that still wait in it
        devices, left = self._saver.collector.devices, alarm.deadline.remaining_s()
        # A failed step never ends: its update is torn for good, and waiting for it would only cost time. Nor may one
        # whose device waits for a dead rank.
        ends = can_wait and not (alarm.kind == "peer" and devices.keeps_older)
        with self._save.hold(alarm, max(GATE_S, left / 4) if ends else GATE_S) as problem:
            offer: int | str = CANNOT if problem else self._saver.collector.position.step
            if problem and can_wait and self._update_gate.state is not GateState.CLEAN:
                offer = self._step_gate.step + 1  # an update is in progress: this rank will be there in a moment
            if alarm.kind == "peer":
                self.decision = Decision(None, alarm.reason)  # a dead rank agrees to nothing
            decision = self._decide(offer, min(self._settings.agreement_s, max(0.1, left / 4)))
            behind = decision.step is not None and isinstance(offer, int) and decision.step > offer
            behind = behind and not devices.has_gone_back  # that rank does not come further
            if can_wait and (problem or behind) and alarm.deadline.remaining_s() > 2 * LAST_MOMENT_S:
                self._give_up_claim(alarm, decision)
                return
            self._save.write(alarm, problem)
        if can_wait:
            self._be_patient(alarm)
        else:
            self._state.wait_while(StopPhase.SAVING)

    def _decide(self, offer: int | str, timeout_s: float) -> Decision:
        if self.decision is None:
            decision = self.decision = self._exchange.decide("salvage", offer, timeout_s)
            self._saver.events.emit("agreement", step=decision.step, reason=decision.reason, offer=offer)
        return self.decision

    def _give_up_claim(self, alarm: Alarm, decision: Decision) -> None:
        """Let the training thread run to its boundary, where it saves; look again shortly before the end."""
        if not self._state.move(StopPhase.STOPPING):
            return
        self._step_gate.open_until(decision.step or 0)
        self._watcher.call_at(alarm.deadline.at - 2 * LAST_MOMENT_S, lambda: self.save(alarm))

    # --- the end of the process ---------------------------------------------------------------------------------------

    def end_at_deadline(self, alarm: Alarm) -> None:
        """Watcher thread, shortly before the deadline."""
        if self._state.is_settled:
            self.leave_behind(alarm)
        elif self._state.phase is StopPhase.SAVING:
            # A process that is a second late does less harm than a file that is cut off.
            self._watcher.call_at(time.monotonic() + _RECHECK_S, lambda: self.end_at_deadline(alarm))

    def _be_patient(self, alarm: Alarm) -> None:
        """After a salvage: the training thread may come out by itself."""
        self._step_gate.open_until(0)
        now, latest = time.monotonic(), alarm.deadline.at - LAST_MOMENT_S
        self._watcher.call_at(min(now + _PATIENCE_S, latest), lambda: self._lose_patience(alarm))
        if self._member is not None and self._member.wants_out:
            self._watcher.call_at(
                min(now + _CONNECTED_S, latest), lambda: self._lose_patience(alarm, if_connecting=True)
            )

    def _lose_patience(self, alarm: Alarm, *, if_connecting: bool = False) -> None:
        """Watcher thread. `if_connecting`: to ranks of a recovery that do not come any more, only then."""
        is_connecting = self._member is not None and self._member.is_connecting
        if not self.is_coming_out and (is_connecting or not if_connecting):
            self.leave_behind(alarm)

    def leave_behind(self, alarm: Alarm, why: str = "the training thread does not come back") -> None:
        """Watcher, or the last resort where the watcher hangs: end the process without the training thread."""
        if self._state.finished:
            return
        logger.warning("%s; leaving with exit code %d", why, alarm.exit_code)
        self._saver.events.emit("exit", reason=alarm.reason, outcome=str(alarm.exit_code))
        self.note_leaving(alarm)
        end_process(alarm.exit_code, self._relay)

    def note_leaving(self, alarm: Alarm) -> None:
        """Any thread that ends the process, or leaves the guard: what for, for those who ask later."""
        is_own = alarm.origin == self._saver.ranks.rank
        note_leaving(Leaving(alarm.kind, alarm.exit_code, alarm.reason, is_own))
