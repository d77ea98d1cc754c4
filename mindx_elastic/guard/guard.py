"""`Guard`: joins the stages inside a worker. Everything a training loop needs to stop anywhere and resume bit for bit.

The callbacks and integrations are thin layers on it. This file has the public methods and the life of a guard: enter
(`opening` until the state is back, then the stages of a stop), steps (`loops`, `boundaries`), leave (`ending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from mindx_elastic.agreement.connect import open_exchange
from mindx_elastic.agreement.gather import all_or_none
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.names import name_targets
from mindx_elastic.capture.update_gate import GateState
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.position import Position
from mindx_elastic.core.tensor_memory import without_collections
from mindx_elastic.errors import MindxError, SaveError, UnsafeDirectoryError, UnsupportedStateError, UsageError
from mindx_elastic.guard.active import active, check_that_it_is_not_active, entered, require_entered
from mindx_elastic.guard.boundaries import Boundaries
from mindx_elastic.guard.checks.checks import Checks
from mindx_elastic.guard.ending import GuardEnding
from mindx_elastic.guard.fewer_ranks import FewerRanks
from mindx_elastic.guard.last_resort import LastResort
from mindx_elastic.guard.layered import LayeredGuard
from mindx_elastic.guard.listeners import Listeners
from mindx_elastic.guard.loops.between_steps import Evaluations
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.loops import Loops, NumberedBatches
from mindx_elastic.guard.observers import observers
from mindx_elastic.guard.odd_steps import OddStepWatch, watch_odd_steps
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.options import DEFAULT_SIGNALS, GuardOptions
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy
from mindx_elastic.guard.running import EnterAgain, InPlaceGuard, run_in_place, tell_of_block
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.platforms.launchers import current_ranks

__all__ = ["DEFAULT_SIGNALS", "Guard"]

_T = TypeVar("_T")
_HEARD_S = 5.0  # the watcher is told by this process itself
_LOOK_STEPS = 16  # at each of the first, and of so many later: has the program installed a signal handler?


class Guard(LayeredGuard):
    """Context manager around a training loop.

    ::

        guard = Guard(model=model, optimizer=opt, lr_scheduler=sched, loader=loader, directory="ckpt", prefix="resnet")
        with guard:
            for epoch in guard.epochs(90):
                for x, y in loader:
                    ...
                    opt.step()
                    sched.step()
                    guard.step_end()

    Entering resumes if there is something to resume, then installs signal handlers; leaving restores them. Enter it
    in the main thread, one at a time in a process, after DDP has wrapped the model, and on every rank.

    Arguments (all by keyword):

    * `model`, `optimizer`, `lr_scheduler`: one or a list; `scaler`, `loader`; `stateful`: more named objects.
      Whatever has ``state_dict`` and ``load_state_dict`` is saved and resumed. In `stateful` also, as they are:
      generators (torch, numpy, `random.Random`), tensors, lists, dicts, deques, sets, arrays, and objects made of
      these (an average with a dict of tensors, the state of a DDP communication hook). A
      `mindx_elastic.data.ResumableLoader` also carries the position inside the epoch and the randomness of its workers.
    * `directory`, `prefix`: where ``{prefix}-{epoch}_{step_in_epoch}_breakpoint.safetensors`` goes; in ``rank_{r}/``
      folders when there are several ranks.
    * `resume`: ``"auto"`` (newest complete, verified step; else the next older one), ``"never"``, or a path.
    * `grace_s`: seconds from an alarm until the process must be gone; default ``MINDX_GRACE_S`` or 30.
    * `final_save`: keep the last boundary when the block ends by itself, as
      ``{prefix}-{epoch}_{step_in_epoch}_final.safetensors``, one a rank; default ``MINDX_FINAL_SAVE`` or True. With
      `policies` those say whether they want it.
    * `save_on_exception`: save the last boundary when an exception leaves the block.
    * `signals`: signal numbers to listen to. `flag_file`: a JSON file ``{"GracefulExit": 1}`` to watch.
    * `save_every`: also save on the way, so that SIGKILL and power cuts cost no more: steps, a time (``"90s"``,
      ``"10min"``, ``"1h"``), or ``"auto"`` (as often as 1 % of the time pays for). The newest two complete steps stay.
    * `policies`, `periodic`: what callbacks ask for; `policies` replaces the default one made from the arguments above.
      `append_info`: JSON-able values for the files' headers.
    * `allow_shared_directory`: accept a directory that every user may write to; files of other users are left out.
      `trusted_users` (numbers, names): theirs count. Also ``MINDX_ALLOW_SHARED_DIRECTORY=1``, ``MINDX_TRUSTED_USERS``.
    * `snapshot_every`: steps between snapshots in shared memory, 0, or ``"auto"``; default ``MINDX_SNAPSHOT_EVERY``.
    * `layouts`: patterns of parameter names (``model.experts.*``) -> `Layout`, for parts that no DTensor describes.
    * `unmanaged`: ``"error"`` or ``"warn"`` where state of the training is certain not to be kept (an optimizer or a
      loader that is not named, ...); default ``MINDX_UNMANAGED`` or ``"error"``.
    * `overlap`: whether a stop, once its boundary is durable, makes one step more of which it keeps only a witness: the
      resumed run makes that step again and is compared with it; default ``MINDX_OVERLAP`` or True. What that step does
      besides training (a print, a file) happens twice. `on_difference`: ``"warn"``, or ``"stop"``: end the job then.
    * `rehearse`: steps (or ``"epoch"``) where the job stops and goes on in new processes, to try its resume early.
    * `odd`: ``"back"``: a step whose loss (or ``step_end(grad_norm=...)``) is no number is made again, once, by new
      processes from the boundary before: odd again, the training goes on; ``"stop"``: it ends. ``MINDX_ODD``.
    * `redundancy`: on how many nodes to keep each file, for disks that they do not share; ``MINDX_REDUNDANCY`` or 1.
    * `archive`: URL of a second place of the files (``s3://bucket/folder``), for new machines; ``MINDX_ARCHIVE``.
    * `remove_redundancy`: True: in periodic saves and at the end a machine's DDP ranks write each part of what they
      share once, and a resume needs all their files. At a stop, from 3 ranks on, each part is in two files either way.

    Raises on entering: UsageError, UnmanagedStateError (also at boundaries), DirectoryInUseError, UnsafeDirectoryError,
    UnsupportedStateError, MismatchError, NoUsableCheckpointError. On every rank: what one of them raises, the others
    raise with its number in front, or as PeerStartError.
    """

    def __init__(
        self,
        *,
        directory: str | Path,
        prefix: str = "ckpt",
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        resume: str | Path = "auto",
        grace_s: float | None = None,
        save_on_exception: bool = True,
        final_save: bool | None = None,
        signals: Sequence[int] = DEFAULT_SIGNALS,
        flag_file: str | Path | None = None,
        policies: Sequence[ExitPolicy] | None = None,
        periodic: Sequence[PeriodicPolicy] = (),
        save_every: int | str | None = None,
        append_info: Sequence[object] = (),
        allow_shared_directory: bool = False,
        trusted_users: Sequence[int | str] = (),
        snapshot_every: int | str | None = None,
        redundancy: int | None = None,
        archive: str | None = None,
        remove_redundancy: bool = False,
        layouts: Mapping[str, Layout] | None = None,
        unmanaged: str | None = None,
        overlap: bool | None = None,
        on_difference: str = "warn",
        rehearse: int | str | Sequence[int | str] | None = None,
        odd: str | None = None,
    ) -> None:
        super().__init__()
        self._options = GuardOptions(
            directory=directory,
            prefix=prefix,
            resume=resume,
            grace_s=grace_s,
            save_on_exception=save_on_exception,
            final_save=final_save,
            signals=signals,
            flag_file=flag_file,
            policies=None if policies is None else tuple(policies),
            periodic=tuple(periodic),
            save_every=save_every,
            append_info=append_info,
            allow_shared_directory=allow_shared_directory,
            trusted_users=trusted_users,
            snapshot_every=snapshot_every,
            redundancy=redundancy,
            archive=archive,
            remove_redundancy=remove_redundancy,
            layouts=layouts,
            unmanaged=unmanaged,
            overlap=overlap,
            on_difference=on_difference,
            rehearse=rehearse,
            odd=odd,
        )
        self._loaders = Loaders(loader, stateful)
        self.loader = self._loaders.first
        """The loader whose epochs and batches count; the resumable one in place of a stock DataLoader."""
        self._targets = name_targets(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            scaler=scaler,
            loader=self._loaders.argument,
            stateful=self._loaders.stateful,
        )
        self._resumed_from_step: int | None = None
        self.resumed_path: Path | None = None
        self.run_id = ""
        self._loops = Loops(self._loaders)
        self._cut = True  # the last step has ended with a boundary; not inside an accumulation window
        self._known = True  # and the loaders' positions at it are known
        self._finished_step = True  # `finish_step` has been called for it
        self._fewer = FewerRanks()
        self._odd: OddStepWatch | None = None

    # --- life ---

    def __enter__(self) -> Guard:
        try:
            self.open()
        except (UsageError, UnsafeDirectoryError, UnsupportedStateError, SaveError) as error:
            cause = error.__cause__  # one in the user's code is shown; else the text says all, once for each rank
            raise error.with_traceback(None) from (None if isinstance(cause, (OSError, MindxError)) else cause)
        return self

    def open(self) -> None:
        """Enter the guard, for a host that calls the program back, so that no ``with`` block can be written. If it
        raises, the guard is closed again."""
        check_that_it_is_not_active(self)
        with without_collections(), ExitStack() as stack:
            self._ranks = current_ranks(RankInfo.from_env())
            place = self._place
            ahead = stack.enter_context(ExitStack())
            prepared = self._prepare(ahead, is_ahead=True) if place is not None and place.can_prepare else None
            own = open_exchange if place is None else place.open_exchange
            self._exchange = self._shared_exchange or own(self._ranks)
            if self._shared_exchange is None:
                stack.callback(self._exchange.close)
            stack.enter_context(ahead.pop_all())  # closed before the exchange
            with all_or_none(self._exchange):  # a rank that cannot enter must not leave the others waiting for it
                self._open(stack, prepared or self._prepare(stack))
            stack.enter_context(active(self))
            if place is None and not self._around.evaluates:
                tell_of_block(self._ranks, is_layered=self._loops.is_layered)
            elif place is not None:
                place.opened(self.stopper, self._around, self._loaders, self._ddp)
            self._listeners.answer_held()
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._place is not None and self._place.comes_out(error, self.stopper):
                way_out = self._place.leave(error, self.stopper, self._around, self._loaders)
                if isinstance(way_out, EnterAgain):
                    self._listeners.hold()
                else:
                    self._conclude(way_out)
                raise way_out from error
            self._conclude(error)
        finally:
            self._stack.close()

    def _prepare(self, stack: ExitStack, *, is_ahead: bool = False) -> Opening:
        """Do what needs no other rank. `stack` closes everything in reverse order."""
        options, targets, loaders = self._options, self._targets, self._loaders
        return Opening(stack, options, self._ranks, targets, loaders, self._place, is_ahead=is_ahead)

    def _open(self, stack: ExitStack, opening: Opening) -> None:
        """Do what all ranks do together. `stack` closes everything in reverse order."""
        opening.meet(stack, self._exchange, self._last_parts, self._kept)
        self._unmanaged, self._ddp = opening.unmanaged, opening.ddp
        self.risk = self._unmanaged.risk
        self._collector, self._saver, self._around = opening.collector, opening.saver, opening.around
        self._periodic = opening.periodic
        start, self._log_filter, self._proof = opening.start, opening.log_filter, opening.proof
        self.run_id = start.run_id
        self._resumed_from_step = start.step
        self.resumed_path = None if start.resumed is None else start.resumed.path
        self._loops.is_layered = self._loops.is_layered or self._around.evaluates
        self._loaders.enter(stack, self._unmanaged, opening.settings.grace_s)
        self._checks = Checks(
            opening,
            loaders=self._loaders.named,
            more=self._more,
            kept=self._kept,
            own=self._own,
            epoch=lambda: self._loops.epoch,
        )
        trains = not self._around.evaluates
        if trains:
            self._checks.at_entry()
            page = opening.around.page
            self._fewer.enter(stack, self._unmanaged, page, self._ranks, self._collector, self._loaders)
        self._start_stages(stack, opening)
        if trains:
            self._checks.watch(self._update_gate)
        self._around.enter(
            start.resumed,
            start.run_id,
            self._update_gate,
            replicas=opening.shared_modules(),
            counter=self._loops,
            begins_again=self._place is not None and self._place.entry is not None,
        )
        self._overlap = observers().open_overlap(
            stack,
            opening,
            self.stopper,
            loops=self._loops,
            loaders=self._loaders,
            boundaries=self._boundaries,
            is_outside=lambda: self._evaluations.depth > 0,
        )
        self._odd = watch_odd_steps(opening, is_layered=self._loops.is_layered)
        self._ending = GuardEnding(opening, self.stopper, self._listeners, self._loops, self._loaders, self._overlap)
        opening.meet_last()

    def _start_stages(self, stack: ExitStack, opening: Opening) -> None:
        """Start to watch updates and then to listen for alarms."""
        boundaries = self._boundaries = Boundaries(stack, opening, self._checks, self._loops)
        self._update_gate = boundaries.gate
        self._evaluations = Evaluations(self._collector, self._update_gate, self._loaders, self._unmanaged)
        around, saver, peers, relay = opening.around, opening.saver, opening.start.peers, opening.relay
        step_gate = self._step_gate = StepGate(self._collector.position.step)
        stack.callback(peers.close)
        listeners = self._listeners = Listeners(opening.settings, opening.policies, saver.ranks)
        watcher, last_resort = Watcher(listeners.hear_signal), LastResort()
        opening.closing.callback(last_resort.stop)  # it keeps the deadline while other things are closed
        stopper = self.stopper = Stopper(
            step_gate=step_gate,
            update_gate=self._update_gate,
            exchange=around.exchange,
            watcher=watcher,
            saver=saver,
            settings=opening.settings,
            policies=opening.policies,
            already_durable=self._already_durable,
            arm_last_resort=last_resort.arm,
            leave_by=last_resort.leave_by,
            relay=relay,
            member=None if self._place is None else self._place.member,
        )
        watcher.start()
        last_resort.start(stopper)
        relay.threads |= {watcher.ident, last_resort.ident}
        stack.callback(watcher.stop)
        saver.prepare(asynchronous=any(policy.asynchronous for policy in opening.periodic))
        stack.callback(self._close_saver)  # the watcher still guards the deadline meanwhile
        self._loops.enter(
            self._collector,
            self._unmanaged,
            self,
            self._targets,
            restore=opening.start.restore_streams,
            late_boundary=self._late_boundary,
            leave_step=step_gate.leave_step,
            enter_step=self._enter_step,
            is_clean=self._update_gate.is_clean,
        )
        self._loops.tail.enter(
            self._collector,
            is_alone=self._ranks.world_size == 1,
            hidden=self._boundaries.hidden,
            after=self._pass_tail,
            keep_again=self._keep_again,
        )
        listeners.start(stack, stopper, around.exchange, peers, around.link)  # last: an alarm may have come already

    def _close_saver(self) -> None:
        bounded = self.stopper.alarm is not None and not self.stopper.finished
        self._saver.close(max(0.0, self.stopper.time_left_s) if bounded else None)

    def run(self, train: Callable[[], _T]) -> _T:
        """Run ``train()`` in this guard's block and return what it returns: the same as ``with guard: train()``.

        Under ``mindx-elastic run --recover in-place`` the function is called again in the same process when another
        rank has died and was replaced (or, with ``--min-nproc``, was not): the loops in it go on at the boundary that
        all have agreed on. Make outside of it what must not be built twice; ask for the number of ranks in it.
        """

        def block(place: InPlaceGuard | None) -> _T:
            self._place = place
            with self:
                return train()

        return run_in_place(block, lambda: self._targets, enters_at_once=True)

    # --- steps ---

    @property
    def position(self) -> Position:
        """The last boundary passed. Right after a resume it is the resumed one."""
        self._loops.asked = True
        return self._loops.position

    @property
    def step(self) -> int:
        """Number of the last boundary passed, over all epochs and restarts; 0 before the first. Use it for what is done
        every so many steps: ``if guard.step % 100 == 0:``."""
        self._loops.asked = True
        return self._loops.step

    @property
    def resumed_from_step(self) -> int | None:
        """Step of the checkpoint that this run went on from; None on a fresh start."""
        self._loops.asked = True
        return self._resumed_from_step

    def epochs(self, num_epochs: int, start: int = 1) -> Iterator[int]:
        """Yield the epochs still to do, the first of `num_epochs` having the number `start`; the first one is the
        resumed one.

        An epoch whose last boundary was reached before the stop is yielded again, and the loader then gives no batch:
        so code after the inner loop (an evaluation, a per-epoch scheduler) runs exactly once in the end, as without
        the stop. Checkpoints count from 1, whatever `start` is.

        A second loop goes on where the first one has ended: ``epochs(2)`` and then ``epochs(5)`` are 2 and 3 epochs.
        Without a loader an epoch is either one step (all data at once), or has an inner loop over `steps`.
        """
        return self._loops.epochs(num_epochs, start)

    def steps(self, num_steps: int, start: int = 1) -> Iterator[int]:
        """Yield the numbers of the steps still to do, until `num_steps` boundaries have been passed in all.

        ::

            batches = iter(loader)
            for step in guard.steps(10_000):
                try:
                    x, y = next(batches)
                except StopIteration:  # the next epoch
                    batches = iter(loader)
                    x, y = next(batches)
                ...
                guard.step_end()

        The first number is `start`; after a resume, that of the step after the resumed one. Inside a loop over
        `epochs` the steps of each epoch are counted. An iteration that calls no `step_end` does not count.
        """
        return self._loops.steps(num_steps, start)

    def enumerate(self, loader: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """As the builtin, for a loader that is named: after a resume the numbers go on from the batch's true place in
        its epoch."""
        self._loops.are_batches_numbered = True
        return NumberedBatches(loader, start)

    def step_end(self, **scalars: Any) -> None:
        """The boundary: call it once after the optimizer (and scheduler, scaler) have stepped.

        Raises GracefulExit once the job is to stop and its state is durable. Inside an accumulation window
        (gradients, but no update since the last call) it counts a step; the job stops at the window's end. `prove`
        names any of the `scalars` that differs; a resumed run compares the `loss`.
        """
        if self._odd is not None and not self._overlap.is_playing:
            self._odd.look(self._loops.step + 1, scalars)
        self._end_step()
        if self._overlap.looks:
            self._overlap.scalars = scalars
        if not self._fewer.has_left_out:  # as `finish_step`, with a call less in each step
            self._finished_step = True
            self._offer_stop(at_tail=False, loss=scalars.get("loss"))

    def boundary(self, *, retake: bool = False) -> None:
        """First half of `step_end`: everything has stepped; copy the volatile state. `retake`: also into memory, since
        ``finish_step(retake=True)`` comes late: a kill in the code between the two loses no boundary."""
        self._end_step(retake=retake)
        self._collector.is_at_boundary = False
        self._update_gate.leave_boundary()

    def _end_step(self, *, retake: bool = False) -> None:
        if self not in entered:  # no call in a step
            require_entered(self, "step_end()")
        if self._evaluations.depth:
            raise UsageError("guard.step_end() was called inside guard.outside_step(): a step belongs outside of it")
        if self._place is not None:
            self._place.member.at_boundary()
        loops = self._loops
        if self._fewer.is_shrunk and self._fewer.leaves_out(self._boundaries.is_inside_accumulation):
            return
        self._known = self._loaders.at_boundary()
        # Without a call after an update.
        is_inside = self._update_gate.state is GateState.CLEAN and self._boundaries.is_inside_accumulation()
        position = loops.count(is_boundary=self._known and not is_inside)
        self._cut = position is not None
        self._finished_step = False
        if is_inside:
            self._boundaries.inside_window()
        if position is not None:
            if self._overlap.is_playing:
                self._overlap.copy()
            else:
                self._boundaries.cut(position)
            if retake and self._around.memory is not None and not self._overlap.is_playing:
                self._around.memory.keep_boundary()
        elif not self._known:
            self._update_gate.pass_unknown()

    def finish_step(self, *, retake: bool = False, loss: object = None) -> None:
        """Second half of `step_end`: snapshots, the stop, periodic saves.

        `retake`: code has run since `boundary` that belongs to this step (callbacks that count, draw random numbers or
        keep averages), so the boundary is copied again. `loss`: as for `step_end`.
        """
        if self._fewer.has_left_out:
            return
        if retake and self._cut:
            self._overlap.copy() if self._overlap.is_playing else self._boundaries.cut(self._loops.position, again=True)
        self._finished_step = True
        self._offer_stop(at_tail=False, loss=loss)

    def _offer_stop(self, *, at_tail: bool, loss: object = None) -> None:
        """Snapshots, the stop, periodic saves. `at_tail`: after the code that follows the step, at an epoch's end."""
        step, tail, around, overlap = self._loops.step, self._loops.tail, self._around, self._overlap
        self._log_filter.step = step
        overlap.is_at_tail = at_tail
        if overlap.is_playing:
            overlap.at_boundary(self._loops.position, is_cut=self._cut, loss=loss)
            return
        if self._listeners.early_flags and self._cut and self._listeners.raise_early_flags():
            self._step_gate.wait_for_limit(_HEARD_S)
        if overlap.looks:  # notes the step: not after a snapshot, which a kill may leave whole without the note
            overlap.at_boundary(self._loops.position, is_cut=self._cut, loss=loss)
        if around.sees_steps:
            around.at_boundary(step, cut=self._cut, tail_follows=tail.is_pending, after_tail=at_tail)
        if step < _LOOK_STEPS or not step % _LOOK_STEPS:
            self._listeners.handlers.take_over()
        if self._listeners.handlers.postponed and self._cut:
            self._listeners.handlers.call_postponed()
        if self._step_gate.arrive(step):
            self.stopper.at_limit(is_cut=self._cut and not tail.holds_stop())
        if self._periodic and not tail.is_pending:
            self._save_if_due()
        collector = self._collector
        if collector.devices.is_used:
            collector.devices.end_step()
        collector.is_at_boundary = False
        if collector.adapted:
            collector.leave_boundary()
        self._update_gate.leave_boundary()

    def _late_boundary(self) -> None:
        """The loop has gone on, so the step counted last is a boundary that a run can resume from."""
        if self._boundaries.is_inside_accumulation():
            return
        self._cut = self._known = True
        if self._overlap.is_playing:
            self._overlap.copy()
        else:
            self._boundaries.cut(self._loops.position)
        self.finish_step()

    def _pass_tail(self) -> None:
        """The code after an epoch has run: its last boundary is here."""
        if not self._overlap.is_playing:  # else the stop did not know that it was an epoch's end
            self._boundaries.cut(self._loops.position, again=True)
            self._overlap.behind_tail()
            self._offer_stop(at_tail=True)

    def _keep_again(self, is_foreseen: bool) -> None:
        """The data has ended, and code that belongs to the last boundary follows: what it reads was not part of that
        boundary when it was kept. An end that was not foreseen was the place for a stop as well, which waits now."""
        self._collector.return_to_boundary()
        if self._around.memory is not None and self._cut:
            self._around.memory.at_boundary(self._loops.step, tail_follows=is_foreseen, after_tail=True)
            self._around.memory.finish_copy()  # a kill in that code is to find it
        if not is_foreseen:
            self._save_if_due()
        self._collector.leave_boundary()

    def _save_if_due(self) -> None:
        for policy in self._periodic:
            if self._cut and policy.due(self._collector.position):
                self.save_periodic(policy)

    # --- between two steps ---

    def poll(self) -> None:
        """Raise GracefulExit if the job is to stop now. Call it between two steps, as for each batch of an
        evaluation."""
        if not self._step_gate.at_limit():
            return
        if not self._loops.waits_for_tail:
            self._stop_between_steps()
        elif self.stopper.alarm is None:  # a pause; a stop that comes in it goes to the end of the tail
            self.stopper.pauses.wait()

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Wrap an evaluation or anything long between two steps: the job can stop inside, at its last boundary.

        Random streams (python, numpy's global one, torch on the CPU and on all CUDA devices), the modes of the modules
        and the position of the named loaders are as before afterwards, so that the training is the same whether the
        block was run, cut off by a stop, or left out. The training's own loader can be iterated in it, but for one that
        keeps its position by itself (litdata's, mosaicml-streaming's), of which a warning tells. Put the model
        into evaluation mode in it: buffers that change are part of no boundary, and a warning names them. Averaged
        weights can be evaluated in it, if the block puts the training's back: a stop waits for that. After the block,
        note its result: a stop that cut it off raises GracefulExit instead. Which evaluations are done again after a
        resume is said in docs/your-loop.md. Between `boundary` and `finish_step` the stop waits for the
        latter, as long as the deadline allows.
        """
        require_entered(self, "outside_step()")
        evaluations, step = self._evaluations, self._loops.step
        self._collector.devices.wait_for_update()  # what is in the block may be long
        with evaluations.block(step), self._checks.paused(), self._stoppable(), evaluations.watched_weights():
            yield
        if self._cut and not evaluations.depth:
            self._loops.watch_tail()

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Training thread, between two steps: the job can stop at the boundary it has.

        Between `boundary` and `finish_step` the stop waits for the latter: code that belongs to the step still runs.
        With several ranks a stop that has begun waits for the code after an epoch (`guard.loops.epoch_tail`).
        """
        if not self._finished_step or (self._loops.waits_for_tail and self._step_gate.at_limit()):
            with self._around.between_steps():
                yield
            return
        self._step_gate.leave_step()
        try:
            if self._loops.tail.is_pending and self._step_gate.at_limit():
                self._stop_between_steps()
            with self._around.between_steps():
                yield
        finally:
            self._enter_step()

    def _enter_step(self) -> None:
        if self._step_gate.enter_step():
            self._stop_between_steps()

    def _stop_between_steps(self) -> None:
        """Stop at the last boundary, unless what has run since has changed the weights: then at the next one."""
        with self._update_gate.hold(0.0) as problem:
            pass
        self.stopper.at_limit(is_cut=problem is None, is_between=True)

    # --- saves and stops that the program asks for ---

    def save(self, reason: str = "manual", path: str | Path | None = None) -> Path:
        """Save the last boundary now. Training thread. Raises SaveError; UsageError inside an update."""
        require_entered(self, "save()")
        if self._overlap.is_playing and self.stopper.save.path is not None:
            return self.stopper.save.path
        with self._update_gate.hold(0.0) as problem:
            if problem is not None:
                raise UsageError(f"guard.save() must be called right after guard.step_end(): {problem}")
            options, target = self._options, None if path is None else Path(path)
            self._collector.return_to_boundary()
            if self._proof is not None and target is not None:
                target = self._proof.redirected_file(target)
            return self._saver.save_to(target, options.folder, options.prefix, reason).path

    def save_periodic(self, policy: PeriodicPolicy) -> bool:
        """Save the last boundary for a periodic policy now, due or not. Training thread, outside an update."""
        if self._overlap.is_playing:
            return False
        with self._update_gate.hold(0.0) as problem:
            pass
        if problem is None:
            with self._stoppable():
                self._collector.return_to_boundary()
                return self._saver.save_periodic(policy)
        logger.error("step %d is not saved: %s", self._loops.step, problem)
        return False

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        """Stop the whole job gracefully. Any thread; the training thread leaves at one of the next boundaries."""
        require_entered(self, "request_stop()")
        self.stopper.request(reason, exit_code)

    def dismiss_stop(self) -> None:
        """A stop asked for with `request_stop` has been reached and is the normal end: go on after the loop."""
        self.stopper.dismiss()

    # --- leaving ---

    def _conclude(self, error: BaseException | None) -> None:
        caught = None if self._odd is None else self._odd.left
        way_out = self._overlap.way_out(error or caught)
        self._ending.conclude(way_out, finish=self._finish)
        if way_out is not error and way_out is not None:
            raise way_out from error

    def _finish(self) -> None:
        """The block has ended by itself. Raises GracefulExit where an alarm was heard before."""
        self._loops.end()
        if self._loops.step and not self._known and self._finished_step:
            self._loaders.take_all_as_used()
            self._boundaries.cut(self._loops.position, again=True)
        self._ending.finish(self._loops.step, self._already_durable())

    def _already_durable(self) -> Path | None:
        """The file that this run was resumed from, while no boundary has been passed since."""
        return None if self._boundaries.has_passed else self.resumed_path
