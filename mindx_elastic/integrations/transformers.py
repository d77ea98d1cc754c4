"""Hugging Face Transformers: a `Trainer` that can be stopped anywhere and goes on bit for bit.

::

    from mindx_elastic.integrations.transformers import ElasticTrainer as Trainer

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.train()  # the same command again goes on where this one was stopped

A callback cannot do it: `Trainer` settles the epoch to begin with before any hook. So this is a subclass, and
`ElasticTraining` in front of another subclass of `Trainer` (``class Mine(ElasticTraining, Seq2SeqTrainer)``).

The boundary of a step is after all that the trainer does for it: the optimizer and scheduler, ``on_step_end``, log,
evaluation and the trainer's own save. Where one of the last two is due, the step is a boundary before it as well, with
the note that they are still to come, so that a long evaluation can be cut off and is done again. What follows the last
step of an epoch (``on_epoch_end``, an evaluation) belongs to no step: a run that is resumed there does it again.

Private places of transformers: `Trainer._inner_training_loop`, ``_init_training_state``, ``_prepare_for_training``,
``_run_epoch``, ``_maybe_log_save_evaluate``, ``_evaluate``, ``_load_rng_state``, ``_finalize_training``, ``_tr_loss``,
``_total_loss_scalar``, ``_globalstep_last_logged``; `transformers.trainer.skip_first_batches`.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, trainer
from transformers.trainer_callback import ExportableState

from mindx_elastic.core.events import logger
from mindx_elastic.errors import MismatchError, UsageError
from mindx_elastic.guard.guard import Guard
from mindx_elastic.integrations.accelerate import follow
from mindx_elastic.integrations.layer import (
    Standing,
    check_library,
    end_step,
    finish_cut_step,
    is_of_program,
    with_names_of,
)

__all__ = ["ElasticTrainer", "ElasticTraining"]

_TRIED = ("5.23", "5.24")
_KEPT = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_OURS = "mindx_elastic"
"""In place of a checkpoint's path, where the trainer is told that it goes on in the middle of an epoch."""


class ElasticTraining:
    """In front of `transformers.Trainer` or a subclass: see `ElasticTrainer`."""

    args: Any
    state: Any
    control: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    accelerator: Any
    _tr_loss: torch.Tensor
    _total_loss_scalar: float

    def __init__(
        self,
        *args: Any,
        elastic_directory: str | os.PathLike[str] | None = None,
        elastic_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._elastic: _Training | None = None
        self._elastic_directory, self._elastic_options = elastic_directory, dict(elastic_options or {})
        self._elastic_given: Any = None
        self._elastic_loss: float | None = None
        super().__init__(*args, **kwargs)

    @property
    def guard(self) -> Guard | None:
        """The running `mindx_elastic.Guard`; None outside of `train`."""
        return None if self._elastic is None else self._elastic.guard

    # --- the begin ---

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. Without `resume_from_checkpoint` it goes on where the last run was stopped.

        A path that is given (scripts that look for the newest checkpoint by themselves) counts for nothing where there
        is something newer of this integration's to go on from; where there is nothing, UsageError.
        """
        _check_version()
        _check_trainer(self, kwargs.get("trial", args[0] if args else None))
        self._elastic_given = resume_from_checkpoint or None
        return super().train(None, *args, **kwargs)  # type: ignore[misc]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        training = self._elastic = _Training(self)
        self._elastic_loss = None
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            training.close(error)
            raise
        finally:
            self._elastic = None

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        if self._elastic is not None:
            self._elastic.take_loader(dataloader)
        num_epochs, *others = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        if self._elastic is not None and args.max_steps > 0:
            # It follows from the steps of an epoch. On fewer ranks than those of the run to go on with, whose steps
            # count, the epochs would be over before the steps are.
            num_epochs = max(num_epochs, args.max_steps)
        return num_epochs, *others

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        training = self._elastic
        assert training is not None
        num_epochs = -(-max_steps // num_update_steps_per_epoch) if self.args.max_steps > 0 else num_train_epochs
        super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_epochs, None, trial
        )
        # The guard wants the prepared model, and the trainer the epoch to begin with before it has prepared it.
        training.prepared = super()._prepare_for_training(max_steps, training.shard, None)  # type: ignore[misc]
        directory = self._elastic_directory or os.path.join(self.args.output_dir, "_elastic")
        training.open(directory, self._elastic_options)
        if self.args.max_steps <= 0:
            max_steps = self.state.max_steps = training.last_step(max_steps, num_update_steps_per_epoch)
        return training.first_epoch(max_steps, num_train_epochs, self._elastic_given), 0

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._elastic is not None
        return self._elastic.prepared

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self._elastic is not None and self._elastic.resumes:
            return {}  # `eval_on_start`: the run has begun long ago
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)  # type: ignore[misc]

    # --- steps ---

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != _OURS:  # the guard has them
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _run_epoch(self, **kwargs: Any) -> None:
        training = self._elastic
        assert training is not None
        is_resumed = training.resumed_epoch == kwargs["epoch"]
        if is_resumed:
            training.resumed_epoch = None
            training.reach_resumed_step()
            progress = training.progress
            if progress.is_cut:
                assert training.guard is not None
                what = [kwargs[name] for name in ("model", "trial", "epoch", "ignore_keys_for_eval", "start_time")]
                rest = super()._maybe_log_save_evaluate  # type: ignore[misc]
                rest = partial(rest, self._tr_loss, progress.grad_norm, *what, progress.learning_rate)
                finish_cut_step(training.guard, progress, rest)
            done = training.updates_done
            if self.control.should_epoch_stop or self.control.should_training_stop:
                done = kwargs["num_update_steps_per_epoch"]  # nothing of the epoch is left but its end
            kwargs["epochs_trained"], kwargs["resume_from_checkpoint"] = kwargs["epoch"], _OURS
            kwargs["steps_trained_in_current_epoch"] = done * self.args.gradient_accumulation_steps
        with _without_skipping(training.shard) if is_resumed else nullcontext():
            super()._run_epoch(**kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *what: Any, learning_rate: Any = None) -> None:
        training = self._elastic
        assert training is not None and training.guard is not None
        guard, progress, rest = training.guard, training.progress, super()._maybe_log_save_evaluate  # type: ignore[misc]
        if self.state.global_step > training.step:
            training.step = self.state.global_step
            progress.end_step(grad_norm, learning_rate)
            is_long = self.control.should_evaluate or self.control.should_save
            end_step(guard, progress, partial(rest, tr_loss, grad_norm, *what, learning_rate), is_long=is_long)
            return
        if learning_rate is None:  # a resumed epoch of which nothing but the end was left
            grad_norm, learning_rate = progress.grad_norm, progress.learning_rate
        rest(tr_loss, grad_norm, *what, learning_rate)
        if training.step:
            progress.has_ended_epoch = True
            guard.finish_step(retake=True)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        guard = self.guard
        with nullcontext() if guard is None else guard.outside_step():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    # --- the end ---

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        training = self._elastic
        assert training is not None
        training.reach_resumed_step()
        training.close(None)  # from here on the weights may be the best ones, which no boundary has
        # The trainer divides by the steps of this process, which is right for its speed.
        total = self._total_loss_scalar + self._tr_loss.item()
        self._elastic_loss = total / max(self.state.global_step, 0.001)
        output = super()._finalize_training(*args, **kwargs)  # type: ignore[misc]
        return output._replace(training_loss=self._elastic_loss)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "train_loss" in logs and self._elastic_loss is not None:
            logs["train_loss"] = self._elastic_loss
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class ElasticTrainer(ElasticTraining, Trainer):
    """A `transformers.Trainer` whose `train` stops at an alarm (SIGTERM on any rank, a flag file, an exception) and
    goes on bit for bit when the same command is started again.

    Args, besides those of `Trainer`:
        elastic_directory: where the checkpoints go, and what to go on from; default ``_elastic`` in ``output_dir``.
        elastic_options: as for `mindx_elastic.Guard` (prefix, flag_file, grace_s, ...).

    `train` leaves with `mindx_elastic.GracefulExit`, a SystemExit with the stop's exit code (143 for SIGTERM). The
    trainer's own checkpoints, their rotation and the best model are as without it. For one device and for DDP, where
    every rank has been started by torchrun or ``mindx-elastic run``. The shuffled order of the data is a function of
    (`data_seed` or `seed`, epoch). Raises UsageError at the begin of `train` for what cannot be kept, and names it.
    """


class _Training:
    """One `train`: the guard, and where the trainer goes on."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.guard: Guard | None = None
        self.progress = _Progress(owner)
        self.shard: Any = None
        self.prepared: Any = None
        self.step = 0
        """The last one that was a boundary."""
        self.resumed_epoch: int | None = None
        """The trainer's number of the epoch that is resumed in its middle, or before what follows its last step."""
        self.updates_done = 0
        """Updates done in that epoch."""
        self._hook = _Hook(self)
        self._is_on_the_way = False

    @property
    def resumes(self) -> bool:
        return self.guard is not None and self.guard.resumed_from_step is not None

    def take_loader(self, shard: Any) -> None:
        args = self._owner.args
        if not hasattr(shard, "base_dataloader"):
            raise UsageError(
                f"get_train_dataloader() has returned a {type(shard).__name__}: return what "
                "self.accelerator.prepare(loader) makes of a DataLoader, as Trainer's own does"
            )
        seed = args.data_seed if args.data_seed is not None else args.seed
        self.shard, self._loader = shard, follow(shard, seed, first_epoch=0)

    def open(self, directory: Any, options: Mapping[str, Any]) -> None:
        owner = self._owner
        guard = Guard(
            model=self.prepared[0],
            optimizer=owner.optimizer.optimizer,
            lr_scheduler=owner.lr_scheduler,
            scaler=getattr(owner.accelerator, "scaler", None),
            loader=self._loader,
            stateful=with_names_of({"trainer": self.progress}, options.get("stateful")),
            directory=directory,
            **{name: value for name, value in options.items() if name != "stateful"},
        )
        guard.expect_no_look_ahead()
        callbacks = owner.callback_handler.callbacks
        programs = [each for each in callbacks if is_of_program(type(each), "transformers")]
        own = {type(each).__name__: each for each in programs if not _has_state(each)}
        kept = [owner, *(each for _, each in _stateful(owner))]
        guard.serve_layer({"model": owner.model}, kept=kept, own=own)
        guard.open()
        self.guard = guard
        callbacks.insert(0, self._hook)
        self._is_on_the_way = self.resumes
        self.step = owner.state.global_step

    def last_step(self, max_steps: int, steps_per_epoch: int) -> int:
        """The last step of as many epochs as `max_steps` has. The steps so far may have been those of another number of
        ranks."""
        if not self.resumes:
            return max_steps
        place = self._loader.state_dict()
        updates = -(-place["batch"] // self._owner.args.gradient_accumulation_steps)
        in_epoch = steps_per_epoch if place["finished"] else updates
        return self.step + max(0, max_steps - (int(place["epoch"]) - 1) * steps_per_epoch - in_epoch)

    def first_epoch(self, max_steps: int, num_epochs: int, given: Any) -> int:
        """The trainer's number of the epoch to begin with. `given`: its `resume_from_checkpoint`."""
        if not self.resumes:
            if given is not None:
                raise UsageError(
                    f"train(resume_from_checkpoint={given!r}), and nothing in elastic_directory to go on from: the "
                    "trainer's own checkpoint is not loaded, for a run that goes on from it is not exact. Leave it "
                    "out, or load its weights into the model before"
                )
            return 0
        if given is not None:
            logger.warning("resume_from_checkpoint=%r is not looked at: going on at step %d", given, self.step)
        assert self.guard is not None
        place, progress = self._loader.state_dict(), self.progress
        is_over = progress.settle_end(self.step, max_steps)
        if progress.has_ended_epoch and is_over:
            return num_epochs
        if progress.has_ended_epoch and (place["finished"] or not progress.was_extended):
            return int(place["epoch"])
        self.resumed_epoch = int(place["epoch"]) - 1
        self.updates_done = -(-place["batch"] // self._owner.args.gradient_accumulation_steps)
        return self.resumed_epoch

    def reach_resumed_step(self) -> None:
        """The trainer is where the resumed run goes on; what its way there has changed is put back."""
        if self._is_on_the_way:
            self._is_on_the_way = False
            assert self.guard is not None
            self.guard.reach_resumed_step()
            self.progress.put_back()

    def close(self, error: BaseException | None) -> None:
        guard, self.guard = self.guard, None
        if guard is not None:
            self._owner.callback_handler.callbacks.remove(self._hook)
            guard.close(error)


class _Hook(TrainerCallback):
    """The first of the callbacks."""

    def __init__(self, training: _Training) -> None:
        self._training = training

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        if self._training.resumed_epoch is None:  # else its begin has been done before
            self._training.reach_resumed_step()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self._training.guard is not None:
            self._training.guard.poll()


# --- what is kept besides the model ---

_FIELDS = ("epoch", "global_step", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step",
           "best_model_checkpoint")  # fmt: skip
"""Of `TrainerState`: what the steps have made. The others come from the arguments."""
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")


class _Progress(Standing):
    """`TrainerState` with its log history, `TrainerControl`, callbacks' states, the sums of the logged loss."""

    follow_the_steps: ClassVar = (
        *("state", "history", "control", "sums", "grad_norm", "learning_rate"),
        *("is_cut", "has_ended_epoch", "max_steps", "accumulation"),
    )
    entries_in_words: ClassVar = {
        "history": "the log history",
        "sums": "the sums of the logged loss",
        "callbacks": "the states of callbacks",
    }

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = owner
        self._history = _History()
        self.has_ended_epoch = False
        """What follows the epoch's last step has been done."""
        self.was_extended = False
        """The run ended at its last step, and now it has more."""
        self._is_over = False
        self.grad_norm: Any = None
        self.learning_rate: Any = None

    def end_step(self, grad_norm: Any, learning_rate: Any) -> None:
        self.is_cut = self.has_ended_epoch = False
        self.grad_norm = grad_norm.detach().clone() if isinstance(grad_norm, torch.Tensor) else grad_norm
        self.learning_rate = learning_rate

    def now(self) -> dict[str, Any]:
        owner = self._owner
        state = owner.state
        return {
            "state": {name: _plain(getattr(state, name)) for name in _FIELDS},
            "history": self._history.text(state.log_history),
            "control": dict(vars(owner.control)),
            "callbacks": {name: _state_of(each) for name, each in _stateful(owner)},
            "sums": {name: getattr(owner, name) for name in _SUMS if hasattr(owner, name)},
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "has_ended_epoch": self.has_ended_epoch,
            "max_steps": state.max_steps,
            "accumulation": owner.args.gradient_accumulation_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        now = self._owner.args.gradient_accumulation_steps
        if state["accumulation"] != now:
            raise MismatchError(
                f"gradient_accumulation_steps was {state['accumulation']}, is {now}: use the value of the run to go on "
                "with, or start afresh in another elastic_directory"
            )
        super().load_state_dict(state)
        self.has_ended_epoch = state["has_ended_epoch"]
        self.grad_norm, self.learning_rate = state["grad_norm"], state["learning_rate"]
        self._load_fields(state)

    def _load_fields(self, state: Mapping[str, Any]) -> None:
        vars(self._owner.state).update(state["state"])
        self._owner.state.log_history = json.loads(state["history"])

    def settle_end(self, step: int, max_steps: int) -> bool:
        """Whether the training is over: by its number of steps, which may be another one now, or stopped early."""
        state = self.resumed
        assert state is not None
        had_ended = state["control"]["should_training_stop"]
        self.was_extended = bool(had_ended and step >= state["max_steps"] and step < max_steps)
        self._is_over = (bool(had_ended) and not self.was_extended) or step >= max_steps
        return self._is_over

    def put_back(self) -> None:
        """What the trainer has set to zero since the state was loaded. From here on it moves."""
        state, self.resumed = self.resumed, None
        if state is None:
            return
        owner = self._owner
        self._load_fields(state)
        vars(owner.control).update(state["control"], should_training_stop=self._is_over)
        for name, value in state["sums"].items():
            is_tensor = isinstance(value, torch.Tensor)
            setattr(owner, name, value.clone().to(owner.args.device) if is_tensor else value)
        for name, callback in _stateful(owner):
            if name in state["callbacks"]:
                _load(callback, state["callbacks"][name])


class _History:
    """The log history as text: it grows, and is copied at each boundary."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._text = "[]"

    def text(self, history: list[Any]) -> str:
        now = len(history), id(history[-1]) if history else 0
        if now != self._last:
            self._last, self._text = now, json.dumps(history, default=_plain)
        return self._text


def _plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python."""
    item: Callable[[], Any] | None = getattr(value, "item", None)
    return value if item is None else item()


def _stateful(owner: Any) -> Iterator[tuple[str, Any]]:
    """The callbacks that have a state, and names for them."""
    seen: Counter[str] = Counter()
    for callback in owner.callback_handler.callbacks:
        if _has_state(callback):
            kind = type(callback).__name__
            yield f"{kind}_{seen[kind]}", callback
            seen[kind] += 1


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState) or hasattr(callback, "load_state_dict")


def _state_of(callback: Any) -> Any:
    return callback.state() if isinstance(callback, ExportableState) else callback.state_dict()


def _load(callback: Any, state: Any) -> None:
    if not isinstance(callback, ExportableState):
        callback.load_state_dict(state)
    elif callback.state()["args"] == state["args"]:
        vars(callback).update(state["attributes"])
    else:  # as the trainer does it: arguments are for the constructor
        vars(callback).update(vars(type(callback).from_state(state)))


@contextmanager
def _without_skipping(shard: Any) -> Iterator[None]:
    """Inside, the trainer does not skip batches of `shard`, which goes on by itself."""
    skip: Any = trainer.skip_first_batches

    def skip_first_batches(loader: Any, *args: Any, **kwargs: Any) -> Any:
        return loader if loader is shard else skip(loader, *args, **kwargs)

    trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        trainer.skip_first_batches = skip


# --- what cannot be kept ---


def _check_version() -> None:
    methods = (
        *("_inner_training_loop", "_init_training_state", "_prepare_for_training", "set_initial_training_values"),
        *("_run_epoch", "_load_rng_state", "_maybe_log_save_evaluate", "_evaluate", "_finalize_training"),
    )
    arguments = {
        "_init_training_state": ("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "trial"),
        "_run_epoch": ("epochs_trained", "steps_trained_in_current_epoch", "resume_from_checkpoint", "start_time"),
        "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "ignore_keys_for_eval", "learning_rate"),
    }
    check_library("transformers", _TRIED, (Trainer, methods), (trainer, ["skip_first_batches"]))
    for name, names in arguments.items():
        has = SimpleNamespace(**inspect.signature(getattr(Trainer, name)).parameters, __name__=f"Trainer.{name}")
        check_library("transformers", _TRIED, (has, names))


def _check_trainer(owner: Any, trial: Any) -> None:
    """Raise UsageError for settings under which a resumed training would differ."""
    args, dataset = owner.args, owner.train_dataset
    optimizer = str(getattr(args.optim, "value", args.optim))
    refused = {
        "DeepSpeed": owner.is_deepspeed_enabled,
        "FSDP": owner.is_fsdp_enabled or bool(owner.is_fsdp_xla_enabled),
        "a model that is sharded when it is loaded": getattr(owner, "is_distributed_loading_by_transformers", False),
        "TrainingArguments(parallelism_config=...)": args.parallelism_config is not None,
        "a model on several devices (device_map)": owner.is_model_parallel,
        f"accelerate's {owner.accelerator.distributed_type.value}": owner.accelerator.distributed_type not in _KEPT,
    }
    for what, found in refused.items():
        if found:
            raise UsageError(
                f"{what} is not kept by this integration, which is for one device and DistributedDataParallel; use "
                "mindx_elastic.Guard in a loop of your own"
            )
    if args.n_gpu > 1:
        raise UsageError(
            f"the trainer would use DataParallel on {args.n_gpu} GPUs in one process: start one process for each, with "
            f"`mindx-elastic run --nproc-per-node {args.n_gpu}` (or torchrun)"
        )
    if trial is not None or owner.hp_search_backend is not None:
        raise UsageError("hyperparameter_search() trains several models, and a directory is for one; use Trainer")
    unkept = {
        "auto_find_batch_size": (args.auto_find_batch_size, "a run that is resumed may find another size; give one"),
        "ignore_data_skip": (args.ignore_data_skip, "the data goes on where it was, without skipping; leave it out"),
        "enable_jit_checkpoint": (
            args.enable_jit_checkpoint,
            "its handler would take SIGTERM; this integration saves at signals; leave it out",
        ),
        f"optim={optimizer!r}": (
            "layerwise" in optimizer or "lomo" in optimizer,
            "it updates inside of the backward, where no boundary is known; take one that steps after it",
        ),
        f"optim={optimizer!r} ": (
            "schedule_free" in optimizer,
            "it changes the weights for an evaluation and back, with rounding; take another one",
        ),
        f"train_sampling_strategy={args.train_sampling_strategy!r}": (
            args.train_sampling_strategy == "batch_rebalance"
            or (args.train_sampling_strategy == "group_by_length" and args.world_size > 1),
            "its order is not known to be the same again; use 'random' or 'sequential'",
        ),
    }
    for name, (found, why) in unkept.items():
        if found:
            raise UsageError(f"TrainingArguments({name.strip()}): {why}")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"train_dataset is a {type(dataset).__name__}, a stream without positions; give a data set with __len__ "
            "and __getitem__, or read it with mindx_elastic.data.from_loader in a loop of your own"
        )
