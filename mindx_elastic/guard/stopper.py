"""How a job stops: from an alarm to a durable checkpoint and the end of the process. Its phases: see `stop_save`.

The usual way. The watcher thread hears an alarm, closes the step gate at the coming boundary, asks the other ranks to
stop, agrees with them on one step and opens the gate up to it (`Stopper.stop`). The training thread arrives there,
claims the save, writes (`stop_save`), and raises `GracefulExit` (`Stopper.at_limit`).

The other ways. Where the training thread cannot reach a boundary (the deadline is near, a rank has died, no step could
be agreed on), the watcher saves the last boundary in its place (`Stopper.salvage`). Where that has left its loop (an
exception, a recovery in place that has come to nothing), it salvages itself. Where the training thread does not come
out in time, the last resort ends the process (`last_resort`).
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.stop_step import CANNOT, FINISHED, Decision, Offer
from mindx_elastic.alarm.alarm import REFUSAL, Alarm, Alarms, signal_name
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.config import Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import WorkerPhase
from mindx_elastic.core.stop_cause import StopCause, note_stop_cause
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard.pausing import Pauses
from mindx_elastic.guard.policy import ExitPolicy, exit_codes_of, policies_for
from mindx_elastic.guard.process_end import LogRelay, end_process, shorten_interpreter_exit
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stop_save import GATE_S, SETTLED, StopPhase, StopSave, StopState
from mindx_elastic.rejoin.failures import comes_from_failure
from mindx_elastic.rejoin.member import LeavesToRejoin, Member

__all__ = ["Stopper"]

_SHORT_S = 0.6
"""Before the deadline it is too late to let the training thread run on."""
_PATIENCE_S = 3.0  # a salvaged rank's training thread may come out by itself for so long
_DYING_S = 0.25
_NOTHING = "nothing is saved"
_AFTER_DEATH_S = 2.0  # a rank that has saved and left needs no help, one that waits for a dead rank does


class Stopper(StopState):
    """Stops one guard's job. Each method says which thread may call it."""

    def __init__(
        self,
        *,
        step_gate: StepGate,
        update_gate: UpdateGate,
        exchange: Exchange,
        watcher: Watcher,
        saver: Saver,
        settings: Settings,
        policies: Sequence[ExitPolicy],
        arm_last_resort: Callable[[Alarm], None],
        leave_by: Callable[[float, str], None],
        relay: LogRelay,
        already_durable: Callable[[], Path | None],
        member: Member | None = None,
    ) -> None:
        """arm_last_resort, leave_by: see `LastResort`. already_durable: the file that has the last boundary already;
        None: there is none."""
        super().__init__()
        self.step_gate, self.update_gate, self.exchange, self.watcher = step_gate, update_gate, exchange, watcher
        ranks = self.ranks = saver.ranks
        events = self.events = saver.events
        self.saver, self.settings = saver, settings
        self.alarms = Alarms(settings, ranks, exit_codes_of(policies))
        self.peers_gone = saver.gone
        exchange.gone = lambda: [rank for rank in self.peers_gone() if not events.has_ended(rank)]
        self.save = StopSave(
            self,
            update_gate,
            saver,
            policies,
            already_durable=already_durable,
            is_agreed=self._is_agreed,
            has_death=lambda: any(map(self._died, saver.gone())),
        )
        self.pauses = Pauses(
            step_gate, exchange, watcher, events, saver.page, rank=ranks.rank, why_not=self._why_no_pause
        )
        self._page, self._member = saver.page, member
        self._arm_last_resort, self.leave_by, self._relay = arm_last_resort, leave_by, relay
        self._stop_decision: Decision | None = None
        self._held_decision: Decision | None = None
        """The decision of the second round, over held boundaries; None: there was none."""
        self.is_coming_out = False
        """The training thread is leaving the guard after a graceful stop, perhaps exporting the network on its way."""
        self._ran_on_from: int | None = None
        """The agreed step, where it is inside an accumulation window and this rank has gone on to its end."""
        self._dead = -1  # the rank that a recovery in place is for
        self._failing = False  # an exception has left the block
        self._ending = False  # the training thread waits for the others at the end of the block
        self._is_done_after_save = False
        self.play_on: Callable[[Alarm], bool] = lambda alarm: False
        """Training thread, once the stop's boundary was saved: whether to make one update more before leaving."""
        self.end_play: Callable[[str], None] = lambda why: None
        """Watcher thread: the process is to leave now, for that reason."""

    @property
    def is_leaving(self) -> bool:
        """Whether the training thread is on its way out of the guard."""
        return self._failing or self.is_coming_out

    @property
    def _wants_out(self) -> bool:
        """Whether a recovery in place waits for the training thread to leave the block."""
        return self._member is not None and self._member.wants_out

    @property
    def time_left_s(self) -> float:
        """Until the process must be gone; 0 without an alarm."""
        alarm = self.alarm
        return 0.0 if alarm is None else alarm.deadline.remaining_s()

    @property
    def agreed_step(self) -> int | None:
        """The step that all ranks have agreed to save; None: none, or a rank is gone."""
        decision = self._held_decision or self._stop_decision
        return None if decision is None else decision.step

    def _is_agreed(self, step: int) -> bool:
        # From an agreed step inside an accumulation window all run on to its end, and compare before they act.
        agreed = self.agreed_step
        return agreed is not None and agreed in (step, self._ran_on_from)

    # --- an alarm is heard (watcher thread) ---------------------------------------------------------------------------

    def hear_signal(self, signum: int) -> None:
        """Watcher thread."""
        if self.phase is StopPhase.TRAINING:
            self.stop(self.alarms.of_signal(signum))
            return
        name = signal_name(signum)
        if self.alarm is not None and self.alarm.asked_code < 0 and not self.finished:
            # The job was to restart after a failure; it is to stop now.
            self._page.set_text("reason", f"{name}, after: {self.alarm.reason}")
            self._page.set(asked_code=self.alarms.of_signal(signum).asked_code)
        logger.warning("%s again; the stop is under way (%s)", name, self.phase.name.lower())
        self.end_play(f"{name} again")
        self.events.emit("alarm", step=self.step_gate.step, reason=name, outcome="already stopping")

    def hear(self, alarm: Alarm) -> None:
        """Watcher thread: any other alarm (flag file, the program, a fault, another rank). A second changes nothing."""
        if self.phase is StopPhase.TRAINING:
            self.stop(alarm)

    def hear_orphan(self) -> None:
        """Watcher thread: the agent of this machine is gone."""
        self.hear(self.alarms.of_orphan())

    def end_unsaved(self, why: str) -> NoReturn:
        """This process no longer belongs to the job: end it, save nothing, ask no rank to stop. Any thread."""
        logger.warning("%s: this process ends, and another one may take its place", why)
        end_process(EXIT_TEMPORARY, self._relay)

    def hear_death(self, rank: int) -> None:
        """Watcher thread: the process of another rank on this machine is gone."""
        self.exchange.hear_death(rank)
        if self.phase is StopPhase.TRAINING and not self._ending and not self.finished:
            if self._died(rank) and self._member is not None:
                self._dead = rank
                self._member.hear_death()
            elif self._died(rank):
                self.stop(self.alarms.of_death([rank]))
        elif self.phase is StopPhase.STOPPING and self.alarm is not None:
            # It may have saved at the agreed step and left, and this rank gets there by itself; or it never will.
            alarm = self.alarm
            self.watcher.call_at(time.monotonic() + _AFTER_DEATH_S, lambda: self.salvage(alarm))

    def stop(self, alarm: Alarm) -> None:
        """Watcher thread: begin the stop. Agrees on a step and lets the training thread run to it."""
        if not self._accept(alarm):
            return
        # Of some rank: no coming boundary is sure to be reached.
        cannot_go_on = alarm.kind in ("exception", "peer", REFUSAL)
        offer = 0 if cannot_go_on else self.step_gate.close()  # before logging, which may take a moment
        self._log_alarm(alarm)
        if alarm.origin == self.ranks.rank:
            self.exchange.request(alarm.to_request())
        if alarm.kind == "peer":
            self.exchange.abandon(alarm.reason)
        if cannot_go_on:
            self.salvage(alarm)
            return
        self.watcher.call_at(alarm.deadline.at - self.save.reserve_s(alarm), lambda: self.salvage(alarm))
        bound = min(self.settings.agreement_s, max(0.1, alarm.deadline.remaining_s() / 3))
        decision = self._stop_decision = self._agree("stop", offer, bound)
        if decision == FINISHED:  # the alarm came after the end of the training, on every rank
            self.dismiss()
        elif decision.step is None:
            logger.warning("no common stop step: %s; saving the last boundary here", decision.reason)
            self.step_gate.open_until(0)
            self.salvage(alarm)
        else:
            self.step_gate.open_until(decision.step)
            is_here = decision.step <= min(self.step_gate.step, self.saver.collector.position.step)
            if is_here and self.step_gate.is_between:  # an evaluation may take long
                self.salvage(alarm)  # elsewhere the training thread has just arrived, and saves it itself

    def _agree(self, name: str, offer: Offer, timeout_s: float) -> Decision:
        decision = self.exchange.decide(name, offer, timeout_s)
        self.events.emit("agreement", step=decision.step, reason=decision.reason, offer=offer)
        return decision

    def _accept(self, alarm: Alarm) -> bool:
        if not self.accept(alarm):
            return False
        self._relay.hurry = self.events.hurry = True
        # First of all: anything that follows may hang.
        self._arm_last_resort(alarm)
        self._page.set_text("reason", alarm.reason)
        self._page.set(phase=WorkerPhase.STOPPING, alarm_ns=time.monotonic_ns(), asked_code=alarm.asked_code)
        return True

    def _log_alarm(self, alarm: Alarm, *, orderly: bool = False) -> None:
        """`orderly`: the program, or a handler of it, leaves by SystemExit."""
        self.events.emit("alarm", step=self.step_gate.step, reason=alarm.reason, outcome="stopping", kind=alarm.kind)
        if alarm.kind in ("exception", REFUSAL):
            what = _NOTHING if alarm.kind == REFUSAL else "saving the last boundary"
            logger.log(logging.WARNING if orderly else logging.ERROR, "%s; %s", alarm.reason, what)
            return
        is_message = alarm.signum is not None or alarm.kind in ("flag", "request")  # else a death, or a fault
        heard = " heard" if is_message and alarm.origin == self.ranks.rank else ""
        left = alarm.deadline.remaining_s()
        logger.warning("%s%s; the process must be gone in %.1f s", alarm.reason, heard, left)
        logger.warning("Graceful exit is triggered, stop training.")

    def _died(self, rank: int) -> bool:
        """Whether a process that is gone has not simply finished first. The log outlives the store's host."""
        return not (self.events.has_ended(rank) or self.exchange.has_left(rank))

    # --- the training thread ------------------------------------------------------------------------------------------

    def at_limit(self, *, is_cut: bool, is_between: bool = False) -> None:
        """Training thread, at the step gate's limit: wait out a pause; after an alarm save here and raise GracefulExit,
        or go on to the agreed step.

        `is_cut`: the step has ended with a boundary; False inside an accumulation window. `is_between`: between two
        steps, where the program can wait whatever it has done to the weights.
        """
        if self.alarm is None and not self._wants_out and not ((is_cut or is_between) and self.pauses.wait()):
            return  # a pause: over, or inside an accumulation window, where the next boundary asks again
        alarm = self.alarm
        if alarm is None and self._wants_out:
            self.saver.collector.before_keeping()
            raise LeavesToRejoin
        assert alarm is not None, "the step gate has a limit only in a pause or after an alarm"
        if not self.is_settled:
            if not self.step_gate.wait(max(0.1, alarm.deadline.remaining_s())):
                return
            if not is_cut:
                self._ran_on_from = self.agreed_step
                return  # the next boundary asks again
            self._save_at_boundary(alarm)
            if not is_between and self.play_on(alarm):
                return
        raise self.exit()

    def stop_for_death(self) -> None:
        """Training thread: a rank is dead, and there is no recovery in place. Returns once the stop is settled."""
        self.update_gate.give_up()
        self._stop_outside_loop(self.alarms.of_death([self._dead]))
        self._wait_until_settled()

    def _stop_outside_loop(self, alarm: Alarm, *, orderly: bool = False) -> None:
        """Training thread, which has left the loop: no boundary is to come that the watcher could wait for. `alarm`:
        unless there is one already."""
        if self._accept(alarm):
            self._log_alarm(alarm, orderly=orderly)
            self.exchange.request(alarm.to_request())
        assert self.alarm is not None
        self.salvage(self.alarm, can_wait=False)

    def _wait_until_settled(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_settled or self.finished, self.settings.grace_s)

    def on_exception(self, error: BaseException) -> None:
        """Training thread: an exception leaves the guard's block. Saves the last boundary if policies want that."""
        self._failing = True
        self.update_gate.give_up()
        alarm = self.alarms.of_exception(error)
        if self.phase is StopPhase.TRAINING:
            gone = [rank for rank in self.peers_gone_soon(error) if self._died(rank)]
            alarm = self.alarms.of_death(gone) if gone else alarm
            if alarm.kind != REFUSAL and not any(alarm.kind in policy.alarms for policy in self.save.policies):
                return
        self._stop_outside_loop(alarm, orderly=isinstance(error, SystemExit))

    def peers_gone_soon(self, error: BaseException) -> Sequence[int]:
        """Training thread: the ranks that are gone. A dying process closes its connections a moment before it is gone,
        so a failed collective may be the first sign of a death: wait for that moment."""
        end = time.monotonic() + (_DYING_S if self.ranks.world_size > 1 and comes_from_failure(error) else 0.0)
        while not (gone := self.peers_gone()) and time.monotonic() < end:
            time.sleep(0.005)
        for rank in gone:
            self.exchange.hear_death(rank)
        return gone

    def at_end(self) -> bool:
        """Training thread: the block has ended by itself. Returns whether an alarm is pending; the last boundary is
        durable then.

        What the program does next (a last evaluation, an export) may take longer than the grace period, so the
        boundary is saved and the process leaves as after any stop; the next start finds every epoch done and only
        does what is left.
        """
        self._let_watcher_act()  # on every signal that has arrived
        self._ending = True
        self.watcher.post(self.pauses.hear_end)
        if self._wants_out and self.phase is StopPhase.TRAINING:
            self.stop_for_death()  # the last step came before the news
        if self.phase is StopPhase.TRAINING:
            decision = self.exchange.finish(self.step_gate.step, self.settings.agreement_s)
            if decision == FINISHED:
                self.dismiss()  # also an alarm that came meanwhile: the other ranks have left without one
            gone = [] if decision == FINISHED else [rank for rank in self.peers_gone() if self._died(rank)]
            if gone and decision.step is None:  # killed before it could finish
                self.watcher.post(lambda: self.stop(self.alarms.of_death(gone)))
                self._wait_until_settled()
            if decision.step is not None:  # an alarm on another rank; its request is on the way to this one
                self.wait_while(StopPhase.TRAINING, timeout_s=self.settings.agreement_s)
        elif not self.is_settled:
            self._let_watcher_act()  # on an alarm that came in this moment: the other ranks are to hear of it
        self.finish()
        if not self.finished and not self.is_settled:
            with self.update_gate.hold(GATE_S) as problem:
                pass
            if problem:  # code after the last step has changed the weights: that is not a boundary, and the end is near
                logger.warning("the alarm came after the last step (%s); finishing", problem)
                self.finished = True
        if self.finished:
            return False
        assert self.alarm is not None
        self._save_at_boundary(self.alarm)
        return True

    def _let_watcher_act(self) -> None:
        done = threading.Event()
        self.watcher.post(done.set)
        done.wait(self.settings.agreement_s + 1.0)

    def _why_no_pause(self) -> str | None:
        """See `Pauses`."""
        if self._ending or self.finished:
            return f"rank {self.ranks.rank} has finished its training at step {self.step_gate.step}"
        return None if self.phase is StopPhase.TRAINING and not self._failing else ""

    def request(self, reason: str, exit_code: int) -> None:
        """Any thread: the program asks for a stop."""
        self.watcher.post(lambda: self.hear(self.alarms.of_request(reason, exit_code)))

    def dismiss(self) -> None:
        """Any thread: the training has ended, and the alarm with it."""
        with self._changed:
            self.finished = True
            self._changed.notify_all()
        self._page.set(asked_code=-1)
        self.step_gate.open_until(None)

    def exit(self) -> GracefulExit:
        """Training thread: the exception to raise once the phase is settled."""
        alarm = self.alarm
        assert alarm is not None
        if alarm.kind == "peer" and not self.is_coming_out:
            # The other ranks wait for this process before they start.
            atexit.register(shorten_interpreter_exit)
        self.is_coming_out = True
        self._note_leaving(alarm)
        self.announce_exit()
        return GracefulExit(alarm.exit_code, reason=alarm.reason, step=self.save.step, path=self.save.path)

    def announce_exit(self) -> None:
        """What the agent is to take for the exit code from now on, whatever ends the process."""
        assert self.alarm is not None
        self._page.set(exit_code=self.alarm.exit_code)

    def after_save(self) -> None:
        """Training thread, on its way out, once: what policies want done when the state is durable. Failures are
        warnings."""
        alarm = self.alarm
        if alarm is None or self.phase is not StopPhase.SAVED or self._is_done_after_save:
            return
        self._is_done_after_save = True
        for policy in policies_for(self.save.policies, alarm):
            if policy.after_save is not None:
                try:
                    policy.after_save(alarm.deadline.at)
                except Exception as error:
                    logger.warning("after the checkpoint: %s: %s", type(error).__name__, error)

    def _save_at_boundary(self, alarm: Alarm) -> None:
        """Training thread, at the agreed boundary. Waits for another thread's save without a bound: leaving would cut
        its file off."""
        while not self.claim():
            if self.wait_while(StopPhase.SAVING) in SETTLED:
                return
        with self.save.hold(alarm) as problem:
            # Before the file is written: another rank that is about to salvage must not wait for this one's disk.
            self.exchange.announce("salvage", CANNOT if problem else self.saver.collector.position.step)
            self.save.write(alarm, problem)

    # --- for a training thread that does not come -----------------------------------------------------------------

    def salvage(self, alarm: Alarm, *, can_wait: bool = True) -> None:
        """Save the last boundary without the training thread (watcher thread), or at the failing end of its block
        (training thread).

        `can_wait`: the training thread still runs, so it can reach a boundary that another rank is already at.
        """
        if self.finished:
            return
        while not self.claim():
            if can_wait or self.wait_while(StopPhase.SAVING) in SETTLED:
                return
        try:
            self._salvage_claimed(alarm, can_wait=can_wait)
        except BaseException:
            # An error of ours: the other thread must not wait for ever, unless it has the claim by now.
            if self.is_mine:
                self.move(StopPhase.FAILED)
            raise

    def _salvage_claimed(self, alarm: Alarm, *, can_wait: bool) -> None:
        self.exchange.announce("stop", CANNOT)  # ends the first round for ranks that still wait in it
        if alarm.kind == REFUSAL or self.saver.is_refused:  # nothing is written, and no rank waits for this one
            self.exchange.announce("salvage", CANNOT)
            self.save.write(alarm, None)
        elif not self._save_held(alarm, can_wait=can_wait):
            return
        if can_wait:  # the training thread may come out by itself
            self.step_gate.open_until(0)
            self.leave_by(time.monotonic() + _PATIENCE_S, "the training thread does not come back")

    def _save_held(self, alarm: Alarm, *, can_wait: bool) -> bool:
        """Save the boundary that the ranks agree to hold. False: the claim was given up, the training thread runs to a
        later one."""
        devices, left = self.saver.collector.devices, alarm.deadline.remaining_s()
        # A failed step never ends: its update is torn for good, and waiting for it would only cost time. Nor may one
        # whose device waits for a dead rank.
        ends = can_wait and not (alarm.kind == "peer" and devices.keeps_older)
        with self.save.hold(alarm, max(GATE_S, left / 4) if ends else GATE_S) as problem:
            offer: int | str = CANNOT if problem else self.saver.collector.position.step
            if problem and can_wait and self.update_gate.state is not GateState.CLEAN:
                offer = self.step_gate.step + 1  # an update is in progress: this rank will be there in a moment
            if alarm.kind == "peer":
                self._held_decision = Decision(None, alarm.reason)  # a dead rank agrees to nothing
            elif self._held_decision is None:
                self._held_decision = self._agree("salvage", offer, min(self.settings.agreement_s, max(0.1, left / 4)))
            agreed = self._held_decision.step
            behind = agreed is not None and isinstance(offer, int) and agreed > offer
            behind = behind and not devices.has_gone_back  # that rank does not come further
            if can_wait and (problem or behind) and alarm.deadline.remaining_s() > _SHORT_S:
                # Let the training thread run to its boundary, where it saves; look again shortly before the end.
                self.move(StopPhase.STOPPING)
                self.step_gate.open_until(agreed or 0)
                self.watcher.call_at(alarm.deadline.at - _SHORT_S, lambda: self.salvage(alarm))
                return False
            self.save.write(alarm, problem)
        return True

    def leave_behind(self, alarm: Alarm, why: str) -> None:
        """The last resort, or the training thread itself: end the process without the training thread's way out."""
        if self.finished:
            return
        logger.warning("%s; leaving with exit code %d", why, alarm.exit_code)
        self.events.emit("exit", reason=alarm.reason, outcome=str(alarm.exit_code))
        self.events.flush()
        self._note_leaving(alarm)
        end_process(alarm.exit_code, self._relay)

    def _note_leaving(self, alarm: Alarm) -> None:
        """Any thread that ends the process, or leaves the guard: what for, for those who ask later."""
        note_stop_cause(StopCause(alarm.kind, alarm.exit_code, alarm.reason, alarm.origin == self.ranks.rank))
