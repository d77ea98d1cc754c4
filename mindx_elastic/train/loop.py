"""The training loop: epochs, accumulation windows, boundaries, callbacks, and the end.

The order of one window is fixed, because a resume must find the same one: batches, on_train_step_begin, step,
scheduler, boundary, on_train_step_end, then periodic saves and the stop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import Answer, Merged, Part
from mindx_elastic.config import Settings
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.data.position import num_batches
from mindx_elastic.data.sampler import window_of
from mindx_elastic.errors import GracefulExit, UsageError
from mindx_elastic.guard.guard import Guard
from mindx_elastic.guard.periodic import PeriodicSave
from mindx_elastic.guard.policy import PeriodicPolicy
from mindx_elastic.train.callbacks import CallbackList, CallbackParams, RunContext
from mindx_elastic.train.parallel import all_sum
from mindx_elastic.train.step import ModelParts, OptimizerWatch, TrainOneStep, loss_of, move_batch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CALLBACKS", "PROGRESS", "CutHooks", "EpochLoss", "GuardPort", "TrainLoop", "Unguarded", "windows"]

CALLBACKS, PROGRESS = "callbacks", "train"  # their names in the checkpoint's tree
_STOP_REASON = "RunContext.request_stop()"


class CutHooks(Part):
    """On which ranks the ``on_train_step_end`` hooks of the resumed step were cut off, and whether the hooks of some
    rank had ended the training; told when the state is back."""

    name = "hooks"

    def __init__(self, losses: EpochLoss) -> None:
        self._losses = losses
        self.cut_on, self.is_cut_everywhere = "", False
        self.stopped = 0
        """See `EpochLoss.stopped`."""

    def say(self) -> Any:
        return bool(self._losses.hooks_pending), self._losses.stopped

    def merge(self, said: Sequence[Any]) -> Merged:
        cut_on = [rank for rank, (is_pending, _) in enumerate(said) if is_pending]
        stopped = max(int(stopped) for _, stopped in said)
        return Merged([rank_list(cut_on) if cut_on else "", len(cut_on) == len(said), stopped])

    def hear(self, answer: Answer) -> None:
        cut_on, everywhere, stopped = answer.common
        self.cut_on, self.is_cut_everywhere, self.stopped = str(cut_on), bool(everywhere), int(stopped)


class EpochLoss:
    """Running sum of the epoch's losses, on the device, together with the metrics; part of the checkpoint.

    It also records whether the ``on_train_step_end`` hooks of the boundary have yet to run, and whether a hook has
    ended the training. When an exception or the deadline cuts them off, the checkpoint holds the state from before the
    first of them.
    """

    def __init__(self, model: ModelParts) -> None:
        self.in_words = "the losses and metrics of this epoch so far"
        """For messages: no user has named this object."""
        self._metrics = model.metrics
        self._device = model.device
        self._total = torch.zeros((), dtype=torch.float64, device="cpu")
        self._count = 0
        self._base = self._total, self._count  # the epoch's steps before the present one
        self._starts_over = False
        self.hooks_pending = False
        self.stopped = 0
        """The number of epochs of the training that `RunContext.request_stop` has ended before; 0: none."""
        self.outputs: Any = None
        """The last step's loss, where it is one number: what most hooks want to know."""

    def begin_step(self) -> None:
        """A boundary from now on is one whose hooks are still to be run."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        self._base = (zero, 0) if self._starts_over else (self._total, self._count)
        self.hooks_pending = True

    def end_hooks(self) -> None:
        self.hooks_pending = False

    def reset(self) -> None:
        """A new epoch begins."""
        self._starts_over = True

    def note(self, outputs: Any) -> None:
        """Count the step's loss. A second call in a step replaces the first one's. Nothing is read, so the device is
        not waited for."""
        loss = loss_of(outputs)
        total, count = self._base
        if isinstance(loss, Tensor) and loss.numel() == 1:
            total, count = total + loss.detach().reshape(()).to(self._device, torch.float64), count + 1
        elif isinstance(loss, (int, float)):
            total, count = total + float(loss), count + 1
        self._total, self._count, self._starts_over = total, count, False
        if type(loss) is Tensor and loss.numel() == 1:  # not a DTensor: a checkpoint may not be able to hold it
            self.outputs = loss.detach()
        else:
            self.outputs = loss if isinstance(loss, (int, float)) else None

    def mean(self, *, over_ranks: bool = False) -> Tensor:
        """The mean so far; nan before the epoch's first step. `over_ranks` is a collective."""
        zero = torch.zeros_like(self._total)
        sum_, count = (zero, 0) if self._starts_over else (self._total, self._count)
        total = torch.stack([sum_, torch.full_like(sum_, count)])
        if over_ranks:
            total = all_sum(total)
        return total[0] / total[1]

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": self._total,
            "count": self._count,
            "metrics": self._metrics.state_dict(),
            "hooks_pending": self.hooks_pending,
            "stopped": self.stopped,
            "outputs": self.outputs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._total, self._count = state["total"].to(self._device), state["count"]
        self._starts_over = False
        self._metrics.load_state_dict(state["metrics"])
        outputs = state.get("outputs")
        self.hooks_pending = state.get("hooks_pending", False)  # files of version 0.1 do not have it
        self.stopped = state.get("stopped", 0)  # nor those of version 0.2
        self.outputs = outputs.to(self._device) if isinstance(outputs, Tensor) else outputs


def windows(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Groups of `size` batches, the last one perhaps smaller.

    A group is fetched whole before its first batch is used, so that the last group's true number is known when its
    losses are divided. Loaders that do not know their length work as well, and the data position is read at
    boundaries only.
    """
    while window := list(itertools.islice(batches, size)):
        yield window


class TrainLoop:
    """One call of `Model.train`. `guard` is entered, and the state is loaded."""

    def __init__(
        self,
        model: ModelParts,
        guard: GuardPort,
        callbacks: CallbackList,
        loader: Any,
        losses: EpochLoss,
        periodic: Sequence[Any],
        exchange: Exchange | None,
        hooks: CutHooks,
    ) -> None:
        self.model, self.guard, self.callbacks, self.loader, self.losses = model, guard, callbacks, loader, losses
        self.periodic = periodic
        self._exchange, self._hooks = exchange, hooks
        self._asked_all = False
        self.params = CallbackParams()
        self.context = RunContext(self.params)

    def run(self, epochs: int) -> None:
        """Train until epoch `epochs` is done, a callback asks for the end, or the guard raises GracefulExit."""
        self._fill_params(epochs)
        self._call("on_train_begin")
        self._finish_cut_step_later()
        if isinstance(self.model.step, TrainOneStep):  # an exception after the update does not lose the loss
            self.model.step.on_loss = self.losses.note
        with OptimizerWatch(self.model.optimizers) as watch:
            try:
                for epoch in () if self._hooks.stopped >= epochs else self.guard.epochs(epochs):
                    if self._epoch(epoch, watch):
                        break
            except GracefulExit as leaving:
                if leaving.code != 0 or not leaving.reason.startswith(_STOP_REASON):
                    raise
                self.guard.dismiss_stop()  # request_stop() of some rank, agreed on by all: a normal end
        self._call("on_train_end")
        self._save_last()

    def _epoch(self, epoch: int, watch: OptimizerWatch) -> bool:
        """One epoch, or what is left of it; True when the training is to end."""
        position = self.guard.position
        started = position.epoch == epoch and position.step_in_epoch > 0
        self.params.update(cur_epoch_num=epoch, batch_num=self._windows_per_epoch())
        self.params.cur_step_in_epoch = position.step_in_epoch
        self.model.network.train()
        if not started:
            self.losses.reset()
            self._call("on_train_epoch_begin")
        batches = iter(self.loader)
        for window in windows(batches, self._window_size()):
            is_over = self._stop_wanted()  # hooks that were cut off may have run again as the iterator was made
            if not is_over:
                self._window(window, watch)
                is_over = self._stop_wanted()
            if is_over:
                self._call("on_train_epoch_end")
                return True
        self._step_schedulers("epoch")
        self._call("on_train_epoch_end")
        return epoch < self.params.epoch_num and self._stop_wanted()

    def _window(self, batches: list[Any], watch: OptimizerWatch) -> None:
        model, params, position = self.model, self.params, self.guard.position
        params.update(
            cur_step_num=position.step + 1,
            cur_step_in_epoch=position.step_in_epoch + 1,
            train_dataset_element=batches[-1],
        )
        self._call("on_train_step_begin")
        watch.take()
        self.losses.begin_step()
        outputs = model.step([move_batch(batch, model.device) for batch in batches])
        if watch.take():
            self._step_schedulers("step")
        elif model.step.window:
            # The gradient scaler has skipped the update. Its useless gradients go, or the guard would take them for an
            # accumulation window that is still open and not stop here.
            for optimizer in model.optimizers:
                optimizer.zero_grad(set_to_none=True)
        params.net_outputs = outputs
        self.losses.note(outputs)
        self.guard.boundary(retake=True)
        self._call("on_train_step_end")
        self.losses.end_hooks()
        self.guard.finish_step(retake=True, loss=self.losses.outputs)

    def _finish_cut_step_later(self) -> None:
        """The ``on_train_step_end`` hooks of the resumed step were cut off: run them all again, from the state before
        them, once the loader's iterator is there and the random streams are those of the boundary.
        """
        if isinstance(self.guard, Unguarded) or self.guard.resumed_from_step is None:
            return
        # A hook may wait for the other ranks (an evaluation): all of them run it, or none.
        if not self._hooks.is_cut_everywhere:
            if cut_on := self._hooks.cut_on:
                self.guard.risk(
                    f"step {self.guard.position.step}: on_train_step_end was cut off on {cut_on} and not on the "
                    "others, and is not run again: from here the run may differ from the uninterrupted one",
                    "What callbacks count there is one step short",
                )
            self.losses.end_hooks()
            return
        restore_streams = self.loader.on_iterator_ready

        def once() -> None:
            self.loader.on_iterator_ready = None
            if restore_streams is not None:
                restore_streams()
            self._finish_cut_step()

        self.loader.on_iterator_ready = once

    def _finish_cut_step(self) -> None:
        position = self.guard.position
        logger.info("step %d: its on_train_step_end callbacks had not ended; they run again", position.step)
        self.params.update(
            cur_step_num=position.step, cur_step_in_epoch=position.step_in_epoch, net_outputs=self.losses.outputs
        )
        self._call("on_train_step_end")
        self.losses.end_hooks()
        self.guard.finish_step(retake=True)

    def _step_schedulers(self, interval: str) -> None:
        if self.model.lr_scheduler_interval != interval:
            return
        for scheduler in self.model.lr_schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.losses.mean(over_ranks=self.guard.world_size > 1).item())
            else:
                scheduler.step()

    def _stop_wanted(self) -> bool:
        """Whether to end after this step. With several ranks only when all of them want to, at this same step.

        If some do not, this rank goes on with them and asks the guard for a stop that all ranks agree on: leaving alone
        would let the others wait in their next all-reduce.
        """
        if not self.context.get_stop_requested() or self._asked_all:
            return False
        if self.guard.world_size == 1 or self._exchange is None:
            return True
        step = self.guard.position.step
        if self._exchange.decide(f"end/{step}", step, Settings.from_env().agreement_s).step == step:
            return True
        params = self.params
        if params.cur_epoch_num == params.epoch_num and params.cur_step_in_epoch == params.batch_num:
            return False  # the others end here, too; a stop would take the code after the training from all of them
        logger.info("request_stop() was called on some ranks only; stopping all of them together")
        self._asked_all = True
        self.guard.request_stop(_STOP_REASON, 0)
        return False

    def _save_last(self) -> None:
        """As in MindSpore, the end of the training is saved too, unless that file is there already."""
        position = self.guard.position
        for policy in self.periodic:
            if not isinstance(policy, PeriodicSave) or not position.step or policy.newest == position:
                continue
            resumed = self.guard.resumed_path
            if resumed is None or resumed.name != policy.name(position):
                self.guard.save_periodic(policy)

    def _call(self, hook: str) -> None:
        self.callbacks.call(hook, self.context)
        if self.context.get_stop_requested():
            self.losses.stopped = self.params.epoch_num

    def _windows_per_epoch(self) -> int:
        batches = num_batches(self.loader)
        return -(-batches // self._window_size())

    def _window_size(self) -> int:
        """Batches of a step."""
        return self.guard.accumulation(self.model.grad_accum) if self.model.step.window else 1

    def _fill_params(self, epochs: int) -> None:
        model, guard = self.model, self.guard
        position = guard.position
        self.params.update(
            mode="train", model=model, network=model.bare_network, train_network=model.network,
            optimizer=model.optimizer, loss_fn=model.loss_fn, lr_scheduler=model.lr_scheduler,
            train_dataset=self.loader, train_dataset_element=None, epoch_num=epochs,
            cur_epoch_num=max(1, position.epoch), cur_step_num=position.step,
            cur_step_in_epoch=position.step_in_epoch, batch_num=self._windows_per_epoch(), net_outputs=None,
            list_callback=self.callbacks, device_number=guard.world_size, rank=guard.rank,
            resumed_from_step=guard.resumed_from_step, dataset_sink_mode=False,
        )  # fmt: skip


# --- training without a checkpoint ---


class Unguarded:
    """Takes the guard's place where no callback asks for a checkpoint: counts, and touches neither disk nor signals."""

    resumed_from_step: int | None = None
    resumed_path: Path | None = None

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        self._step = self._epoch = self._step_in_epoch = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    @property
    def position(self) -> Position:
        return Position(self._step, self._epoch, self._step_in_epoch, num_batches(self.loader))

    def epochs(self, num_epochs: int) -> Iterator[int]:
        for epoch in range(1, num_epochs + 1):
            self._epoch, self._step_in_epoch = epoch, 0
            self.loader.set_epoch(epoch)
            yield epoch

    def accumulation(self, batches: int = 1) -> int:
        return window_of(batches, self.world_size)

    def boundary(self, *, retake: bool = False) -> None:
        self._step += 1
        self._step_in_epoch += 1

    def finish_step(self, *, retake: bool = False, loss: object = None) -> None:
        pass

    def poll(self) -> None:
        pass

    def dismiss_stop(self) -> None:
        pass

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        yield

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        raise UsageError(
            f"{reason}: not every rank has asked for the stop at this step, and without a checkpoint callback the "
            "ranks cannot agree on one; call request_stop() on every rank, or add ExceptionCheckpoint"
        )

    def save_periodic(self, policy: PeriodicPolicy) -> bool:
        return False


GuardPort: TypeAlias = "Guard | Unguarded"
"""What `Model` trains and evaluates with."""
