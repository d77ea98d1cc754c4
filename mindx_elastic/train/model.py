"""`Model`: training and evaluation in the manner of MindSpore and Keras, on top of `Guard`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from mindx_elastic.agreement.connect import open_exchange
from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import all_or_none, meet
from mindx_elastic.capture.plain_component import is_stateful
from mindx_elastic.config import RankInfo
from mindx_elastic.data import from_loader
from mindx_elastic.data.position import whole_number
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import Guard
from mindx_elastic.guard.running import InPlaceGuard, run_in_place
from mindx_elastic.platforms.launchers import current_ranks
from mindx_elastic.train.callbacks import (
    Callback,
    CallbackList,
    Callbacks,
    as_callback_list,
    keeps_state,
    needs_epoch,
)
from mindx_elastic.train.evaluation import evaluate, open_eval_guard
from mindx_elastic.train.loop import CALLBACKS, PROGRESS, CutHooks, EpochLoss, GuardPort, TrainLoop, Unguarded
from mindx_elastic.train.parallel import join_process_group, place, wrap_network
from mindx_elastic.train.policies import Policies, check_alike, gather_policies
from mindx_elastic.train.step import ModelParts, TrainOneStep

__all__ = ["Model"]


class Model(ModelParts):
    """Trains and evaluates a network, and resumes where the last run stopped.

    ::

        model = Model(network, nn.CrossEntropyLoss(), optimizer, metrics={"accuracy"}, lr_scheduler=scheduler)
        model.train(90, loader, callbacks=[ExceptionCheckpoint(prefix="resnet", directory="ckpt")])
        model.eval(test_loader)["accuracy"]

    * `network`: the module. Under torchrun it is wrapped in DDP when a training starts, and the process group is made,
      unless you have done either.
    * `loss_fn`: ``loss_fn(outputs, targets)`` gives a scalar; None: the network returns its loss, or `train_step` does.
    * `optimizer`, `lr_scheduler`: one or a list. A scheduler steps after each update, or with
      ``lr_scheduler_interval="epoch"`` after each epoch (`ReduceLROnPlateau` then gets the epoch's mean training loss).
    * `metrics`: for `eval`; names ("accuracy", "loss", "top5", ...), functions (outputs, targets), objects with clear,
      update and eval, or a dict of them.
    * `grad_scaler`: made by itself with ``amp`` in float16.
    * `device`: None: where the network is if not on the CPU, else this rank's GPU, else the CPU.
    * `grad_accum`: micro-batches per update; the last window of an epoch may have fewer and is divided by its true
      number.
    * `amp`: autocast; True: float16 on CUDA, bfloat16 elsewhere; or a `torch.dtype`.
    * `train_step`: a function ``(model, batch) -> loss`` that runs forward, backward and update by itself with
      ``model.network``, ``model.loss_fn`` and ``model.optimizer`` (overriding `train_step` in a subclass does the
      same), or a subclass of `TrainOneStep`. It keeps every guarantee.
    * `max_grad_norm`: clip the gradients' total norm to this before each update.
    * `stateful` objects, other networks and optimizers that a subclass keeps as attributes are saved under their names.

    Use it from the main thread. Raises UsageError for arguments that cannot work, before anything is started.
    """

    _training_loader: Any = None
    _ready = False

    # --- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        epochs: int,
        loader: Any,
        callbacks: Callbacks = None,
        *,
        resume: str | os.PathLike[str] = "auto",
        grace_s: float | None = None,
        stateful: Mapping[str, Any] | None = None,
        allow_shared_directory: bool = False,
        dataset_sink_mode: bool = False,
    ) -> None:
        """Train until `epochs` epochs are done, counted from the very first start.

        * `loader`: a `mindx_elastic.data.ResumableLoader`, or a DataLoader or iterable of batches, which is converted.
        * `callbacks`: one, a list or None. Without one that saves, no handler is installed and nothing is written.
        * `resume`: ``"auto"`` goes on from the newest complete step in the callbacks' directories; ``"never"``, or
          a path.
        * `grace_s`: seconds from an alarm until the process must be gone; None: ``MINDX_GRACE_S`` or 30.
        * `stateful`: more named objects with ``state_dict`` and ``load_state_dict`` to save and resume.
        * `allow_shared_directory`: accept a directory that every user may write to; files of others are left out,
          unless ``MINDX_TRUSTED_USERS`` names their owners.
        * `dataset_sink_mode`: accepted for MindSpore's sake; it has no effect.

        Raises GracefulExit (a SystemExit) once the job was told to stop and its state is durable, UsageError and the
        errors of `Guard` before training starts, and what the program's own code raises.
        """
        epochs = whole_number("epochs", epochs, low=1)
        if self._guard is not None:
            raise UsageError("train() was called inside a training; call it after the running one has ended")
        if not self.optimizers and isinstance(self.step, TrainOneStep):
            raise UsageError("Model was made without an optimizer; give one, or a train_step that updates by itself")
        given = as_callback_list(callbacks)
        options = {"resume": resume, "grace_s": grace_s, "allow_shared_directory": allow_shared_directory}
        extra = self._stateful_objects(stateful)
        loader = from_loader(loader)
        self._prepare(train=True)

        def block(place: InPlaceGuard | None) -> None:
            self.ranks = RankInfo.from_env()  # of a smaller job, when it is called again in one
            self._train(epochs, loader, given, extra, options, place)

        run_in_place(block, lambda: {"model": self.network})

    def _train(
        self,
        epochs: int,
        loader: Any,
        given: Sequence[Callback],
        extra: Mapping[str, Any],
        options: Mapping[str, Any],
        place: InPlaceGuard | None,
    ) -> None:
        """Train once; again in the same process after a recovery in place. `options`: of the guard."""
        with ExitStack() as stack:
            exchange = self._open_exchange(stack, place)
            with nullcontext() if exchange is None else all_or_none(exchange):
                if exchange is not None:
                    check_alike(given, exchange)
                policies = gather_policies(given)
                states, losses = CallbackList(given), EpochLoss(self)
                kept = {**extra, PROGRESS: losses, CALLBACKS: states}
                guard = self._open_guard(policies, loader, kept, options)
                hooks = CutHooks(losses)
                if isinstance(guard, Guard):
                    guard.take_place(place)
                    guard.serve_layer(
                        self._surroundings(given),
                        kept=[c for c in given if keeps_state(c)],
                        has_tail=any(map(needs_epoch, given)),
                        exchange=exchange,  # from here its errors are the others', too
                        parts=[hooks],
                    )
                elif exchange is not None:
                    meet(exchange, "prepared", [])
            loop = TrainLoop(self, guard, states, loader, losses, policies.periodic, exchange, hooks)
            self._run(guard, loader, loop, epochs)

    def _run(self, guard: GuardPort, loader: Any, loop: TrainLoop, epochs: int) -> None:
        self._guard, self._training_loader = guard, loader
        try:
            with guard:
                self.resumed_from_step = guard.resumed_from_step
                loop.run(epochs)
        except BaseException:
            loader.shutdown()
            raise
        finally:
            self._last_position = guard.position
            self._guard = self._training_loader = None

    def _surroundings(self, callbacks: Sequence[Callback]) -> dict[str, object]:
        """What the program has given to this object, by argument name."""
        found: dict[str, object] = {"loss_fn": self.loss_fn, "train_step": self.step}
        return found | {f"callbacks[{number}]": callback for number, callback in enumerate(callbacks)}

    def _open_guard(
        self, policies: Policies, loader: Any, stateful: Mapping[str, Any], options: Mapping[str, Any]
    ) -> GuardPort:
        directory, resume = policies.directory, options["resume"]
        if directory is None:
            if resume not in ("auto", "never"):
                raise UsageError(
                    f"resume={os.fspath(resume)!r} needs a checkpoint callback, such as ExceptionCheckpoint"
                )
            ranks = current_ranks(self.ranks)
            return Unguarded(loader, rank=ranks.rank, world_size=ranks.world_size)
        guard = Guard(
            directory=directory,
            model=self.network,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            scaler=self.grad_scaler,
            loader=loader,
            stateful=stateful,
            policies=policies.exits,
            periodic=policies.periodic,
            **{**options, "resume": resume if isinstance(resume, str) else Path(resume)},
        )
        guard.expect_no_look_ahead()
        return guard

    # --- evaluation --------------------------------------------------------------------------------------------------

    def eval(self, loader: Any, callbacks: Callbacks = None) -> dict[str, Any]:
        """Evaluate on `loader` and return the metrics by name, over the samples of all ranks.

        Inside a training it can be stopped like a step. By itself it can be stopped by an `OnRequestExit` among its
        `callbacks`. Mode, random streams and the training's position are as before afterwards.
        """
        given = as_callback_list(callbacks)
        in_use = self._training_loader is not None and loader is self._training_loader
        loader = from_loader(loader)
        world_size = self._prepare(train=False)
        rank = current_ranks(self.ranks).rank
        run = CallbackList(given)
        with loader.set_aside() if in_use else nullcontext():
            loader.set_epoch(1)
            if self._guard is not None:
                return evaluate(self, loader, run, self._guard, rank=rank, world_size=world_size)
            guard = open_eval_guard(self, given, loader, rank=rank, world_size=world_size)
            with guard:
                return evaluate(self, loader, run, guard, rank=rank, world_size=world_size)

    # --- preparation -------------------------------------------------------------------------------------------------

    def _prepare(self, *, train: bool) -> int:
        """Put everything in its place, once; returns the world size."""
        if not self._ready:
            place(self.network, self.device, asked=self._asked_device)
            if isinstance(self.loss_fn, nn.Module):
                self.loss_fn.to(self.device)
            self._ready = True
        world_size = join_process_group(self.device, self.ranks)
        if train:
            self.network = wrap_network(self.network, self.device, world_size)
        return world_size

    def _open_exchange(self, stack: ExitStack, place: InPlaceGuard | None) -> Exchange | None:
        ranks = current_ranks(self.ranks)
        if ranks.world_size == 1:
            return None
        exchange = open_exchange(ranks) if place is None else place.open_exchange(ranks, "model/")
        stack.callback(exchange.close)
        return exchange

    def _stateful_objects(self, stateful: Mapping[str, Any] | None) -> dict[str, Any]:
        """What is saved besides network, optimizer, scheduler, scaler and loader."""
        found: dict[str, Any] = {}
        if isinstance(self.loss_fn, nn.Module) and self.loss_fn.state_dict():
            found["loss_fn"] = self.loss_fn
        if _has_state(self._own_step):
            found["train_step"] = self._own_step
        own = {name: value for name, value in vars(self).items() if name not in self._own_names}
        own |= {name: value for name, value in vars(self.step).items() if name != "model"}
        found |= {name: value for name, value in own.items() if _has_state(value)}
        for name, value in (stateful or {}).items():
            if name in (PROGRESS, CALLBACKS) or name in found:
                raise UsageError(f"stateful[{name!r}]: that name is taken; choose another")
            found[name] = value
        return found


def _has_state(value: object) -> bool:
    return is_stateful(value) and not isinstance(value, type)
