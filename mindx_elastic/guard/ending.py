"""How the block of a guard ends: the training is done, the job stops as it was told to, or an exception leaves it.

Training thread.

A training that has ended by itself saves its last boundary: the program may fail after the block (in an evaluation, an
export), and another rank may still be killed. The same command then finds every step done and runs only what comes
after the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from mindx_elastic.alarm.alarm import REFUSAL, REHEARSAL
from mindx_elastic.capture.update_gate import GateState
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import GracefulExit, UnmanagedStateError
from mindx_elastic.guard.listeners import Listeners
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.loops import Loops
from mindx_elastic.guard.observers import Overlap
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.stop_save import GATE_S
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.rejoin.failures import comes_from_failure

__all__ = ["GuardEnding"]


class GuardEnding:
    """One per entered guard."""

    def __init__(
        self,
        opening: Opening,
        stopper: Stopper,
        listeners: Listeners,
        loops: Loops,
        loaders: Loaders,
        overlap: Overlap,
    ) -> None:
        saver = self._saver = opening.saver
        self._unmanaged, self._loops, self._loaders = opening.unmanaged, loops, loaders
        self._stopper, self._listeners = stopper, listeners
        self._overlap = overlap
        self._around, self._events, self._periodic = opening.around, saver.events, opening.periodic
        self._final = opening.policies if opening.settings.final_save else ()
        """The policies that may want the last boundary of a training that ends by itself."""
        self._has_resumed = opening.start.step is not None

    def conclude(self, error: BaseException | None, *, finish: Callable[[], None]) -> None:
        """The block is over: finished, stopped gracefully, or failed. Raises what the block is to raise in place of
        `error`. `finish`: to be called where the training is done."""
        is_clean = isinstance(error, SystemExit) and not error.code and not isinstance(error, GracefulExit)
        refusal, cause = self._unmanaged.refusal, error
        if refusal is not None and not isinstance(error, (GracefulExit, UnmanagedStateError)):
            cause = refusal  # the program has caught it, or has made another exception of it
        self._overlap.leave("finished" if cause is None else type(cause).__name__, self._unmanaged.notes)
        if cause is None or (is_clean and cause is error):
            finish()
            return
        if hint := self._loops.why_it_failed(cause):
            logger.error("%s", hint)
        self._loaders.shutdown()  # a stuck worker would delay the exit
        if isinstance(cause, GracefulExit):
            self.leave()
        else:
            self.fail(self._loops.step, cause)
        if cause is not error and (error is None or is_clean):
            raise cause  # a launcher would take it for the end of the training

    def finish(self, step: int, durable: Path | None) -> None:
        """The training is done, with `step`. Raises GracefulExit where an alarm was heard before. `durable`: the file
        that this run was resumed from, if no boundary has been passed since."""
        self._saver.drain()
        if self._stopper.at_end():
            raise self.leave()
        with self._around.between_steps():
            kept = self._keep_last_boundary(durable)
        self._around.finish(durable=kept)
        self._around.exchange.leave()
        for policy in self._periodic:
            self._saver.prune(policy)
        self._events.emit("end", step=step, outcome="finished")

    def _keep_last_boundary(self, durable: Path | None) -> bool:
        """Save the last boundary if a policy wants that and no file has it yet. Returns whether it is on disk. No stop
        can follow; a failure is logged and not raised. `durable`: see `finish`."""
        saver, save = self._saver, self._stopper.save
        step = saver.collector.position.step
        if durable is None and save.step == step:
            durable = save.path  # a stop that was the normal end after all
        if durable is None and saver.newest is not None and saver.newest[0] == step:
            durable = saver.newest[1]  # a periodic save
        policy = next((p for p in self._final if p.save and p.final_name is not None), None)
        if durable is not None or policy is None or step == 0:
            return durable is not None
        gate = self._stopper.update_gate
        with gate.hold(GATE_S) as problem:
            if problem is None:
                if late := saver.collector.take_late():
                    logger.info(
                        "%s: saved as now, not as at step %d: it takes too long to be copied at every boundary. Where "
                        "code after the last guard.step_end() has changed it, more steps may differ",
                        listed(late, 4),
                        step,
                    )
                return saver.save_final(policy)
        # An average that is updated after the last step belongs into the block: nothing is wrong with the training.
        logger.log(
            logging.INFO if gate.state is GateState.CLEAN else logging.WARNING,
            "step %d, the end of the training, is not kept: %s. The training is not affected. To have its end on disk, "
            "change weights after the guard's block, or call guard.save() right after the last guard.step_end()",
            step,
            problem,
        )
        self._events.emit(
            "save", step=step, reason=problem, outcome="refused: state is not at a boundary", kind="final"
        )
        return False

    def leave(self) -> GracefulExit:
        """The process leaves as it was told to; the launcher's next SIGTERM must not change its exit code."""
        assert self._stopper.alarm is not None
        if self._stopper.alarm.kind != REHEARSAL:  # a signal after it means the process that comes next
            self._listeners.handlers.linger(self._stopper.alarm.deadline.at)
        self._stopper.after_save()
        if self._stopper.alarm.kind == "peer" and self._saver.collector.devices.is_used:
            # The interpreter, torch's way out and a communicator without its peer wait for the device, or for each
            # other, until the process is killed. Seen with torch 2.11 and NCCL, with and without work in the queue.
            self._stopper.leave_behind(self._stopper.alarm, "the device may wait for a rank that is gone")
        leaving = self._stopper.exit()
        self._around.leave(self._stopper)
        self._drop_refused()
        self._events.emit("exit", step=leaving.step, reason=leaving.reason, outcome=str(leaving.code))
        return leaving

    def fail(self, step: int, error: BaseException) -> None:
        """An exception leaves the block, after `step`. Saves what is to be saved then; the caller raises it. Raises
        GracefulExit in its place where the job was stopping anyway."""
        self._stopper.on_exception(error)
        self._drop_refused()
        alarm = self._stopper.alarm
        own = alarm is None or isinstance(error, UnmanagedStateError)
        if alarm is not None and alarm.kind == "exception":  # the rank of a peer's has also left its collectives
            own = own or alarm.origin == self._stopper.ranks.rank or not comes_from_failure(error)
        if alarm is not None and not own:
            # The job was told to stop and something broke on the way (a peer left first, a loader worker was killed).
            logger.warning("%s: %s while stopping", type(error).__name__, error)
            raise self.leave() from error
        self._events.emit("exit", step=step, reason=f"{type(error).__name__}: {error}", outcome="raised")

    def _drop_refused(self) -> None:
        """Keep nothing of a refused training in memory either: the corrected program would not fit it."""
        alarm = self._stopper.alarm
        if alarm is not None and alarm.kind == REFUSAL and not self._has_resumed:
            self._around.keep_memory = False
