"""How a job stops: from an alarm to a durable checkpoint and the end of the process. Its phases: see `stop_state`.

The usual way. The watcher thread hears an alarm, closes the step gate at the coming boundary, asks the other ranks to
stop, agrees with them on one step and opens the gate up to it (`Stopper.stop`). The training thread arrives there,
claims the save, writes, and raises `GracefulExit` (`Stopper.at_limit`).

The other ways. Where the training thread cannot reach a boundary (the deadline is near, a rank has died, no step could
be agreed on), the watcher saves the last boundary beside it: a *salvage*. After an exception the training thread
salvages itself. A claim whose owner has not begun to write when time runs out goes to the last resort
(`last_resort`); the owner finds that it has lost it and writes nothing.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.stop_step import CANNOT, FINISHED, Decision
from mindx_elastic.alarm.alarm import REFUSAL, Alarm, Alarms, signal_name
from mindx_elastic.alarm.deadline import reserve_s
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.config import Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.leaving import Leaving, note_leaving
from mindx_elastic.core.status_page import StatusPage, WorkerPhase
from mindx_elastic.errors import GracefulExit, SaveError, UnsupportedStateError
from mindx_elastic.guard.held_boundary import DeviceWentOnError, choose_held_boundary
from mindx_elastic.guard.pausing import Pauses
from mindx_elastic.guard.policy import ExitPolicy, exit_codes_of, keep_consistent, policies_for
from mindx_elastic.guard.process_end import LogRelay, end_process, shorten_interpreter_exit
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stop_state import SETTLED, StopPhase, StopState
from mindx_elastic.persist.writer import SaveResult
from mindx_elastic.rejoin.failures import comes_from_failure
from mindx_elastic.rejoin.member import LeavesToRejoin, Member

__all__ = ["LAST_MOMENT_S", "Stopper"]

LAST_MOMENT_S = 0.3
"""How long before the deadline a settled process ends, whatever its training thread does."""
_PATIENCE_S = 3.0  # a salvaged rank's training thread may come out by itself for so long
_CONNECTED_S = 0.3  # what ranks take for that in a recovery in place, if all of them are there
_RECHECK_S = 1.0
_GATE_S = 0.05  # for the update gate where nothing should be in progress
_DYING_S = 0.25
_DEVICE_S = 2.0
_NOTHING = "nothing is saved"
_AFTER_DEATH_S = 2.0  # a rank that has saved and left needs no help, one that waits for a dead rank does


class Stopper:
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
        arm_last_resort: Callable[[Alarm, float], None],
        relay: LogRelay,
        already_durable: Callable[[], Path | None],
        peers_gone: Callable[[], Sequence[int]] = lambda: (),
        page: StatusPage | None = None,
        member: Member | None = None,
    ) -> None:
        """arm_last_resort: see `LastResort.arm`. already_durable: the file that has the last boundary already; None:
        there is none. peers_gone: the ranks of this machine whose processes are gone. page: where the agent reads, None
        without one."""
        self.step_gate, self.update_gate, self.exchange, self.watcher = step_gate, update_gate, exchange, watcher
        ranks = self.ranks = saver.ranks
        events = self.events = saver.events
        self.saver, self.settings = saver, settings
        self.policies = tuple(policies)
        self.alarms = Alarms(settings, ranks, exit_codes_of(policies))
        self.peers_gone = saver.gone = peers_gone
        exchange.gone = lambda: [rank for rank in self.peers_gone() if not events.has_ended(rank)]
        self.path: Path | None = None
        """The file that the stop has written, or found to be durable already."""
        self.saved_step: int | None = None
        self.failure: str | None = None
        """Why nothing could be saved."""
        self.pending = ""
        """After an exception in the middle of a step: why its state cannot count as the coming boundary."""
        self.coming_out = False
        """The training thread is leaving the guard after a graceful stop, perhaps exporting the network on its way."""
        self.state = StopState()
        self.pauses = Pauses(
            step_gate, exchange.pauses, watcher, events, page, rank=ranks.rank, why_not=self._why_no_pause
        )
        self._already_durable, self._page, self._member = already_durable, page, member
        self._arm_last_resort, self._relay = arm_last_resort, relay
        self._stop_decision: Decision | None = None
        self._ran_on_from: int | None = None
        """The agreed step, where it is inside an accumulation window and this rank has gone on to its end."""
        self._salvage_decision: Decision | None = None
        self._dead = -1  # the rank that a recovery in place is for
        self._failing = False  # an exception has left the block
        self._ending = False  # the training thread waits for the others at the end of the block

    @property
    def phase(self) -> StopPhase:
        return self.state.phase

    @property
    def alarm(self) -> Alarm | None:
        """The alarm that stops the job; None before there is one."""
        return self.state.alarm

    @property
    def finished(self) -> bool:
        """Whether the training has ended; later alarms are left to the program."""
        return self.state.finished

    @property
    def is_leaving(self) -> bool:
        """Whether the training thread is on its way out of the guard."""
        return self._failing or self.coming_out

    @property
    def time_left_s(self) -> float:
        """Until the process must be gone; 0 without an alarm."""
        return 0.0 if self.alarm is None else self.alarm.deadline.remaining_s()

    @property
    def agreed_step(self) -> int | None:
        """The step that all ranks have agreed to save; None: none, or a rank is gone."""
        decision = self._salvage_decision or self._stop_decision
        return None if decision is None else decision.step

    # --- an alarm is heard (watcher thread) ---------------------------------------------------------------------------

    def hear_signal(self, signum: int) -> None:
        """Watcher thread."""
        if self.phase is StopPhase.TRAINING:
            self.stop(self.alarms.of_signal(signum))
            return
        name = signal_name(signum)
        logger.warning("%s again; the stop is under way (%s)", name, self.phase.name.lower())
        self.events.emit("alarm", step=self.step_gate.step, reason=name, outcome="already stopping")

    def hear(self, alarm: Alarm) -> None:
        """Watcher thread: any other alarm (flag file, the program, a fault, another rank). A second changes nothing."""
        if self.phase is StopPhase.TRAINING:
            self.stop(alarm)

    def hear_orphan(self) -> None:
        """Watcher thread: the agent of this machine is gone. Where another node may take this one's place the process
        ends, and no other rank is asked to stop: the agents see the loss, and every other rank has the same state."""
        member = self._member
        if member is None or not member.ends_with_agent or self._ending or self.finished or self.is_leaving:
            self.hear(self.alarms.of_orphan())
        elif self.phase is StopPhase.TRAINING:
            self.end_unsaved(self.alarms.of_orphan().reason)

    def end_unsaved(self, why: str, code: int = EXIT_TEMPORARY) -> NoReturn:
        """This process does not belong to the job any more: it ends, saves nothing, asks nobody to stop. Any thread."""
        logger.warning("%s: this process ends, and another one may take its place", why)
        end_process(code, self._relay)

    def hear_death(self, rank: int) -> None:
        """Watcher thread: the process of another rank on this machine is gone."""
        self.exchange.hear_death(rank)
        if self.phase is StopPhase.TRAINING and not self._ending and not self.finished:
            if self._died(rank) and self._member is not None:
                self._dead = rank
                self._member.hear_death(rank)
            elif self._died(rank):
                self.stop(self.alarms.of_death([rank]))
        elif self.phase is StopPhase.STOPPING and self.alarm is not None:
            # It may have saved at the agreed step and left, and this rank gets there by itself; or it never will.
            alarm = self.alarm
            self.watcher.call_at(time.monotonic() + _AFTER_DEATH_S, lambda: self._salvage(alarm))

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
            self._salvage(alarm)
            return
        self.watcher.call_at(alarm.deadline.at - LAST_MOMENT_S, lambda: self._end_at_deadline(alarm))
        self.watcher.call_at(alarm.deadline.salvage_at(self._reserve_s(alarm)), lambda: self._salvage(alarm))
        bound = min(self.settings.agreement_s, max(0.1, alarm.deadline.remaining_s() / 3))
        decision = self._stop_decision = self.exchange.decide("stop", offer, bound)
        self.events.emit("agreement", step=decision.step, reason=decision.reason, offer=offer)
        if decision == FINISHED:  # the alarm came after the end of the training, on every rank
            self.dismiss()
        elif decision.step is None:
            logger.warning("no common stop step: %s; saving the last boundary here", decision.reason)
            self.step_gate.open_until(0)
            self._salvage(alarm)
        else:
            self.step_gate.open_until(decision.step)
            is_here = decision.step <= min(self.step_gate.step, self.saver.collector.position.step)
            if is_here and self.step_gate.is_between:  # an evaluation may take long
                self._salvage(alarm)  # elsewhere the training thread has just arrived, and saves it itself

    def _accept(self, alarm: Alarm) -> bool:
        if not self.state.accept(alarm):
            return False
        self._relay.hurry = True
        # First of all: anything that follows may hang.
        self._arm_last_resort(alarm, alarm.deadline.at - max(self._reserve_s(alarm) / 2, 2 * LAST_MOMENT_S))
        if self._page is not None:
            self._page.set_text("reason", alarm.reason)
            self._page.set(phase=WorkerPhase.STOPPING, alarm_ns=time.monotonic_ns(), asked_code=alarm.asked_code)
        return True

    def _log_alarm(self, alarm: Alarm) -> None:
        self.events.emit("alarm", step=self.step_gate.step, reason=alarm.reason, outcome="stopping", kind=alarm.kind)
        if alarm.kind in ("exception", REFUSAL):
            logger.error("%s; %s", alarm.reason, _NOTHING if alarm.kind == REFUSAL else "saving the last boundary")
            return
        heard = " heard" if alarm.kind in ("signal", "flag", "request") and alarm.origin == self.ranks.rank else ""
        left = alarm.deadline.remaining_s()
        logger.warning("%s%s; the process must be gone in %.1f s", alarm.reason, heard, left)
        logger.warning("Graceful exit is triggered, stop training.")

    def _reserve_s(self, alarm: Alarm) -> float:
        saver = self.saver
        return reserve_s(saver.expected_bytes, alarm.deadline.grace_s, bytes_per_s=saver.bytes_per_s)

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
        wants_out = self._member is not None and self._member.wants_out
        if self.alarm is None and not wants_out and not ((is_cut or is_between) and self.pauses.wait()):
            return  # a pause: over, or inside an accumulation window, where the next boundary asks again
        alarm = self.alarm
        if alarm is None and self._member is not None and self._member.wants_out:
            raise LeavesToRejoin
        assert alarm is not None, "the step gate has a limit only in a pause or after an alarm"
        if not self.state.is_settled:
            if not self.step_gate.wait(max(0.1, alarm.deadline.remaining_s())):
                return
            if not is_cut:
                self._ran_on_from = self.agreed_step
                return  # the next boundary asks again
            self._save_at_boundary(alarm)
        raise self.exit()

    def stop_for_death(self) -> None:
        """Training thread: a rank is dead, and there is no recovery in place. Returns once the stop is settled."""
        self.update_gate.give_up()
        dead = self.alarms.of_death([self._dead])
        if self._accept(dead):
            self._log_alarm(dead)
            self.exchange.request(dead.to_request())
        assert self.alarm is not None
        # It has left the loop: no boundary is to come that the watcher could wait for.
        self._salvage(self.alarm, can_wait=False)
        self._wait_until_settled()

    def _wait_until_settled(self) -> None:
        self.state.wait_while(*set(StopPhase) - set(SETTLED), timeout_s=self.settings.grace_s)

    def on_exception(self, error: BaseException) -> None:
        """Training thread: an exception leaves the guard's block. Saves the last boundary if policies want that."""
        self._failing = True
        self.update_gate.give_up()
        if self.phase is StopPhase.TRAINING:
            gone = [rank for rank in self.peers_gone_soon(error) if self._died(rank)]
            alarm = self.alarms.of_death(gone) if gone else self.alarms.of_exception(error)
            if alarm.kind != REFUSAL and not any(alarm.kind in policy.alarms for policy in self.policies):
                return
            if self._accept(alarm):
                self._log_alarm(alarm)
                self.exchange.request(alarm.to_request())
        assert self.alarm is not None
        self._salvage(self.alarm, can_wait=False)

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
        done = threading.Event()
        self.watcher.post(done.set)  # behind every signal that has arrived
        done.wait(self.settings.agreement_s + 1.0)
        self._ending = True
        self.watcher.post(self.pauses.hear_end)
        if self._member is not None and self._member.wants_out and self.phase is StopPhase.TRAINING:
            self.stop_for_death()  # the last step came before the news
        if self.phase is StopPhase.TRAINING:
            decision = self.exchange.finish(self.step_gate.step, self.settings.agreement_s)
            gone = [] if decision == FINISHED else [rank for rank in self.peers_gone() if self._died(rank)]
            if gone and decision.step is None:  # killed before it could finish
                self.watcher.post(lambda: self.stop(self.alarms.of_death(gone)))
                self._wait_until_settled()
            if decision.step is not None:  # an alarm on another rank; its request is on the way to this one
                self.state.wait_while(StopPhase.TRAINING, timeout_s=self.settings.agreement_s)
        self.state.finish()
        if not self.finished and not self.state.is_settled:
            with self.update_gate.hold(_GATE_S) as problem:
                pass
            if problem:  # code after the last step has changed the weights: that is not a boundary, and the end is near
                logger.warning("the alarm came after the last step (%s); finishing", problem)
                self.state.finished = True
        if self.finished:
            return False
        assert self.alarm is not None
        self._save_at_boundary(self.alarm)
        return True

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
        self.state.finished = True
        if self._page is not None:
            self._page.set(asked_code=-1)
        self.step_gate.open_until(None)

    def exit(self) -> GracefulExit:
        """Training thread: the exception to raise once the phase is settled."""
        assert self.alarm is not None
        if self.alarm.kind == "peer" and not self.coming_out:  # the other ranks wait for this process before they start
            atexit.register(shorten_interpreter_exit)
        self.coming_out = True
        self._note_leaving(self.alarm)
        if self._page is not None:
            self._page.set(exit_code=self.alarm.exit_code)
        return GracefulExit(self.alarm.exit_code, reason=self.alarm.reason, step=self.saved_step, path=self.path)

    def after_save(self) -> None:
        """Training thread, on its way out: what policies want done once the state is durable. Failures are warnings."""
        if self.alarm is None or self.phase is not StopPhase.SAVED:
            return
        for policy in policies_for(self.policies, self.alarm):
            if policy.after_save is not None:
                try:
                    policy.after_save(self.alarm.deadline.at)
                except Exception as error:
                    logger.warning("after the checkpoint: %s: %s", type(error).__name__, error)

    # --- the save -----------------------------------------------------------------------------------------------------

    def _save_at_boundary(self, alarm: Alarm) -> None:
        """Training thread, at the agreed boundary. Waits for another thread's save without a bound: leaving would cut
        its file off."""
        while not self.state.claim():
            if self.state.wait_while(StopPhase.SAVING) in SETTLED:
                return
        with self._hold(alarm, _GATE_S) as problem:
            # Before the file is written: another rank that is about to salvage must not wait for this one's disk.
            self.exchange.announce("salvage", CANNOT if problem else self.saver.collector.position.step)
            self._write(alarm, problem)
        self.state.wait_while(StopPhase.SAVING)  # for the last resort, where it has taken the claim

    def _salvage(self, alarm: Alarm, *, can_wait: bool = True) -> None:
        """Save the last boundary beside the training thread, or at the failing end of its block. Either thread.

        `can_wait`: the training thread still runs, so it can reach a boundary that another rank is already at.
        """
        if self.finished:
            return
        while not self.state.claim():
            if can_wait or self.state.wait_while(StopPhase.SAVING) in SETTLED:
                return
        try:
            if alarm.kind == REFUSAL or self.saver.is_refused:
                self._salvage_nothing(alarm, can_wait=can_wait)
            else:
                self._salvage_claimed(alarm, can_wait=can_wait)
        except BaseException:
            # An error of ours: the other thread must not wait for ever. (Without one the claim may be its own by now.)
            if self.state.is_mine:
                self.state.move(StopPhase.FAILED)
            raise

    def _salvage_nothing(self, alarm: Alarm, *, can_wait: bool) -> None:
        for name in ("stop", "salvage"):
            self.exchange.announce(name, CANNOT)  # no rank waits for this one
        self._write(alarm, None)
        if can_wait:
            self._be_patient(alarm)

    def _salvage_claimed(self, alarm: Alarm, *, can_wait: bool) -> None:
        self.exchange.announce("stop", CANNOT)  # ends the first round for ranks that still wait in it
        left = alarm.deadline.remaining_s()
        # A failed step never ends: its update is torn for good, and waiting for it would only cost time. Nor may one
        # whose device waits for a dead rank.
        ends = can_wait and not (alarm.kind == "peer" and self.saver.collector.devices.keeps_older)
        with self._hold(alarm, max(_GATE_S, left / 4) if ends else _GATE_S) as problem:
            offer: int | str = CANNOT if problem else self.saver.collector.position.step
            if problem and can_wait and self.update_gate.state is not GateState.CLEAN:
                offer = self.step_gate.step + 1  # an update is in progress: this rank will be there in a moment
            if alarm.kind == "peer":
                self._salvage_decision = Decision(None, alarm.reason)  # a dead rank agrees to nothing
            decision = self._decide_salvage(offer, min(self.settings.agreement_s, max(0.1, left / 4)))
            behind = decision.step is not None and isinstance(offer, int) and decision.step > offer
            behind = behind and not self.saver.collector.devices.has_gone_back  # that rank does not come further
            if can_wait and (problem or behind) and alarm.deadline.remaining_s() > 2 * LAST_MOMENT_S:
                self._give_up_claim(alarm, decision)
                return
            self._write(alarm, problem)
        if can_wait:
            self._be_patient(alarm)
        else:
            self.state.wait_while(StopPhase.SAVING)

    @contextmanager
    def _hold(self, alarm: Alarm, timeout_s: float, *, waits: bool = True) -> Iterator[str | None]:
        """The update gate, as `UpdateGate.hold`, with a boundary that the devices hold. `waits`: also until they have
        come to the program's newest one."""
        began, latest = time.monotonic(), alarm.deadline.at - self._reserve_s(alarm)

        def still_waits() -> bool:
            now = time.monotonic()
            # What needs a dead rank never ends; what does not, ends in a moment.
            is_dead = alarm.kind == "peer" or any(map(self._died, self.peers_gone()))
            patience = max(_DEVICE_S, 2 * self.saver.collector.devices.step_s)
            return waits and now < (min(latest, began + patience) if is_dead else latest)

        with self.update_gate.hold(timeout_s) as problem:
            yield choose_held_boundary(self.saver.collector, problem, self.update_gate, still_waits)

    def _give_up_claim(self, alarm: Alarm, decision: Decision) -> None:
        """Let the training thread run to its boundary, where it saves; look again shortly before the end."""
        if not self.state.move(StopPhase.STOPPING):
            return
        self.step_gate.open_until(decision.step or 0)
        self.watcher.call_at(alarm.deadline.at - 2 * LAST_MOMENT_S, lambda: self._salvage(alarm))

    def _decide_salvage(self, offer: int | str, timeout_s: float) -> Decision:
        if self._salvage_decision is None:
            decision = self._salvage_decision = self.exchange.decide("salvage", offer, timeout_s)
            self.events.emit("agreement", step=decision.step, reason=decision.reason, offer=offer)
        return self._salvage_decision

    def _write(self, alarm: Alarm, problem: str | None, *, alone: bool = False) -> None:
        """If the claim is still ours: write the files of every policy that answers this alarm, and settle.

        problem: why the state is not at a boundary; None: it is. alone: as the last resort, which waits for no other
        thread.
        """
        if not alone and not problem:
            self.saver.drain(max(0.0, alarm.deadline.remaining_s() / 3))
        if not self.state.begin_writing():
            return
        step = self.saver.collector.position.step
        # Only where every rank is known to be alive, at this step, with the time to wait for each other.
        acts_together = not alone and alarm.kind not in ("exception", "peer")
        # From an agreed step inside an accumulation window all run on to its end, and compare before they act.
        is_agreed = self.agreed_step is not None and self.agreed_step in (step, self._ran_on_from)
        agreed = acts_together and not problem and is_agreed
        if acts_together and not agreed and self.saver.together is not None:
            self.saver.together.decline()
        if alarm.kind == REFUSAL or self.saver.is_refused:
            self._save_nothing(alarm, step)
            return
        if problem:
            self._refuse(step, problem, "state is not at a boundary")
            return
        # Before the first step there is nothing to lose, and a file of it would bind the next start to this very model.
        wanted = [p for p in policies_for(self.policies, alarm) if p.save and (step > 0 or p.kind == "eval")]
        durable = self._already_durable()
        if agreed and (durable is not None or not wanted) and self.saver.together is not None:
            self.saver.together.decline()
        if durable is not None:
            self._note_saved(durable, step)
            logger.info("step %d is already durable in %s", step, durable)
            self.state.move(StopPhase.SAVED)
        elif not wanted:
            if step == 0:
                logger.info("no step has been done yet: nothing to save")
            self.state.move(StopPhase.SAVED)
        elif consistent := keep_consistent(wanted, alarm.kind, replicated=self.saver.replicated):
            self._write_files(alarm, consistent, step, agreed=agreed)
        else:
            why = f"{alarm.reason} and no other rank holds the same state: there is no consistent replica"
            self._refuse(step, why, "no consistent replica")

    def _save_nothing(self, alarm: Alarm, step: int) -> None:
        """State of some rank is not kept: a file of this step would be resumed without it."""
        if alarm.kind != REFUSAL:
            logger.error("step %d is not saved: the training was refused before", step)
        self.failure = "the training was refused"
        self.events.emit("save", step=step, reason=alarm.reason, outcome="refused: state that is not kept")
        self.state.move(StopPhase.FAILED)

    def _write_files(self, alarm: Alarm, policies: Sequence[ExitPolicy], step: int, *, agreed: bool) -> None:
        try:
            result = self._save(alarm, policies, agreed=agreed)
            step = result.info.step
        except Exception as error:
            # Whatever it is (also a bug, or a `state_dict` of the user's that raises): the claim must be given back,
            # or the other thread would wait for ever, and the job must leave in time.
            self.failure = f"{type(error).__name__}: {error}"
            expected = isinstance(error, (SaveError, UnsupportedStateError))
            logger.error("step %d could not be saved: %s", step, self.failure, exc_info=not expected)
            self.events.emit("save", step=step, reason=alarm.reason, outcome=f"failed: {self.failure}")
            self.saver.keep_unsaved(step, alarm.deadline.remaining_s() / 4)
            self.state.move(StopPhase.FAILED)
            return
        self._note_saved(result.path, step)
        since = time.monotonic() - self.state.heard_at
        what = "the weights of the evaluation" if policies[0].kind == "eval" else f"step {step}"
        logger.info("%s saved in %s (%.2f s after the alarm)", what, result.path, since)
        self.events.emit(
            "durable", step=step, reason=alarm.reason, duration_s=since, nbytes=result.nbytes, path=str(result.path)
        )
        self.state.move(StopPhase.SAVED)

    def _save(self, alarm: Alarm, policies: Sequence[ExitPolicy], *, agreed: bool) -> SaveResult:
        """Once more where the device has gone on while an older boundary was read: it holds a newer one then."""
        for tries_left in (2, 1, 0):
            try:
                return self.saver.save_dying(
                    policies, alarm.reason, time_left_s=alarm.deadline.remaining_s(), agreed=agreed
                )
            except SaveError as error:
                if not (tries_left and isinstance(error.__cause__, DeviceWentOnError)):
                    raise
                end, agreed = time.monotonic() + _DEVICE_S, False
                waits = partial(_is_before, end)
                if problem := choose_held_boundary(self.saver.collector, None, self.update_gate, waits):
                    raise UnsupportedStateError("the state", problem) from error
        raise AssertionError("the last try has returned or raised")

    def _note_saved(self, path: Path, step: int) -> None:
        self.path, self.saved_step = path, step
        if self._page is not None:
            self._page.set(saved_step=step, saved_ns=time.monotonic_ns())

    def _refuse(self, step: int, problem: str, short: str) -> None:
        if self.pending not in ("", problem):
            problem = f"{problem} ({self.pending})"
        self.failure = problem
        remedy = "the newest complete checkpoint on disk stands in"
        if self.saver.newest_step < step:
            lost = step - self.saver.newest_step
            remedy += f"; this process knows of step {self.saver.newest_step}, so up to {lost} steps are done again"
        logger.error("the boundary after step %d cannot be saved: %s; %s", step, problem, remedy)
        self.events.emit("save", step=step, reason=problem, outcome=f"refused: {short}")
        self.state.move(StopPhase.FAILED)

    # --- the end of the process, beside the training thread -----------------------------------------------------------

    def _end_at_deadline(self, alarm: Alarm) -> None:
        """Watcher thread, shortly before the deadline."""
        if self.state.is_settled:
            self.leave_behind(alarm)
        elif self.phase is StopPhase.SAVING:
            # A process that is a second late does less harm than a file that is cut off.
            self.watcher.call_at(time.monotonic() + _RECHECK_S, lambda: self._end_at_deadline(alarm))

    def _be_patient(self, alarm: Alarm) -> None:
        """After a salvage: the training thread may come out by itself."""
        self.step_gate.open_until(0)
        now, latest = time.monotonic(), alarm.deadline.at - LAST_MOMENT_S
        self.watcher.call_at(min(now + _PATIENCE_S, latest), lambda: self._lose_patience(alarm))
        if self._member is not None and self._member.wants_out:
            self.watcher.call_at(
                min(now + _CONNECTED_S, latest), lambda: self._lose_patience(alarm, if_connecting=True)
            )

    def _lose_patience(self, alarm: Alarm, *, if_connecting: bool = False) -> None:
        """Watcher thread. `if_connecting`: to ranks of a recovery that do not come any more, only then."""
        is_connecting = self._member is not None and self._member.is_connecting
        if not self.coming_out and (is_connecting or not if_connecting):
            self.leave_behind(alarm)

    def leave_behind(self, alarm: Alarm, why: str = "the training thread does not come back") -> None:
        """Watcher, or the last resort where the watcher hangs: end the process without the training thread."""
        if self.finished:
            return
        logger.warning("%s; leaving with exit code %d", why, alarm.exit_code)
        self.events.emit("exit", reason=alarm.reason, outcome=str(alarm.exit_code))
        self._note_leaving(alarm)
        end_process(alarm.exit_code, self._relay)

    def _note_leaving(self, alarm: Alarm) -> None:
        note_leaving(Leaving(alarm.kind, alarm.exit_code, alarm.reason, alarm.origin == self.ranks.rank))

    # --- the last resort (its thread) ---------------------------------------------------------------------------------

    def take_over_alarm(self, alarm: Alarm) -> None:
        """A signal that the watcher does not read. Alone: without the watcher the others cannot be asked."""
        if self._accept(alarm):
            if self.ranks.world_size == 1:
                self.step_gate.open_until(0)  # the training thread saves at the coming boundary
            self._log_alarm(alarm)

    def is_stuck(self, patience_s: float) -> bool:
        """Whether a stop that ought to be saved by now is held up by the watcher, or by the owner of the claim."""
        before = time.monotonic() - patience_s
        busy_since = self.watcher.busy_since
        if self.phase is StopPhase.STOPPING:
            return busy_since is not None and busy_since < before
        return self.state.was_claimed_before(before)

    def save_as_last_resort(self, alarm: Alarm) -> None:
        """Save the last boundary, unless it is being written: nothing here waits for another thread or the store."""
        held_up = self.state.take_claim()
        if not held_up:
            return
        logger.warning("%s is held up; saving the last boundary from beside it", held_up)
        try:
            with self._hold(alarm, _GATE_S, waits=False) as problem:
                self._write(alarm, problem, alone=True)
        except BaseException:
            if self.state.is_mine:
                self.state.move(StopPhase.FAILED)
            raise
        finally:
            self.step_gate.open_until(0)


def _is_before(end: float) -> bool:
    return time.monotonic() < end
