"""The hooks of user code in a training or an evaluation, under MindSpore's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeAlias

from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy

__all__ = [
    "Callback",
    "CallbackList",
    "CallbackParams",
    "Callbacks",
    "RunContext",
    "as_callback_list",
    "keeps_state",
    "needs_epoch",
]


class CallbackParams(dict[str, Any]):
    """What a callback may read; ``params.cur_step_num``, ``params["cur_step_num"]`` and ``params.get("cur_step_num")``.

    In training: cur_epoch_num (from 1), cur_step_num (optimizer updates since the very first start, from 1),
    cur_step_in_epoch (from 1), batch_num (updates in an epoch; 0: unknown), epoch_num (epochs to do), net_outputs (the
    loss, a detached tensor on its device: reading its value waits for the device), network (as given), train_network
    (as called, perhaps inside DDP), optimizer, loss_fn, lr_scheduler, train_dataset, train_dataset_element (the last
    batch), mode ("train" or "eval"), list_callback, device_number (ranks), rank, resumed_from_step, model.

    In an evaluation: the same without epochs, and `metrics` (a dict of results) from on_eval_epoch_end on.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise AttributeError(f"there is no {name!r} here; there are {', '.join(self.keys())}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class RunContext:
    """Handed to every hook. Training thread only."""

    def __init__(self, original_args: CallbackParams) -> None:
        self._original_args = original_args
        self._stop_requested = False

    def original_args(self) -> CallbackParams:
        """The live parameters; see `CallbackParams`."""
        return self._original_args

    def request_stop(self) -> None:
        """End the training normally after this step: on_train_end runs, the exit code stays 0.

        With several ranks call it on all of them at the same step. If only some do, the job still stops, as a
        whole, one or two steps later.
        """
        self._stop_requested = True

    def get_stop_requested(self) -> bool:
        """Whether a callback has called `request_stop`."""
        return self._stop_requested


class Callback:
    """Base of all callbacks: override what you need. Hooks run in the training thread, in the order of the list.

    State that must survive a restart goes through `state_dict` and `load_state_dict`. It is copied after
    ``on_train_step_end``, every step, so keep it small. On a resume it is loaded before ``on_train_begin`` and once
    more after it, so that a hook that sets counters to their start values does no harm.
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Once, before the first step of this process (also of a resumed one)."""

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Before the first batch of an epoch; not again when a process resumes in its middle."""

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """The batch is there, nothing is computed yet."""

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Right after the boundary: optimizer, scaler and scheduler have stepped.

        If a hook raises, or the deadline cuts it off, all of them run again for this step after the resume.
        """

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """After the last step of an epoch.

        If the job stops before this hook has ended, it runs again after the resume.
        """

    def on_train_end(self, run_context: RunContext) -> None:
        """Training is finished. Does not run when the job was told to stop and will be resumed."""

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Before an evaluation."""

    def on_eval_epoch_begin(self, run_context: RunContext) -> None:
        """Right after `on_eval_begin`: an evaluation has one epoch."""

    def on_eval_step_begin(self, run_context: RunContext) -> None:
        """Before a batch of an evaluation."""

    def on_eval_step_end(self, run_context: RunContext) -> None:
        """After a batch; net_outputs is (loss or None, outputs, targets)."""

    def on_eval_epoch_end(self, run_context: RunContext) -> None:
        """All batches are done, `metrics` is there."""

    def on_eval_end(self, run_context: RunContext) -> None:
        """After an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: plain nested values and tensors. Empty: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def exit_policies(self) -> Sequence[ExitPolicy]:
        """The checkpoints that this callback wants when the job stops or fails."""
        return ()

    def periodic_policies(self) -> Sequence[PeriodicPolicy]:
        """The checkpoints that this callback wants while the job runs."""
        return ()


Callbacks: TypeAlias = "Callback | Iterable[Callback] | None"


class CallbackList(Callback):
    """Calls several callbacks in order, and keeps their states apart: by class name and a count within the class."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)
        self._loaded: dict[str, Any] | None = None

    def call(self, hook: str, run_context: RunContext) -> None:
        """Run one hook, by name, of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(run_context)
        if hook == "on_train_begin" and self._loaded is not None:
            self._distribute(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        states = {key: callback.state_dict() for key, callback in self._keyed()}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load each callback's state. A new callback keeps its start values, a missing one's state is dropped, with a
        warning."""
        self._loaded = state
        present = {key for key, callback in self._keyed() if callback.state_dict()}
        gone, new = sorted(set(state) - {key for key, _ in self._keyed()}), sorted(present - set(state))
        if gone or new:
            parts = [f"no longer there: {', '.join(gone)}"] if gone else []
            parts += [f"new, with start values: {', '.join(new)}"] if new else []
            logger.warning("the callbacks differ from those of the checkpoint (%s)", "; ".join(parts))
        self._distribute(state)

    def _distribute(self, state: Mapping[str, Any]) -> None:
        for key, callback in self._keyed():
            if key in state:
                callback.load_state_dict(state[key])

    def _keyed(self) -> list[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        keyed = []
        for callback in self.callbacks:
            name = type(callback).__name__
            keyed.append((f"{name}.{seen[name]}", callback))
            seen[name] += 1
        return keyed


def keeps_state(callback: Callback) -> bool:
    """Whether the callback says by itself what of it must survive a restart."""
    return type(callback).state_dict is not Callback.state_dict


def needs_epoch(callback: Callback) -> bool:
    """Whether ``on_train_epoch_end`` may need what the hooks of the epoch's steps have set, and no one keeps that."""
    kind, hooks = type(callback), ("on_train_step_begin", "on_train_step_end")
    at_end, ours = kind.on_train_epoch_end, Callback.__module__.partition(".")[0]
    if keeps_state(callback) or not isinstance(at_end, FunctionType) or at_end.__module__.partition(".")[0] == ours:
        return False
    return any(getattr(kind, hook) is not getattr(Callback, hook) for hook in hooks)


def as_callback_list(callbacks: Callbacks) -> list[Callback]:
    """One callback, several or none as a list. Raises UsageError for anything else, a class included."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Callback):
        return [callbacks]
    if not isinstance(callbacks, Iterable):
        raise UsageError(f"callbacks={callbacks!r}: give a Callback, a list of them, or None")
    found = list(callbacks)
    for item in found:
        if isinstance(item, type):
            raise UsageError(f"callbacks holds the class {item.__name__}; make an object of it: {item.__name__}(...)")
        if not isinstance(item, Callback):
            raise UsageError(
                f"callbacks holds {item!r}, which is not a Callback; derive it from mindx_elastic.train.Callback"
            )
    return found
