"""The state of a stop: its phases as one transition table, and the claim to save; what the thread that has the claim
writes of the last boundary.

======================  =================================================================================
phase                   what is true
======================  =================================================================================
TRAINING                no alarm was heard
STOPPING                an alarm was heard; the training thread runs to the agreed boundary
SAVING                  one thread has claimed the save and writes
SAVED                   this rank's state is durable (or no policy wanted a file)
FAILED                  nothing could be saved, and the reason is recorded
======================  =================================================================================

Alarms come in on the watcher thread (signals, flag file, other ranks) or on the training thread (exceptions), and both
may save: the training thread at the agreed boundary or after an exception, the watcher in a salvage (`stopper`). The
thread that claims the save first holds the boundary (`StopSave.hold`) and writes it (`StopSave.write`), which settles
the stop; the other one waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from mindx_elastic.alarm.alarm import REFUSAL, Alarm
from mindx_elastic.alarm.deadline import reserve_s
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.core.events import logger
from mindx_elastic.errors import SaveError, UnsupportedStateError
from mindx_elastic.guard.policy import ExitPolicy, keep_consistent, policies_for
from mindx_elastic.guard.saver import DeviceWentOnError, Saver
from mindx_elastic.persist.writer import SaveResult
from mindx_elastic.start.odd_steps import odd_step_of

__all__ = ["GATE_S", "MOVES", "SETTLED", "StopPhase", "StopSave", "StopState", "choose_held_boundary"]


class StopPhase(Enum):
    """See the module's table."""

    TRAINING = 0
    STOPPING = 1
    SAVING = 2
    SAVED = 3
    FAILED = 4


MOVES = {
    StopPhase.TRAINING: {StopPhase.STOPPING},
    StopPhase.STOPPING: {StopPhase.SAVING},
    # back to STOPPING: the claim was given up because another rank is one boundary ahead, or the gate was not clean
    StopPhase.SAVING: {StopPhase.SAVED, StopPhase.FAILED, StopPhase.STOPPING},
    StopPhase.SAVED: set(),
    StopPhase.FAILED: set(),
}
SETTLED = (StopPhase.SAVED, StopPhase.FAILED)


class StopState:
    """The phase of a stop, its alarm, and which thread has claimed the save. Any thread; the lock is held over
    assignments only."""

    def __init__(self) -> None:
        self.phase = StopPhase.TRAINING
        self.alarm: Alarm | None = None
        """Set together with STOPPING and never changed afterwards."""
        self.heard_at = 0.0
        self.finished = False
        """The training has ended; no stop follows."""
        self._changed = threading.Condition()
        self._owner: int | None = None
        self.is_writing = False
        """The thread that has the claim writes its file: the process must not end meanwhile."""

    @property
    def is_settled(self) -> bool:
        """Whether the save is over, one way or the other."""
        return self.phase in SETTLED

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the claim."""
        return self._owner == threading.get_ident()

    def accept(self, alarm: Alarm) -> bool:
        """TRAINING -> STOPPING. False: an earlier alarm was accepted, or the training has finished."""
        with self._changed:
            if self.phase is not StopPhase.TRAINING or self.finished:
                return False
            self.alarm, self.heard_at = alarm, time.monotonic()
            self._enter(StopPhase.STOPPING)
            return True

    def finish(self) -> None:
        """The training has ended, unless an alarm was accepted."""
        with self._changed:
            self.finished |= self.phase is StopPhase.TRAINING

    def claim(self) -> bool:
        """STOPPING -> SAVING: this thread writes. False: another thread has the claim, or the stop is settled."""
        with self._changed:
            if self.phase is not StopPhase.STOPPING:
                return False
            self._enter(StopPhase.SAVING)
            return True

    def move(self, phase: StopPhase) -> None:
        """The claim's owner: go on to `phase`. Raises RuntimeError for a move that is not in `MOVES`."""
        with self._changed:
            self._enter(phase)

    def wait_while(self, *phases: StopPhase, timeout_s: float | None = None) -> StopPhase:
        with self._changed:
            self._changed.wait_for(lambda: self.phase not in phases, timeout_s)
            return self.phase

    def _enter(self, phase: StopPhase) -> None:
        if phase not in MOVES[self.phase]:
            raise RuntimeError(f"a stop cannot go from {self.phase.name} to {phase.name}")
        self.phase, self.is_writing = phase, False
        self._owner = threading.get_ident() if phase is StopPhase.SAVING else None
        self._changed.notify_all()


GATE_S = 0.05
"""For the update gate where nothing should be in progress."""
_DEVICE_S = 2.0


class StopSave:
    """One per stopper. `hold` and `write`: the thread that has the claim."""

    def __init__(
        self,
        state: StopState,
        update_gate: UpdateGate,
        saver: Saver,
        policies: Sequence[ExitPolicy],
        *,
        already_durable: Callable[[], Path | None],
        is_agreed: Callable[[int], bool],
        has_death: Callable[[], bool],
    ) -> None:
        """already_durable: the file that has the last boundary already; None: there is none. is_agreed: whether all
        ranks have agreed to save a step. has_death: whether a rank of this machine has died."""
        self.policies = tuple(policies)
        self.path: Path | None = None
        """The file that the stop has written, or found to be durable already."""
        self.step: int | None = None
        """The step that is in it."""
        self.failure: str | None = None
        """Why nothing could be saved."""
        self._state, self._update_gate, self._saver = state, update_gate, saver
        self._events = saver.events
        self._already_durable = already_durable
        self._is_agreed, self._has_death = is_agreed, has_death

    def reserve_s(self, alarm: Alarm) -> float:
        """Seconds that the save will need before the deadline."""
        saver = self._saver
        return reserve_s(saver.expected_bytes, alarm.deadline.grace_s, bytes_per_s=saver.bytes_per_s)

    @contextmanager
    def hold(self, alarm: Alarm, timeout_s: float = GATE_S) -> Iterator[str | None]:
        """The update gate, as `UpdateGate.hold`, with a boundary that the devices hold."""
        began, latest = time.monotonic(), alarm.deadline.at - self.reserve_s(alarm)

        def still_waits() -> bool:
            now = time.monotonic()
            # What needs a dead rank never ends; what does not, ends in a moment.
            is_dead = alarm.kind == "peer" or self._has_death()
            patience = max(_DEVICE_S, 2 * self._saver.collector.devices.step_s)
            return now < (min(latest, began + patience) if is_dead else latest)

        with self._update_gate.hold(timeout_s) as problem:
            yield choose_held_boundary(self._saver.collector, problem, self._update_gate, still_waits)

    def write(self, alarm: Alarm, problem: str | None) -> None:
        """Write the files of every policy that answers this alarm, and settle. `problem`: why the state is not at a
        boundary; None: it is."""
        saver, together = self._saver, self._saver.together
        if not problem:
            saver.drain(max(0.0, alarm.deadline.remaining_s() / 3))
        self._state.is_writing = True
        step = saver.collector.position.step
        # Only where every rank is known to be alive, at this step, with the time to wait for each other.
        acts_together = alarm.kind not in ("exception", "peer")
        agreed = acts_together and not problem and self._is_agreed(step)
        if acts_together and not agreed and together is not None:
            together.decline()
        if alarm.kind == REFUSAL or saver.is_refused:
            # State of some rank is not kept: a file of this step would be resumed without it.
            if alarm.kind != REFUSAL:
                logger.error("step %d is not saved: the training was refused before", step)
            self._fail(step, "the training was refused", alarm.reason, "refused: state that is not kept")
            return
        if (odd := odd_step_of(alarm.reason)) is not None and (problem or step >= odd):
            problem = f"step {odd} is to be made again"
        if problem:
            self._refuse(step, problem, "state is not at a boundary")
            return
        # Before the first step there is nothing to lose, and a file of it would bind the next start to this very model.
        wanted = [p for p in policies_for(self.policies, alarm) if p.save and (step > 0 or p.kind == "eval")]
        durable = None if saver.flags.waiting else self._already_durable()
        if agreed and (durable is not None or not wanted) and together is not None:
            together.decline()
        if durable is not None:
            self._note(durable, step)
            logger.info("step %d is already durable in %s", step, durable)
            self._state.move(StopPhase.SAVED)
        elif not wanted:
            if step == 0:
                logger.info("no step has been done yet: nothing to save")
            self._state.move(StopPhase.SAVED)
        elif consistent := keep_consistent(wanted, alarm.kind, replicated=saver.replicated):
            self._write_files(alarm, consistent, step, agreed=agreed)
        else:
            why = f"{alarm.reason} and no other rank holds the same state: there is no consistent replica"
            self._refuse(step, why, "no consistent replica")

    def _fail(self, step: int, why: str, reason: str, outcome: str) -> None:
        self.failure = why
        self._events.emit("save", step=step, reason=reason, outcome=outcome)
        self._state.move(StopPhase.FAILED)

    def _write_files(self, alarm: Alarm, policies: Sequence[ExitPolicy], step: int, *, agreed: bool) -> None:
        try:
            result = self._save(alarm, policies, agreed=agreed)
            step = result.info.step
        except Exception as error:
            # Whatever it is (also a bug, or a `state_dict` of the user's that raises): the claim must be given back,
            # or the other thread would wait for ever, and the job must leave in time.
            failure = f"{type(error).__name__}: {error}"
            expected = isinstance(error, (SaveError, UnsupportedStateError))
            logger.error("step %d could not be saved: %s", step, failure, exc_info=not expected)
            self._saver.keep_unsaved(step, alarm.deadline.remaining_s() / 4)
            self._fail(step, failure, alarm.reason, f"failed: {failure}")
            return
        self._note(result.path, step)
        since = time.monotonic() - self._state.heard_at
        what = "the weights of the evaluation" if policies[0].kind == "eval" else f"step {step}"
        logger.info("%s saved in %s (%.2f s after the alarm)", what, result.path, since)
        self._events.emit(
            "durable", step=step, reason=alarm.reason, duration_s=since, nbytes=result.nbytes, path=str(result.path)
        )
        self._state.move(StopPhase.SAVED)

    def _save(self, alarm: Alarm, policies: Sequence[ExitPolicy], *, agreed: bool) -> SaveResult:
        """Once more where the device has gone on while an older boundary was read: it holds a newer one then."""
        saver, end = self._saver, 0.0

        def still_waits() -> bool:
            return time.monotonic() < end

        for tries_left in (2, 1, 0):
            try:
                left_s = alarm.deadline.remaining_s()
                return saver.save_dying(policies, alarm.reason, time_left_s=left_s, agreed=agreed)
            except SaveError as error:
                if not (tries_left and isinstance(error.__cause__, DeviceWentOnError)):
                    raise
                end, agreed = time.monotonic() + _DEVICE_S, False
                if problem := choose_held_boundary(saver.collector, None, self._update_gate, still_waits):
                    raise UnsupportedStateError("the state", problem) from error
        raise AssertionError("the last try has returned or raised")

    def _note(self, path: Path, step: int) -> None:
        self.path, self.step = path, step
        self._saver.page.set(saved_step=step, saved_ns=time.monotonic_ns())

    def _refuse(self, step: int, problem: str, short: str) -> None:
        remedy = "the newest complete checkpoint, or snapshot in memory, stands in"
        newest = self._saver.newest_step
        if newest < step:
            remedy += f"; on disk this process knows of step {newest}, so up to {step - newest} steps are done again"
        logger.error("the boundary after step %d cannot be saved: %s; %s", step, problem, remedy)
        self._fail(step, problem, problem, f"refused: {short}")


def choose_held_boundary(
    collector: Collector, problem: str | None, gate: UpdateGate, waits: Callable[[], bool]
) -> str | None:
    """Before a save that a death may have brought: let the newest boundary count that the devices hold.

    The caller holds `gate`, which says `problem` (None: none). Waits for the devices for as long as ``waits()``.
    Returns why there is no such boundary; None: there is.
    """
    devices = collector.devices
    newest = devices.newest
    is_clean = gate.state is GateState.CLEAN
    if newest is None or (problem is not None and (is_clean or not devices.keeps_older)):
        return problem
    try:
        found = devices.newest_held(waits, has_updated=not is_clean)
    except RuntimeError as error:  # every later call of CUDA fails, too
        return f"the device has failed ({str(error).partition(chr(10))[0]})"
    if found is None and not devices.keeps_older:
        return problem  # the save waits for the device
    if found is None or (found is not newest and gate.unguarded):  # an update by hand has no mark
        return problem or f"the device has not come to the end of step {newest.step}, and holds no older boundary"
    if found is not newest or not is_clean or devices.has_gone_back:
        try:
            collector.go_back(found)
        except UnsupportedStateError as error:
            return str(error)
        if found is newest and is_clean:
            devices.hold(None)  # after an older one had counted: the device has come, and the gate keeps it here
    if found is not newest:
        logger.warning(
            "the device has not come to the end of step %d, where the program is; it still holds step %d, which counts",
            newest.step,
            found.step,
        )
    return None
