"""Lightning: one callback keeps a `Trainer.fit` that can be stopped anywhere.

::

    from mindx_elastic.integrations.lightning import ElasticCallback

    trainer = Trainer(max_epochs=90, callbacks=[ElasticCallback("ckpt")])
    trainer.fit(module, loader)  # the same command again goes on where this one was stopped

The boundary of a step is after all that Lightning does for it: the batch's hooks, a validation, the schedulers. Where
a validation follows a step, the step is a boundary before it as well, with the note that the validation is still to
come, so that a long one can be cut off and is done again.

Lightning's own way to go on from a checkpoint in mid-epoch is not used further than for its counters: it skips a
validation and the end of an epoch after the last batch. Here its loop is put where it was, and goes on from there.

Private places of Lightning: `Precision._wrap_closure`, `_Loop._restarting`, ``_FitLoop._data_source``,
``_combined_loader``, ``_data_fetcher``, ``epoch_loop``, ``epoch_loop._results`` with `_ResultMetric` and `_Metadata`;
``Trainer._signal_connector``, ``_logger_connector``, ``_data_connector`` with ``_requires_distributed_sampler`` and
``_prepare_dataloader``; `WeightAveraging._average_model`, ``_swap_models``, ``_latest_update_epoch``; those of
`ModelCheckpoint` in ``_LAST_SAVE``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader
from torchmetrics import Metric

from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.capture.nested import put_on
from mindx_elastic.data import ReplayLoader, from_loader
from mindx_elastic.data.position import num_batches
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import Guard
from mindx_elastic.integrations.gathered import Gathered
from mindx_elastic.integrations.layer import (
    Standing,
    check_library,
    end_step,
    finish_cut_step,
    is_of_program,
    with_names_of,
)

__all__ = ["ElasticCallback"]

_TRIED = ("2.6",)
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
         "dataloader_idx", "metric_attribute")  # fmt: skip


class ElasticCallback(Callback):
    """Stops a `Trainer.fit` at an alarm (SIGTERM on any rank, a flag file, an exception) and goes on bit for bit.

    Args:
        directory: where the checkpoints go; that of the run to go on from.
        prefix, options: as for `mindx_elastic.Guard`.

    `fit` leaves with `mindx_elastic.GracefulExit`, a SystemExit with the stop's exit code (143 for SIGTERM).
    Lightning's own signal handlers are not installed meanwhile: they ask for a collective inside of a signal handler.
    For one device and for DDP, where every rank has been started by torchrun or ``mindx-elastic run``. The training
    data is one DataLoader; its shuffled order is a function of (seed, epoch). Raises UsageError at the begin of the
    fit for what cannot be kept, and names it.

    `guard` is the running `Guard`, or None outside of a fit.
    """

    def __init__(self, directory: Any, prefix: str = "ckpt", **options: Any) -> None:
        self._directory, self._prefix, self._options = directory, prefix, options
        self.guard: Guard | None = None
        self._loops: _Loops | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def resumed_from_step(self) -> int | None:
        """As of `Guard`; None outside of a fit."""
        return None if self.guard is None else self.guard.resumed_from_step

    # --- hooks ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check_version(trainer)
            _check_callbacks(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module is wrapped by DDP, and no iterator was made yet."""
        _check_trainer(trainer, pl_module)
        self._undo = []
        try:
            self._open(trainer)
        except BaseException:
            self._restore_trainer()
            raise

    def on_train_batch_start(self, *_: Any) -> None:
        if self._loops is not None:
            self._loops.go_on()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.guard is not None and not trainer.sanity_checking:
            self.guard.poll()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(None)  # a fit that had nothing left to do

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(exception)

    # --- the guard ---

    def _open(self, trainer: Trainer) -> None:
        loops, loader = _Loops(trainer), self._take_loader(trainer)
        options = dict(self._options)
        stateful = {"loops": loops, "callbacks": _Callbacks(trainer, self), **_averages(trainer)}
        module, datamodule = trainer.lightning_module, trainer.datamodule
        if datamodule is not None and is_overridden("state_dict", datamodule, parent=LightningDataModule):
            stateful["datamodule"] = datamodule
        guard = Guard(
            model=trainer.strategy.model,
            optimizer=list(trainer.optimizers) or None,
            lr_scheduler=[each.scheduler for each in trainer.lr_scheduler_configs] or None,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            loader=loader,
            stateful=with_names_of(stateful, options.pop("stateful", None), ["datamodule"]),
            directory=self._directory,
            prefix=self._prefix,
            **options,
        )
        if num_batches(loader):  # else Lightning fetches one ahead, to know the last one
            guard.expect_no_look_ahead()
        without = _without_state(trainer)
        kept = [each for each in trainer.callbacks if each not in without.values()]
        guard.serve_layer(
            {"module": module},
            kept=[trainer, *kept],
            own=without,
            has_short_epochs=True,  # limit_train_batches
        )
        guard.open()
        self.guard, self._loops = guard, loops
        self._wrap(trainer, loops, guard)

    def _wrap(self, trainer: Trainer, loops: _Loops, guard: Guard) -> None:
        """Stand between the trainer and its loops, until the fit is over."""
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._replace(trainer._signal_connector, "register_signal_handlers", lambda: None)
        end_advance, validate = epoch_loop.on_advance_end, epoch_loop.val_loop.run
        begin_epoch, end_fit = epoch_loop.on_run_start, fit_loop.on_run_end
        reach_epoch = fit_loop.on_advance_start

        def on_advance_end(fetcher: Any) -> None:
            end_step(guard, loops, partial(end_advance, fetcher), is_long=epoch_loop._should_check_val_fx(fetcher))

        def run_validation() -> Any:
            if trainer.sanity_checking:
                return validate()
            with guard.outside_step():
                return validate()

        def on_advance_start() -> None:
            is_within = fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end
            reach_epoch()
            if is_within and loops.resumed is not None:
                _begin_epoch_again(trainer)

        def on_run_start(fetcher: Any) -> None:
            begin_epoch(fetcher)
            is_cut = loops.put_back()
            if epoch_loop._num_ready_batches_reached():
                with suppress(StopIteration):
                    next(fetcher)  # Lightning would not ask, and the random streams are put back where somebody asks
                loops.go_on()
            elif epoch_loop.done:  # stopped early, or by `max_steps`: there is no other batch
                guard.reach_resumed_step()
                loops.go_on()
            if is_cut:
                loops.go_on()
                finish_cut_step(guard, loops, partial(end_advance, fetcher))

        def on_run_end() -> None:
            end_fit()
            self._close(None)

        self._replace(trainer.precision_plugin, "optimizer_step", _closure_first(trainer.precision_plugin))
        self._replace(epoch_loop, "on_advance_end", on_advance_end)
        self._replace(epoch_loop, "on_run_start", on_run_start)
        self._replace(epoch_loop.val_loop, "run", run_validation)
        self._replace(fit_loop, "on_advance_start", on_advance_start)
        self._replace(fit_loop, "on_run_end", on_run_end)

    def _take_loader(self, trainer: Trainer) -> Any:
        """The resumable loader, in the place of the fit's own."""
        source = trainer.fit_loop._data_source
        given = source.dataloader()
        if not isinstance(given, DataLoader):
            raise UsageError(f"the training data is a {type(given).__name__}; this callback keeps one DataLoader")
        connector = trainer._data_connector
        divides = connector._requires_distributed_sampler
        loader: Any = from_loader(given, seed=_seed(trainer))
        if isinstance(loader, ReplayLoader):
            # Lightning divides what its sampler gives. It stays a DataLoader, and the guard adopts it: of anything else
            # Lightning would make an iterator, to try it, and an epoch would be over.
            loader = connector._prepare_dataloader(given, shuffle=True, mode=RunningStage.TRAINING)
        elif loader is not given:
            loader._takes_first_seed = True
        self._replace(connector, "_requires_distributed_sampler", lambda each: each is not loader and divides(each))
        if source.is_module():
            source.instance, source.name = loader, "train_dataloader"
        else:
            source.instance = loader
        _forget_loader(trainer)
        return loader

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        self._undo.append(partial(delattr, owner, name))

    def _restore_trainer(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _close(self, error: BaseException | None) -> None:
        guard, self.guard = self.guard, None
        if guard is None:
            return
        self._restore_trainer()
        if self._loops is not None:
            self._loops.leave()
        guard.close(error)


def _forget_loader(trainer: Trainer) -> None:
    """Let the fit ask its source again for the training's loader.

    Where `configure_optimizers` reads ``trainer.estimated_stepping_batches`` (the total of a schedule), Lightning has
    asked before the fit starts, and has made an iterator of what it got.
    """
    fit_loop = trainer.fit_loop
    if fit_loop._combined_loader is not None:
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.teardown()
        fit_loop._combined_loader = None


def _closure_first(plugin: Any) -> Callable[..., Any]:
    """Run forward and backward before `optimizer.step`, where Lightning hands them to it as a closure.

    Inside of a step of an optimizer no state is a boundary's, so an exception of the forward, or the deadline in the
    middle of it, could save nothing. Torch's optimizers call the closure first and once, but for LBFGS.
    """
    step = plugin.optimizer_step

    def optimizer_step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        kind = type(optimizer)
        calls_it_first = kind.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)
        if getattr(plugin, "scaler", None) is not None or not calls_it_first:
            return step(optimizer, model=model, closure=closure, **kwargs)
        with torch.enable_grad():
            loss = plugin._wrap_closure(model, optimizer, closure)
        return optimizer.step(closure=lambda: loss, **kwargs)

    return optimizer_step


def _begin_epoch_again(trainer: Trainer) -> None:
    """Call `on_train_epoch_start` of the program's own classes in an epoch that is resumed in its middle.

    Lightning leaves it out there, and what it sets from the epoch (how hard the samples are, a weight of the loss, an
    empty list) would be missing. What it changes in what is kept is put back at the first batch, as is done with the
    head of a loop. Lightning's own callbacks are not asked: their states have it. But for `StochasticWeightAveraging`,
    which exchanges the scheduler there, and readies the epoch in which BatchNorm gets its statistics.
    """
    module = trainer.lightning_module
    before, module._current_fx_name = module._current_fx_name, "on_train_epoch_start"
    for each in trainer.callbacks:
        if not _is_lightnings(type(each).on_train_epoch_start) or isinstance(each, callbacks.StochasticWeightAveraging):
            each.on_train_epoch_start(trainer, module)
    if not _is_lightnings(type(module).on_train_epoch_start):
        module.on_train_epoch_start()
    module._current_fx_name = before


# --- what is kept besides the module ---


class _Loops(Standing):
    """Where Lightning's loops stand: their counters, the sums of an epoch's means, the metrics of the last ones,
    what has changed in lists, numbers and tensors of the module."""

    gives_copies = True
    follow_the_steps: ClassVar = ("counters", "first_batch", "should_stop", "accumulation", "is_cut")
    entries_in_words: ClassVar = {
        "results": "the epoch's sums of self.log",
        "torchmetrics": "what torchmetrics have gathered",
        "gathered": "lists, numbers and tensors of the module",
        "metrics": "the last logged values",
    }

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._weak_trainer = weakref.ref(
            trainer
        )  # what is held otherwise is looked at: Lightning's own marks of a resume
        self._gathered = Gathered(trainer.lightning_module, but=LightningModule())
        self._max_steps = trainer.fit_loop.epoch_loop.max_steps

    @property
    def _trainer(self) -> Trainer:
        trainer = self._weak_trainer()
        assert trainer is not None, "its fit is under way"
        return trainer

    def now(self) -> dict[str, Any]:
        return {**copy_tree(self._counters()), "gathered": self._gathered.state()}

    def _counters(self) -> dict[str, Any]:
        trainer = self._trainer
        counters = trainer.fit_loop.state_dict()
        counters["state_dict"].pop("combined_loader", None)  # the guard has it
        connector = trainer._logger_connector
        return {
            "counters": counters,
            "results": {key: _pack(each) for key, each in trainer.fit_loop.epoch_loop._results.items()},
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "torchmetrics": {path: _state_of_metric(each) for path, each in _metrics_of(trainer)},
            "first_batch": connector._first_loop_iter,
            "should_stop": trainer.should_stop,
            "accumulation": trainer.accumulate_grad_batches,  # as `GradientAccumulationScheduler` has set it
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._trainer.fit_loop.load_state_dict(state["counters"])
        # Until `put_back`: what has ended the fit would leave out the end of its last epoch.
        self._trainer.should_stop, self._trainer.fit_loop.epoch_loop.max_steps = False, -1

    def go_on(self) -> None:
        """The loops move."""
        self.resumed = None

    def leave(self) -> None:
        """The fit is over. It may have had nothing left to do."""
        if self.resumed is not None:
            self._put_back_end(self.resumed)

    def _put_back_end(self, state: Mapping[str, Any]) -> None:
        """What ends the fit, and ``trainer.callback_metrics`` and the like."""
        self._trainer.should_stop = state["should_stop"]
        self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        for name, values in state["metrics"].items():
            getattr(self._trainer._logger_connector, name).update(values)

    def put_back(self) -> bool:
        """The first epoch of the process begins: what Lightning has set to zero meanwhile. Returns whether the resumed
        step is still to be ended."""
        state = self.resumed
        if state is None:
            return False
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        self._put_back_end(state)
        if any(isinstance(each, callbacks.GradientAccumulationScheduler) for each in trainer.callbacks):
            trainer.accumulate_grad_batches = state.get("accumulation", trainer.accumulate_grad_batches)
        for key, packed in state["results"].items():
            epoch_loop._results[key] = _unpack(packed, trainer)
        kept = state.get("torchmetrics", {})
        for path, metric in _metrics_of(trainer):
            if path in kept:
                _load_metric(metric, kept[path])
        self._gathered.load(state.get("gathered", ()), trainer.strategy.root_device)
        trainer._logger_connector._first_loop_iter = state["first_batch"]  # else the next batch empties the sums
        # The counters are the boundary's. What Lightning does beyond that in a "restart" is meant for its own
        # checkpoints, which are written at other places: it skips validations and schedulers.
        trainer.fit_loop._restarting = epoch_loop._restarting = False
        epoch_loop.val_loop.restarting = False
        return self.is_cut


_EPOCHS, _SAVES = "latest_update_epochs", "last_saves"
_LAST_SAVE = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def _pack(metric: Any) -> dict[str, Any]:
    """A `_ResultMetric`: what `self.log` has gathered in this epoch under one name."""
    meta = metric.meta
    packed: dict[str, Any] = {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
        "begins_as": dict(metric._defaults) if metric.is_tensor else {},  # in the precision of the step that logged it
    }
    if meta.sync.group is not None:
        raise UsageError(f"self.log({meta.name!r}, sync_dist_group=...): a process group is not kept; leave it out")
    packed["state"] = {name: getattr(metric, name) for name in metric._defaults} if metric.is_tensor else {}
    packed["updates"] = metric._update_count
    return packed


class _Logged(result._Metadata):
    """Of a value that an earlier process has logged. Lightning synchronises where there are several ranks, and compares
    what each `self.log` says of its value with the first one's: on another number of ranks that is this process's."""

    def __ne__(self, other: object) -> bool:
        own = self.__dict__
        if not isinstance(other, result._Metadata) or any(
            own[name] != vars(other)[name] for name in own if name != "_sync"
        ):
            return True
        self.sync = other.sync
        return False

    def __eq__(self, other: object) -> bool:
        return not self != other

    __hash__ = None  # type: ignore[assignment]


def _unpack(packed: Mapping[str, Any], trainer: Trainer) -> Any:
    meta = _Logged(**packed["meta"], reduce_fx=getattr(torch, packed["reduce"]))
    should, rank_zero_only = packed["sync"]
    meta.sync = result._Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    metric = result._ResultMetric(meta, packed["is_tensor"])
    if not packed["is_tensor"]:
        metric.value = trainer.lightning_module.get_submodule(packed["meta"]["metric_attribute"])
    metric._defaults.update(packed["begins_as"])
    for name, value in packed["state"].items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = packed["updates"], None
    metric.has_reset = packed["has_reset"]
    return metric.to(trainer.strategy.root_device)


def _metrics_of(trainer: Trainer) -> list[tuple[str, Any]]:
    """The module's torchmetrics, also those that the program updates by itself: no state_dict has what they have
    gathered."""
    found = trainer.lightning_module.named_modules()
    return [(path, each) for path, each in found if isinstance(each, Metric)]


def _state_of_metric(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {"states": states, "updates": metric._update_count}


def _load_metric(metric: Any, state: Mapping[str, Any]) -> None:
    for name, value in put_on(state["states"], str(metric.device)).items():
        setattr(metric, name, list(value) if isinstance(value, (list, tuple)) else value)
    metric._update_count, metric._computed = state["updates"], None


class _Callbacks:
    """The other callbacks: `ModelCheckpoint`'s best ones, `EarlyStopping`'s patience."""

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._callbacks = [each for each in trainer.callbacks if each is not own]

    def state_dict(self) -> dict[str, Any]:
        states = {each.state_key: each.state_dict() for each in self._callbacks}
        epochs = {each.state_key: each._latest_update_epoch for each in self._callbacks if _averages_weights(each)}
        saves = {each.state_key: _private(each, _LAST_SAVE) for each in self._callbacks if _saves(each)}
        return {**{key: state for key, state in states.items() if state}, _EPOCHS: epochs, _SAVES: saves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        epochs, saves = state.get(_EPOCHS, {}), state.get(_SAVES, {})
        for each in self._callbacks:
            if each.state_key in state:
                own = state[each.state_key]
                if _saves(each):  # else a folder that the logger numbers again costs it the best scores
                    own = {**own, "dirpath": each.dirpath}
                each.load_state_dict(own)
            vars(each).update(saves.get(each.state_key, {}))
            if each.state_key in epochs:
                each._latest_update_epoch = epochs[each.state_key]


def _averages_weights(callback: Any) -> bool:
    """Whether it is one of `WeightAveraging`, whose state_dict lacks the averages: Lightning saves them in
    `on_save_checkpoint`, in the place of the model's weights."""
    return isinstance(callback, getattr(callbacks, "WeightAveraging", ()))


def _saves(callback: Any) -> bool:
    return isinstance(callback, callbacks.ModelCheckpoint)


def _private(callback: Any, names: Sequence[str]) -> dict[str, Any]:
    """The attributes that its state_dict lacks."""
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _averages(trainer: Trainer) -> dict[str, Any]:
    """The averaged models of Lightning's callbacks."""
    found = [each for each in trainer.callbacks if _averages_weights(each)]
    return {f"average_{number}": each._average_model for number, each in enumerate(found)}


def _without_state(trainer: Trainer) -> dict[str, Any]:
    """The callbacks of the program, and its data module, whose state no one asks for."""
    found: dict[str, Any] = {}
    for each in trainer.callbacks:
        if not _is_lightnings(type(each)) and not is_overridden("state_dict", each, parent=Callback):
            found.setdefault(type(each).__name__, each)
    data = trainer.datamodule
    if data is not None and not is_overridden("state_dict", data, parent=LightningDataModule):
        found.setdefault(type(data).__name__, data)
    return found


def _is_lightnings(what: Any) -> bool:
    return not is_of_program(what, "lightning", "pytorch_lightning")


# --- what cannot be kept ---

_UNKEPT = {
    "ModelPruning": "its masks are in no state_dict. Prune before the fit, or in a loop of your own",
    "LearningRateFinder": "it trains inside of the fit. Use Tuner(trainer).lr_find(...) once, and write it down",
    "BatchSizeFinder": "it trains inside of the fit. Use Tuner(trainer).scale_batch_size(...) once, and write it down",
}


def _check_version(trainer: Trainer) -> None:
    fit_loop = (
        *("_data_source", "_combined_loader", "_data_fetcher", "_restarting", "on_run_end", "on_advance_start"),
        *("restarted_mid_epoch", "restarted_on_epoch_end", "epoch_loop._results", "epoch_loop._should_check_val_fx"),
        *("epoch_loop.on_advance_end", "epoch_loop.on_run_start", "epoch_loop.val_loop.run"),
    )
    check_library(
        "lightning",
        _TRIED,
        (trainer.fit_loop, fit_loop),
        (trainer._logger_connector, (*_METRICS, "_first_loop_iter")),
        (trainer._data_connector, ("_requires_distributed_sampler", "_prepare_dataloader")),
        (trainer, ("_signal_connector", "precision_plugin._wrap_closure")),
        (result, ("_ResultMetric", "_Metadata", "_Sync")),
    )


def _check_callbacks(trainer: Trainer) -> None:
    """Before any of them trains by itself. Raises UsageError."""
    for kind, why in _UNKEPT.items():
        if any(isinstance(each, getattr(callbacks, kind, ())) for each in trainer.callbacks):
            raise UsageError(f"the callback {kind} cannot be kept: {why}")


def _check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raise UsageError for settings under which a resumed fit would differ."""
    strategy = trainer.strategy
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise UsageError(
            f"Trainer(strategy={type(strategy).__name__}): this callback keeps one device and DDP; use "
            "mindx_elastic.Guard in a loop of your own for other ways to divide a model"
        )
    # Lightning's own environment says of itself that others start the processes, once it has started them.
    if trainer.world_size > 1 and isinstance(strategy.cluster_environment, LightningEnvironment):
        raise UsageError(
            f"the trainer starts its {trainer.world_size} processes by itself, and ends them by itself at a signal; "
            "start them with `mindx-elastic run --nproc-per-node N` (or torchrun)"
        )
    if trainer.ckpt_path is not None:
        raise UsageError(
            "fit(ckpt_path=...): the callback resumes from its own directory, and Lightning would load that file over "
            "it. Load the weights into the module before the fit, or leave ckpt_path out"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError("Trainer(reload_dataloaders_every_n_epochs=...): no position is known in new loaders")
    if trainer.overfit_batches:
        raise UsageError("Trainer(overfit_batches=...) exchanges the loader; limit_train_batches does not")
    for owner in (module, *trainer.callbacks):
        if not _is_lightnings(type(owner).on_save_checkpoint):
            raise UsageError(
                f"{type(owner).__name__}.on_save_checkpoint: the state that it adds to Lightning's checkpoints would "
                "not be kept; keep it in buffers of the module, or in a callback's state_dict and load_state_dict"
            )


def _seed(trainer: Trainer) -> int:
    """The same on all ranks."""
    seed = torch.initial_seed() & ((1 << 63) - 1)
    return int(trainer.strategy.broadcast(seed))
