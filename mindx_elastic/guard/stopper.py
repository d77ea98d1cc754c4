"""How a job stops: from an alarm, over the agreement, to a durable checkpoint and the way out.

One `Stopper` a guard. Alarms come in on the watcher thread (signals, flag file, other ranks) or on the training thread
(exceptions). Whoever gets there first *claims* the save; the other one waits for it. A claim whose owner has not begun
to write when time runs out is taken away by the last resort (`last_resort`), and its owner finds that it has lost it.

The phases and what is true in each: see `stop_phase`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.stop_step import CANNOT, FINISHED, Decision
from mindx_elastic.alarm.alarm import Alarm, signal_name
from mindx_elastic.alarm.deadline import reserve_s
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import StatusPage, WorkerPhase
from mindx_elastic.errors import GracefulExit, SaveError, UnsupportedStateError
from mindx_elastic.guard.alarms import Alarms
from mindx_elastic.guard.last_resort import LastResort
from mindx_elastic.guard.leaving import LAST_MOMENT_S, WayOut
from mindx_elastic.guard.log_relay import LogRelay
from mindx_elastic.guard.policy import ExitPolicy, keep_consistent
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stop_phase import FINAL, MOVES, StopPhase

__all__ = ["Stopper"]

_DYING_S = 0.25
_AFTER_DEATH_S = 2.0  # a rank that has saved and left needs no help, one that waits for a dead rank does


class Stopper:
    """The state machine. Methods say which thread may call them."""

    def __init__(
        self,
        *,
        step_gate: StepGate,
        update_gate: UpdateGate,
        exchange: Exchange,
        watcher: Watcher,
        saver: Saver,
        ranks: RankInfo,
        settings: Settings,
        policies: Sequence[ExitPolicy],
        events: EventLog,
        already_durable: Callable[[], Path | None],
        peers_gone: Callable[[], Sequence[int]] = lambda: (),
        page: StatusPage | None = None,
        last_resort: LastResort | None = None,
        relay: LogRelay | None = None,
    ) -> None:
        self.step_gate, self.update_gate, self.exchange, self.watcher = step_gate, update_gate, exchange, watcher
        self.saver, self.ranks, self.settings, self.events = saver, ranks, settings, events
        self.alarms = Alarms(policies, settings, ranks)
        self.policies = self.alarms.policies
        self.peers_gone = saver.gone = peers_gone
        self._page = page
        self.alarm: Alarm | None = None
        self.path: Path | None = None
        self.saved_step: int | None = None
        self.failure: str | None = None
        self.pending = ""
        """After an exception in mid-step: what keeps the state from being the coming boundary."""
        self._already_durable = already_durable
        self._phase = StopPhase.TRAINING
        self._changed = threading.Condition()
        self._stop_decision: Decision | None = None
        self._salvage_decision: Decision | None = None
        self._owner: int | None = None  # thread that has claimed the save
        self._claimed_at = 0.0
        self._writing = False
        self._last_resort, self._relay = last_resort, relay
        self.way_out = WayOut(watcher, events, lambda: self._phase, relay)
        self._heard_at = 0.0
        self._failing = False  # an exception has left the block
        self._ending = False  # the training thread waits for the others at the end of the block

    @property
    def phase(self) -> StopPhase:
        return self._phase

    # --- alarms -----------------------------------------------------------------------------------------------------

    def hear_signal(self, signum: int) -> None:
        """Watcher thread."""
        name = signal_name(signum)
        if self._phase is not StopPhase.TRAINING:
            logger.warning("%s again; the stop is under way (%s)", name, self._phase.name.lower())
            self.events.emit("alarm", step=self.step_gate.step, reason=name, outcome="already stopping")
            return
        self.stop(self.alarms.of_signal(signum))

    def hear(self, alarm: Alarm) -> None:
        """Watcher thread: any other alarm (flag file, the program, a fault, another rank). A second changes nothing."""
        if self._phase is StopPhase.TRAINING:
            self.stop(alarm)

    def hear_death(self, rank: int) -> None:
        """Watcher thread: the process of another rank on this machine is gone."""
        self.exchange.hear_death(rank)
        if self._phase is StopPhase.TRAINING and not self._ending and not self.finished:
            if self._died(rank):
                self.stop(self.alarms.of_death([rank]))
        elif self._phase is StopPhase.STOPPING and self.alarm is not None:
            # It may have saved at the agreed step and left, and this rank gets there by itself; or it never will.
            alarm = self.alarm
            self.watcher.call_at(time.monotonic() + _AFTER_DEATH_S, lambda: self._salvage(alarm))

    def stop(self, alarm: Alarm) -> None:
        """Watcher thread: begin the stop. Agrees on a step and lets the training thread run to it."""
        if not self._accept(alarm):
            return
        has_failed = alarm.kind in ("exception", "peer")  # a rank: no coming boundary is sure to be reached
        offer = 0 if has_failed else self.step_gate.close()  # before any line is written, which may take its time
        self._say(alarm)
        if alarm.origin == self.ranks.rank:
            self._tell_others(alarm)
        if alarm.kind == "peer":
            self.exchange.abandon(alarm.reason)
        if has_failed:
            self._salvage(alarm)
            return
        self.way_out.guard_deadline(alarm)
        self.watcher.call_at(alarm.deadline.salvage_at(self._reserve_s(alarm)), lambda: self._salvage(alarm))
        bound = min(self.settings.agreement_s, max(0.1, alarm.deadline.remaining_s() / 3))
        decision = self._stop_decision = self.exchange.decide("stop", offer, bound)
        self.events.emit("agreement", step=decision.step, reason=decision.reason, offer=offer)
        if decision == FINISHED:  # the alarm came after the end of the training, on every rank
            self.way_out.dismissed = True
            self.step_gate.open_until(None)
            return
        if decision.step is None:
            logger.warning("no common stop step: %s; saving the last boundary here", decision.reason)
            self.step_gate.open_until(0)
            self._salvage(alarm)
            return
        self.step_gate.open_until(decision.step)
        if decision.step <= min(self.step_gate.step, self.saver.collector.position.step):
            self._salvage(alarm)  # between two steps: the boundary is already here, and an evaluation may take long

    # --- the last resort (its thread) ---------------------------------------------------------------------------------

    def take_over_alarm(self, alarm: Alarm) -> None:
        """A signal that the watcher does not read. Alone: without it nobody can ask the others."""
        if self._accept(alarm):
            if self.ranks.world_size == 1:
                self.step_gate.open_until(0)  # the training thread saves at the coming boundary
            self._say(alarm)

    def is_stuck(self, patience_s: float) -> bool:
        """Whether a stop that ought to be saved by now is held up by the watcher, or by the owner of the claim."""
        before = time.monotonic() - patience_s
        busy_since = self.watcher.busy_since
        with self._changed:
            if self._phase is StopPhase.SAVING:
                return not self._writing and self._claimed_at < before
            return self._phase is StopPhase.STOPPING and busy_since is not None and busy_since < before

    @property
    def comes_out(self) -> bool:
        """Whether the training thread is on its way out of the guard."""
        return self._failing or self.way_out.coming_out

    @property
    def settled(self) -> bool:
        """Whether the save is over, one way or the other."""
        return self._phase in FINAL

    def save_as_last_resort(self, alarm: Alarm) -> None:
        """Save the last boundary alone, unless somebody is writing it: nothing here waits for a thread or the store."""
        with self._changed:
            if self._phase not in (StopPhase.STOPPING, StopPhase.SAVING) or self._writing or self.way_out.dismissed:
                return
            held_up = "the save" if self._phase is StopPhase.SAVING else "the stop"
            self._phase = StopPhase.SAVING
            self._own()
        logger.warning("%s is held up; saving the last boundary from beside it", held_up)
        try:
            with self.update_gate.hold(0.05) as problem:
                if problem:
                    self._refuse(problem)
                else:
                    self._write(alarm, alone=True)
        except BaseException:
            if self._owner == threading.get_ident():
                self._move(StopPhase.FAILED)
            raise
        finally:
            self.step_gate.open_until(0)

    # --- the training thread ------------------------------------------------------------------------------------------

    def at_limit(self, *, is_cut: bool) -> None:
        """Training thread, at the step gate's limit: save here and raise GracefulExit, or go on to the agreed step."""
        alarm = self.alarm
        assert alarm is not None, "the step gate has a limit only after an alarm"
        if self._phase not in FINAL:
            if not self.step_gate.wait(max(0.1, alarm.deadline.remaining_s())):
                return
            if not is_cut:
                return  # inside an accumulation window; the next boundary asks again
            self._save_at_boundary(alarm)
        raise self.exit()

    def on_exception(self, error: BaseException) -> None:
        """Training thread: an exception leaves the guard's block. Saves the last boundary if policies want that."""
        self._failing = True
        self.update_gate.give_up()
        if self._phase is StopPhase.TRAINING:
            gone = [rank for rank in self._peers_gone_soon(error) if self._died(rank)]
            alarm = self.alarms.of_death(gone) if gone else self.alarms.of_exception(error)
            if not any(alarm.kind in policy.alarms for policy in self.policies):
                return
            if self._accept(alarm):
                self._say(alarm)
                self._tell_others(alarm)
        assert self.alarm is not None
        self._salvage(self.alarm, can_wait=False)

    def _died(self, rank: int) -> bool:
        """Whether a process that is gone did not just finish before the others. The log outlives the store's host."""
        return not (self.events.has_ended(rank) or self.exchange.has_left(rank))

    def _peers_gone_soon(self, error: BaseException) -> Sequence[int]:
        """A dying process closes its connections a moment before it is gone: what looks like an error is its death."""
        end = time.monotonic() + (_DYING_S if isinstance(error, RuntimeError) and self.ranks.world_size > 1 else 0.0)
        while not (gone := self.peers_gone()) and time.monotonic() < end:
            time.sleep(0.005)
        for rank in gone:
            self.exchange.hear_death(rank)
        return gone

    def at_end(self) -> bool:
        """Training thread: the block has ended by itself. Whether an alarm is pending; the last boundary is durable
        then.

        What the program does next (a last evaluation, an export) may take longer than the grace period, so the
        boundary is saved and the process leaves as after any stop; the next start finds every epoch done and only
        does what is left.
        """
        done = threading.Event()
        self.watcher.post(done.set)  # behind every signal that has arrived
        done.wait(self.settings.agreement_s + 1.0)
        self._ending = True
        if self._phase is StopPhase.TRAINING:
            decision = self.exchange.finish(self.step_gate.step, self.settings.agreement_s)
            gone = [] if decision == FINISHED else [rank for rank in self.peers_gone() if self._died(rank)]
            if gone and decision.step is None:  # killed before it could finish
                self.watcher.post(lambda: self.stop(self.alarms.of_death(gone)))
                with self._changed:
                    self._changed.wait_for(lambda: self._phase in FINAL, self.settings.grace_s)
            if decision.step is not None:  # an alarm on another rank; its request is on the way to this one
                with self._changed:
                    self._changed.wait_for(lambda: self._phase is not StopPhase.TRAINING, self.settings.agreement_s)
        with self._changed:
            self.way_out.dismissed |= self._phase is StopPhase.TRAINING
        if not self.way_out.dismissed and self._phase not in FINAL:
            with self.update_gate.hold(0.05) as problem:
                pass
            if problem:  # code after the last step has changed the weights: that is no boundary, and the end is near
                logger.warning("the alarm came after the last step (%s); finishing", problem)
                self.way_out.dismissed = True
        if self.way_out.dismissed:
            return False
        assert self.alarm is not None
        self._save_at_boundary(self.alarm)
        return True

    @property
    def finished(self) -> bool:
        """The training has ended and no stop will follow; alarms are for whoever comes after."""
        return self.way_out.dismissed

    @property
    def time_left_s(self) -> float:
        """Until the process must be gone; 0 without an alarm."""
        return 0.0 if self.alarm is None else self.alarm.deadline.remaining_s()

    @property
    def agreed_step(self) -> int | None:
        """The step that all ranks have agreed to save; None: none, or a rank is gone."""
        decision = self._salvage_decision or self._stop_decision
        return None if decision is None else decision.step

    def dismiss(self) -> None:
        """Training thread: the stop that was reached is the normal end of the training after all."""
        self.way_out.dismissed = True
        self.step_gate.open_until(None)

    def exit(self) -> GracefulExit:
        """What the training thread raises once the phase is final."""
        assert self.alarm is not None
        self.way_out.come_out(self.alarm)
        if self._page is not None:
            self._page.set(exit_code=self.alarm.exit_code)
        return GracefulExit(self.alarm.exit_code, reason=self.alarm.reason, step=self.saved_step, path=self.path)

    def after_save(self) -> None:
        """Training thread, on its way out: what policies want done once the state is durable. Failures are warnings."""
        if self.alarm is None or self._phase is not StopPhase.SAVED:
            return
        for policy in self.alarms.answering(self.alarm):
            if policy.after_save is not None:
                try:
                    policy.after_save(self.alarm.deadline.at)
                except Exception as error:
                    logger.warning("after the checkpoint: %s: %s", type(error).__name__, error)

    def wait_while_saving(self) -> StopPhase:
        """Training thread: wait for the watcher's save. Without a bound: leaving now would cut the file off."""
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not StopPhase.SAVING)
            return self._phase

    # --- saving -------------------------------------------------------------------------------------------------------

    def _save_at_boundary(self, alarm: Alarm) -> None:
        while not self._claim():
            if self.wait_while_saving() in FINAL:
                return
        with self.update_gate.hold(0.05) as problem:
            # Before the file is written: another rank that is about to salvage must not wait for this one's disk.
            self.exchange.announce("salvage", CANNOT if problem else self.saver.collector.position.step)
            if problem:
                self._refuse(problem)
            else:
                self._write(alarm)
        self.wait_while_saving()  # for the last resort, where it was faster

    def _salvage(self, alarm: Alarm, *, can_wait: bool = True) -> None:
        """Save the last boundary from beside the training thread, or from its failing end. Either thread.

        `can_wait`: the training thread still runs, so it can reach a boundary that another rank is already at.
        """
        if self.way_out.dismissed:
            return
        while not self._claim():
            if can_wait or self.wait_while_saving() in FINAL:
                return
        try:
            self._salvage_claimed(alarm, can_wait=can_wait)
        except BaseException:
            # An error of ours: the other thread must not wait for ever. (Without one the claim may be its own by now.)
            if self._owner == threading.get_ident():
                self._move(StopPhase.FAILED)
            raise

    def _salvage_claimed(self, alarm: Alarm, *, can_wait: bool) -> None:
        self.exchange.announce("stop", CANNOT)  # whoever still waits for this rank in the first round must not
        left = alarm.deadline.remaining_s()
        # A failed step never ends: its update is torn for good, and waiting for it would only cost time.
        with self.update_gate.hold(max(0.05, left / 4) if can_wait else 0.05) as problem:
            offer: int | str = CANNOT if problem else self.saver.collector.position.step
            if problem and can_wait and self.update_gate.state is not GateState.CLEAN:
                offer = self.step_gate.step + 1  # an update is on its way: this rank will be there in a moment
            if alarm.kind == "peer":
                self._salvage_decision = Decision(None, alarm.reason)  # a dead rank agrees to nothing
            decision = self._decide_salvage(offer, min(self.settings.agreement_s, max(0.1, left / 4)))
            behind = decision.step is not None and isinstance(offer, int) and decision.step > offer
            if can_wait and (problem or behind) and alarm.deadline.remaining_s() > 2 * LAST_MOMENT_S:
                self._give_up_claim(alarm, decision)
                return
            if problem:
                self._refuse(problem)
            else:
                self._write(alarm)
        if can_wait:
            self.step_gate.open_until(0)
            self.way_out.leave_soon(alarm)
        else:
            self.wait_while_saving()

    def _give_up_claim(self, alarm: Alarm, decision: Decision) -> None:
        """Let the training thread run to its boundary, where it saves; look again shortly before the end."""
        if not self._move(StopPhase.STOPPING):
            return
        self.step_gate.open_until(decision.step or 0)
        self.watcher.call_at(alarm.deadline.at - 2 * LAST_MOMENT_S, lambda: self._salvage(alarm))

    def _decide_salvage(self, offer: int | str, timeout_s: float) -> Decision:
        if self._salvage_decision is None:
            self._salvage_decision = self.exchange.decide("salvage", offer, timeout_s)
            self.events.emit(
                "agreement", step=self._salvage_decision.step, reason=self._salvage_decision.reason, offer=offer
            )
        return self._salvage_decision

    def _write(self, alarm: Alarm, *, alone: bool = False) -> None:
        """If the claim is still ours: write the files of every policy that answers this alarm.

        alone: as the last resort, which waits for nobody.
        """
        if not alone:
            self.saver.drain(max(0.0, alarm.deadline.remaining_s() / 3))
        with self._changed:
            if self._owner != threading.get_ident():
                return
            self._writing = True
        step = self.saver.collector.position.step
        # Before the first step there is nothing to lose, and a file of it would bind the next start to this very model.
        wanted = [p for p in self.alarms.answering(alarm) if p.save and (step > 0 or p.kind == "eval")]
        durable = self._already_durable()
        if not wanted or durable is not None:
            self.path, self.saved_step = durable, step if durable is not None else None
            if self._page is not None and durable is not None:
                self._page.set(saved_step=step, saved_ns=time.monotonic_ns())
            if durable is not None:
                logger.info("step %d is already durable in %s", step, durable)
            elif step == 0:
                logger.info("no step has been done yet: nothing to save")
            self._move(StopPhase.SAVED)
            return
        wanted = keep_consistent(wanted, alarm.kind, replicated=self.saver.replicated)
        if not wanted:
            problem = f"{alarm.reason} and no other rank holds the same state: there is no consistent replica"
            self._refuse(problem, "no consistent replica")
            return
        try:
            result = self.saver.save_dying(wanted, alarm.reason, time_left_s=alarm.deadline.remaining_s())
        except Exception as error:
            # Whatever it is (also a bug, or a `state_dict` of the user's that raises): the claim must be given back,
            # or the other thread would wait for ever, and the job must leave in time.
            self.failure = f"{type(error).__name__}: {error}"
            expected = isinstance(error, (SaveError, UnsupportedStateError))
            logger.error("step %d could not be saved: %s", step, self.failure, exc_info=not expected)
            self.events.emit("save", step=step, reason=alarm.reason, outcome=f"failed: {self.failure}")
            self._move(StopPhase.FAILED)
            return
        self.path, self.saved_step = result.path, step
        if self._page is not None:
            self._page.set(saved_step=step, saved_ns=time.monotonic_ns())
        since = time.monotonic() - self._heard_at
        what = "the weights of the evaluation" if wanted[0].kind == "eval" else f"step {step}"
        logger.info("%s saved in %s (%.2f s after the alarm)", what, result.path, since)
        self.events.emit(
            "durable", step=step, reason=alarm.reason, duration_s=since, nbytes=result.nbytes, path=str(result.path)
        )
        self._move(StopPhase.SAVED)

    def _refuse(self, problem: str, short: str = "state is not at a boundary") -> None:
        with self._changed:
            if self._owner != threading.get_ident():
                return
            self._writing = True
        if self.pending not in ("", problem):
            problem = f"{problem} ({self.pending})"
        self.failure = problem
        step = self.saver.collector.position.step
        remedy = "the newest complete checkpoint on disk stands in"
        if self.saver.newest_step < step:
            remedy += (
                f"; this process knows of step {self.saver.newest_step}, so up to {step - self.saver.newest_step} "
            )
            remedy += "steps are done again"
        logger.error("the boundary after step %d cannot be saved: %s; %s", step, problem, remedy)
        self.events.emit("save", step=step, reason=problem, outcome=f"refused: {short}")
        self._move(StopPhase.FAILED)

    # --- small parts --------------------------------------------------------------------------------------------------

    def _accept(self, alarm: Alarm) -> bool:
        with self._changed:
            if self._phase is not StopPhase.TRAINING or self.way_out.dismissed:
                return False
            self.alarm = alarm
            self._heard_at = time.monotonic()
            self._phase = StopPhase.STOPPING
            self._changed.notify_all()
        if self._relay is not None:
            self._relay.hurry = True
        if self._last_resort is not None:  # first of all: whatever comes now may hang
            self._last_resort.arm(alarm, alarm.deadline.at - max(self._reserve_s(alarm) / 2, 2 * LAST_MOMENT_S))
        if self._page is not None:
            self._page.set_text("reason", alarm.reason)
            self._page.set(phase=WorkerPhase.STOPPING, alarm_ns=time.monotonic_ns())
        return True

    def _say(self, alarm: Alarm) -> None:
        self.events.emit("alarm", step=self.step_gate.step, reason=alarm.reason, outcome="stopping", kind=alarm.kind)
        if alarm.kind == "exception":
            logger.error("%s; saving the last boundary", alarm.reason)
        else:
            heard = " heard" if alarm.kind in ("signal", "flag", "request") and alarm.origin == self.ranks.rank else ""
            left = alarm.deadline.remaining_s()
            logger.warning("%s%s; the process must be gone in %.1f s", alarm.reason, heard, left)
            logger.warning("Graceful exit is triggered, stop training.")

    def _reserve_s(self, alarm: Alarm) -> float:
        saver = self.saver
        return reserve_s(saver.expected_bytes, alarm.deadline.grace_s, bytes_per_s=saver.bytes_per_s)

    def _tell_others(self, alarm: Alarm) -> None:
        self.exchange.request(self.alarms.for_peers(alarm))

    def _claim(self) -> bool:
        with self._changed:
            if self._phase is not StopPhase.STOPPING:
                return False
            self._phase = StopPhase.SAVING
            self._own()
            return True

    def _own(self) -> None:
        self._owner, self._claimed_at, self._writing = threading.get_ident(), time.monotonic(), False

    def _move(self, phase: StopPhase) -> bool:
        """The claim's owner: go on to `phase`. False: the last resort has taken the claim."""
        with self._changed:
            if self._owner not in (None, threading.get_ident()):
                return False
            if phase not in MOVES[self._phase]:
                raise RuntimeError(f"a stop cannot go from {self._phase.name} to {phase.name}")
            self._phase, self._owner, self._writing = phase, None, False
            self._changed.notify_all()
            return True
