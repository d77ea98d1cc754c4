"""The overlap: a job that stops makes one update more than it saves, so that the next start can be compared with it.

The boundary of the stop is durable first. Then, if the time allows and all ranks agree, the training thread goes on to
the next boundary; an observer notes what that step sees and makes, and the process leaves. Nothing else is kept of the
step, and whatever happens in it (an exception, a hang, a dead rank, a second signal) ends the process as the stop
would have ended it: same file, same exit code.

An *observer* is there in a run of `mindx-elastic prove` or `drill`, in the steps that a stopping job plays on, and in
those that a resumed one compares with them; in all other steps there is none.
"""

from __future__ import annotations

import itertools
import logging
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, cast

import numpy as np
import torch

from mindx_elastic.agreement.stop_step import CANNOT
from mindx_elastic.alarm.alarm import REHEARSAL, Alarm
from mindx_elastic.core.certificate import NOT_COMPARED
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard.boundaries import Boundaries
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.loops import Loops
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.stop_save import StopPhase
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.prove.kept_steps import KeptSteps, open_kept_steps
from mindx_elastic.prove.not_kept import FIRST_LOOK, SECOND_LOOK, NotKept, counts_from_the_start, has_begun_again
from mindx_elastic.prove.overlap import Comparison, Played, open_comparison
from mindx_elastic.prove.proof_witness import ProofWitness
from mindx_elastic.prove.rehearsal import Rehearsal
from mindx_elastic.prove.witness import Observed

__all__ = ["Overlap"]

_PLAIN = (torch.Tensor, np.ndarray, list, dict)
_RESERVE_S = 5.0
"""What the way out may take."""
_AGREEMENT_S = 2.0
_COMES_OUT_S = 1.5
"""How long an interrupted training thread may take to come out of what it waits in."""
_MOST_EPOCHS = 3
"""Before which there is a look for what has changed and is not kept."""
_HEARD_S = 60.0
"""How long a boundary waits until the stop that an observer has sent is heard."""
_ALARMS = ("signal", "flag", "fault", "request", REHEARSAL)


class Overlap:
    """One per entered guard, see `guard.observers.Overlap`. Training thread, but where it says otherwise."""

    def __init__(
        self,
        stack: ExitStack,
        opening: Opening,
        stopper: Stopper,
        *,
        loops: Loops,
        loaders: Loaders,
        boundaries: Boundaries,
        is_outside: Callable[[], bool],
    ) -> None:
        """`stack` closes it. `is_outside`: what happens now belongs to no step."""
        self._stack = stack.enter_context(ExitStack())
        self._stopper, self._loops, self._loaders, self._boundaries = stopper, loops, loaders, boundaries
        self._observed: Callable[[], Observed] = lambda: Observed(opening, stopper, loops, is_outside)
        self._collector, self._unmanaged, self._targets = opening.collector, opening.unmanaged, opening.targets
        proof, trains = cast(ProofWitness | None, opening.proof), not opening.evaluates
        self._is_wanted = proof is None and trains and opening.settings.overlap
        self._observer: ProofWitness | Played | Comparison | None = None
        """What notes each step now; nearly always None."""
        self._kept_steps: KeptSteps | None = None
        """What keeps a little of each step for the process after a kill; None: no snapshots are taken."""
        self._not_compared: CheckpointInfo | None = None
        """The boundary that was resumed, until the first step is made that nothing is compared with."""
        self.is_playing = self.is_at_tail = False
        self.scalars: Mapping[str, Any] = {}
        self._began, self._interrupts = 0.0, False
        stopper.play_on, stopper.end_play = self._begin, self.end
        if proof is not None and not opening.evaluates:
            self._observer = proof
            proof.enter(stack, self._observed())
            self._kept_steps = None if proof.audited is None else proof.audited.steps
        elif opening.start.step is not None and trains:
            why = "it left no step to compare with" if self._is_wanted else "the overlap is off"
            opening.unmanaged.certify(opening.start.step, NOT_COMPARED, ranks=stopper.ranks.world_size, why=why)
        if self._is_wanted:
            seen = self._observed()
            self._observer = open_comparison(stack, seen, on_difference=opening.options.on_difference)
            if (path := opening.around.steps_file) is not None:
                self._kept_steps = open_kept_steps(stack, seen, path)
            if self._observer is None and opening.start.resumed is not None:
                self._not_compared = opening.start.resumed.checkpoint.info
        self._epochs_looked_at = 0
        if proof is None and not loops.is_layered:  # a layer's loop is not the program's
            self._not_kept = NotKept(opening.targets, opening.collector)
            info = self._not_compared  # of a process that was too short to know
            is_new = opening.start.step is None or (info is not None and not info.not_kept)
            self._says, self._is_resumed = stopper.ranks.rank == 0 and is_new, info is not None
            boundaries.look_for_not_kept, boundaries.not_kept_at = self._look_for_not_kept, FIRST_LOOK
        self._rehearsal = Rehearsal(opening, stopper, trains=proof is None and trains)
        self._look_again()
        loops.at_head_end = self._forget_head

    def _forget_head(self) -> None:
        """An epoch's first batch is asked for. What a resumed process has called before is done by the head of its
        epoch; the stopped one did not pass that in this step."""
        boundaries = self._boundaries
        if self._observer is not None and not boundaries.has_passed:
            self._observer.begin_step()
        if boundaries.number >= SECOND_LOOK and self._epochs_looked_at < _MOST_EPOCHS:
            self._epochs_looked_at += 1
            boundaries.look_for_not_kept()

    def _look_again(self) -> None:
        is_idle = self._observer is None and self._kept_steps is None and self._not_compared is None
        self.looks = not (is_idle and self._rehearsal.is_over)

    def _look_for_not_kept(self) -> None:
        """See `Boundaries.look_for_not_kept`. After the first two looks there is one before each of the next epochs,
        and whenever the number of steps has doubled."""
        number, found, unmanaged = self._boundaries.number, self._not_kept, self._unmanaged
        self._boundaries.not_kept_at = SECOND_LOOK if number < SECOND_LOOK else 2 * number
        names, is_second = found.look(self._loaders.are_ahead), found.num_looks == 2
        if number >= SECOND_LOOK:  # before that, what the resumed file says holds
            unmanaged.note_not_kept(found.in_steps, found.later)
        if self._says:
            how = "go on from step to step" if is_second else "have changed"
            unmanaged.say_not_kept(names, how, is_resumed=self._is_resumed)
            if is_second:
                unmanaged.say_not_kept(found.later, "were set in the first step", is_resumed=self._is_resumed)
            for name in names:
                key = name.rpartition(".")[2]
                if isinstance(self._targets.get(key), _PLAIN):
                    unmanaged.hint(
                        f'{name} is another object by now than stateful["{key}"], which checkpoints hold',
                        f"Change that object in place ({name}.copy_(...), {name}[:] = ..., {name}.update(...))",
                    )

    def _tell_not_compared(
        self, info: CheckpointInfo, what: str, counts: Sequence[str] = (), level: int = logging.INFO
    ) -> None:
        """Nothing will show whether what is not kept matters. `what`: the words in front of its names. `counts`: more
        of them."""
        names = ", ".join(filter(None, [*counts, info.not_kept]))
        if names and self._stopper.ranks.rank == 0:
            remedy = (
                'Keep it in a named object or dict (Guard(stateful={"own": own})), compute it from guard.step, or '
                "count batches by guard.enumerate(loader)"
            )
            logger.log(level, "%s: %s. %s", what, printable(names), remedy)

    # --- the stop ---

    def _begin(self, alarm: Alarm) -> bool:
        """The stop's boundary was reached, and saved where that was possible. Returns whether the job makes one update
        more before it leaves."""
        if not self._is_wanted:
            return False
        stopper, step = self._stopper, self._loops.step
        stopper.after_save()  # in the state that was saved
        left = alarm.deadline.remaining_s()
        budget_s = (left - _RESERVE_S) / 2
        why_not = self._why_not(alarm, budget_s)
        decision = stopper.exchange.decide(
            "overlap", CANNOT if why_not else step + 1, min(_AGREEMENT_S, max(0.1, left / 10))
        )
        if decision.step != step + 1:
            logger.debug("the next step is not played on: %s", why_not or decision.reason)
            return False
        assert stopper.save.path is not None
        stopper.announce_exit()
        self._began = time.monotonic()
        self.is_playing = True  # from here on whatever is raised is the stop's exit
        self._observer = Played(self._stack, self._observed(), stopper.save.path)
        self._look_again()
        if (first := self._loaders.of_epochs) is not None:
            first.at_exhaustion = self._leave
        self._bound(self._began + budget_s)
        stopper.step_gate.open_until(decision.step)
        return True

    def _why_not(self, alarm: Alarm, budget_s: float) -> str:
        """Why this job cannot play on; empty: it can."""
        stopper, loops = self._stopper, self._loops
        if stopper.phase is not StopPhase.SAVED or stopper.save.path is None or stopper.save.step != loops.step:
            return "this boundary is not on disk"
        if alarm.kind not in _ALARMS or (alarm.kind == "request" and alarm.exit_code == 0):
            return f"the stop is of kind {alarm.kind}"  # with code 0 the program's own end, and no restart
        if not self._boundaries.number:
            return "no step was made"
        if loops.is_at_end(is_tail_over=self.is_at_tail):
            return "code after the epoch, or the end of the training, comes next"
        step_s = statistics.median(after - before for before, after in itertools.pairwise(self._boundaries.times))
        if step_s > budget_s:
            return f"a step takes {step_s:.2f} s, and {max(0.0, budget_s):.2f} s are left for it"
        return ""

    def _leave(self) -> None:
        """The code after the epoch comes next, and belongs to the resumed run."""
        raise self._stopper.exit()

    # --- steps ---

    def copy(self) -> None:
        """See `guard.observers.Overlap`."""
        self._boundaries.gate.pass_boundary(self._collector.copy, self._loops.position)

    def at_boundary(self, position: Position, *, is_cut: bool, loss: object) -> None:
        """See `guard.observers.Overlap`."""
        observer = self._observer
        scalars, self.scalars = self.scalars, {}
        if (info := self._not_compared) is not None:
            is_redone = self._kept_steps is not None and self._kept_steps.are_redone
            how = "compared by a few digests alone" if is_redone else f"not compared ({info.reason})"
            self._not_compared, why = None, f"step {info.step + 1} is {how}"
            in_middle = position.step_in_epoch > 1
            counts = counts_from_the_start() if in_middle and not self._loops.are_batches_numbered else ()
            if in_middle and self._loops.counts_by_itself:
                counts = (*counts, f"what the begin of epoch {position.epoch} sets anew")
            again = in_middle and has_begun_again(info.not_kept.partition("; ")[0].split(", "))
            told = f"{why}, and the resumed run may differ by what goes on and is not kept"
            self._tell_not_compared(info, told, counts, logging.WARNING if again else logging.INFO)
        if self._kept_steps is not None and is_cut and not (self.is_at_tail or self.is_playing):
            self._kept_steps.at_boundary(position, loss)
        if observer is not None and (self.is_playing or not self.is_at_tail):
            observer.scalars = scalars
            waits = observer.at_boundary(position, is_cut=is_cut)
            if self.is_playing and is_cut:
                logger.debug("step %d was played on in %.3f s", position.step, time.monotonic() - self._began)
                raise self._stopper.exit()
            if waits:
                self._stopper.step_gate.wait_for_limit(_HEARD_S)
            if observer.is_over:
                self._observer = None
        if not self._rehearsal.is_over and not self.is_playing:
            outcome = "" if observer is None else observer.outcome if self._observer is None else None
            self._rehearsal.at_boundary(position, is_cut=is_cut, outcome=outcome)
        self._look_again()

    def behind_tail(self) -> None:
        """See `guard.observers.Overlap`."""
        if self._observer is not None:
            self._observer.behind_tail()

    def leave(self, outcome: str, notes: Sequence[str]) -> None:
        """See `guard.observers.Overlap`."""
        if self._observer is not None:
            self._observer.leave(outcome, notes)
        if outcome == "finished" and (info := self._not_compared) is not None:
            after = f"no step was left after step {info.step}"
            self._tell_not_compared(info, f"{after}, and code that follows may differ by what is not kept")

    def way_out(self, error: BaseException | None) -> BaseException | None:
        """See `guard.observers.Overlap`."""
        if not self.is_playing or isinstance(error, GracefulExit):
            return error
        how = "the block has ended" if error is None else f"{type(error).__name__}: {printable(str(error), 200)}"
        logger.info("in the step that is played on: %s", how)
        return self._stopper.exit()

    def end(self, why: str) -> None:
        """Watcher thread: the process leaves now, for a further signal, or because no time is left. What the training
        thread waits in is interrupted."""
        if not self.is_playing or self._stopper.is_coming_out:
            return
        logger.info("the step that is played on is left: %s", why)
        if self._interrupts:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)
        self._stopper.leave_by(time.monotonic() + _COMES_OUT_S, "the step that is played on does not end")

    def _bound(self, end: float) -> None:
        """Let the step end at `end` (`time.monotonic`) at the latest."""
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGVTALRM, self._interrupt)
            self._stack.callback(signal.signal, signal.SIGVTALRM, before)
            self._interrupts = True
        self._stopper.watcher.call_at(end, lambda: self.end("it takes too long"))

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._stopper.is_coming_out:
            raise self._stopper.exit()
