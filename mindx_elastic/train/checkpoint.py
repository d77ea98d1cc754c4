"""The callbacks that save: `ExceptionCheckpoint` when the job must die, `ModelCheckpoint` while it lives.

Each only states a wish (a policy); the guard hears, captures and writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import DEFAULT_SIGNALS
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy, breakpoint_name, final_name
from mindx_elastic.train.callbacks import Callback, RunContext
from mindx_elastic.train.clock import SaveClock
from mindx_elastic.train.config import CheckpointConfig

__all__ = [
    "CheckpointConfig",
    "ExceptionCheckpoint",
    "ModelCheckpoint",
    "PeriodicSave",
    "SavingCallback",
    "directory_path",
    "file_name",
]


class SavingCallback(Callback):
    """A callback with policies that another rank can take over (see `train.policies`)."""

    directory: Path

    def spec(self) -> dict[str, Any]:
        """Keyword arguments, fit for JSON, that make the same callback on another rank."""
        raise NotImplementedError


class ExceptionCheckpoint(SavingCallback):
    """Saves the last boundary when the job is told to stop or fails, so that the same command goes on from there.

    Answers SIGTERM, SIGINT, SIGUSR1, an exception, a fault report, another rank's stop and `Guard.request_stop`.

    * `prefix`: the file is ``{prefix}-{epoch}_{step_in_epoch}_breakpoint.safetensors``.
    * `directory`: where it goes, with several ranks inside ``rank_{r}/``; None: the working directory.
    * `config`: a `CheckpointConfig`, of which `append_info` and `final_save` count here.

    When the training ends by itself, its last boundary goes into ``{prefix}-{epoch}_{step_in_epoch}_final.safetensors``
    (one is kept), unless a `ModelCheckpoint` has just saved it or ``final_save=False``: the same command then only does
    what comes after the last step.
    """

    def __init__(
        self,
        prefix: str = "ckpt",
        directory: str | os.PathLike[str] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        self.prefix = file_name("prefix", prefix)
        self.directory = directory_path(directory)
        self.config = _config(config)

    def exit_policies(self) -> Sequence[ExitPolicy]:
        alarms = frozenset({"signal", "exception", "fault", "peer", "request"})
        return [_breakpoint(self.prefix, self.directory, self.config, alarms)]

    def on_train_begin(self, run_context: RunContext) -> None:
        _check_saved_network(self.config, run_context)

    def spec(self) -> dict[str, Any]:
        return {
            "prefix": self.prefix, "directory": os.path.abspath(self.directory), "config": self.config.to_json()
        }  # fmt: skip


class ModelCheckpoint(SavingCallback):
    """Saves periodically, and once more at the end of the training.

    * `prefix`: the file is ``{prefix}-{epoch}_{step_in_epoch}.safetensors``.
    * `directory`: where it goes, with several ranks inside ``rank_{r}/``; None: the working directory.
    * `config`: when to save and what to keep; with ``exception_save=True`` an exception saves the last boundary too.

    A save that fails is reported and does not end the training.
    """

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | os.PathLike[str] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        self.prefix = file_name("prefix", prefix)
        self.directory = directory_path(directory)
        self.config = _config(config)
        self.policy = PeriodicSave(self.prefix, self.directory, self.config)
        if self.config.remove_redundancy:
            logger.warning("remove_redundancy=True: every rank still writes a full copy, which costs space, not safety")

    def exit_policies(self) -> Sequence[ExitPolicy]:
        if not self.config.exception_save:
            return []
        return [_breakpoint(self.prefix, self.directory, self.config, frozenset({"exception", "fault", "peer"}))]

    def periodic_policies(self) -> Sequence[PeriodicPolicy]:
        return [self.policy]

    def on_train_begin(self, run_context: RunContext) -> None:
        _check_saved_network(self.config, run_context)

    def spec(self) -> dict[str, Any]:
        return {
            "prefix": self.prefix, "directory": os.path.abspath(self.directory), "config": self.config.to_json()
        }  # fmt: skip


class PeriodicSave:
    """The periodic policy of a `ModelCheckpoint`. By steps a pure function of the position, by seconds see `clock`."""

    def __init__(self, prefix: str, directory: Path, config: CheckpointConfig) -> None:
        self.prefix, self.directory, self.config = prefix, directory, config
        self.asynchronous = bool(config.async_save)
        self.keep_max = config.keep_max
        self.keep_per_n_minutes = config.keep_per_n_minutes
        self.append_info: Sequence[object] = config.header_info
        self.newest: Position | None = None
        """The boundary that was found due last."""
        self._clock: SaveClock | None = None

    def begin(self, clock: SaveClock | None) -> None:
        """Start of a training; `clock` decides when the config counts seconds."""
        self.newest, self._clock = None, clock

    def due(self, position: Position) -> bool:
        if self.config.seconds:
            due = self._clock is not None and self._clock.due(position.step)
        else:
            due = bool(self.config.steps) and position.step % self.config.steps == 0
        if due:
            self.newest = position
        return due

    def name(self, position: Position) -> str:
        return f"{self.prefix}-{position.epoch}_{position.step_in_epoch}.safetensors"


def file_name(argument: str, value: object) -> str:
    """A non-empty string that is one plain component of a path. Raises UsageError."""
    if not isinstance(value, str):
        raise UsageError(f"{argument}={value!r} is a {type(value).__name__}; give a string")
    if not value or value.startswith(".") or any(c == "/" or ord(c) < 32 for c in value) or len(value) > 100:
        raise UsageError(
            f"{argument}={value!r} cannot begin a file name; give 1 to 100 characters without '/' and control "
            "characters, not starting with a dot. A folder goes into directory="
        )
    return value


def directory_path(value: object, argument: str = "directory") -> Path:
    """The path of a folder; None is the working directory. Raises UsageError."""
    if value is None:
        return Path()
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UsageError(f"{argument}={value!r}; give a path, or None for the working directory")
    path = os.fspath(value)
    if not isinstance(path, str) or "\0" in path:
        raise UsageError(f"{argument}={value!r} is not a usable path; give a string")
    return Path(path)


def _config(value: object) -> CheckpointConfig:
    if value is None:
        return CheckpointConfig()
    if not isinstance(value, CheckpointConfig):
        raise UsageError(f"config={value!r} is a {type(value).__name__}; give a CheckpointConfig or None")
    return value


def _breakpoint(prefix: str, directory: Path, config: CheckpointConfig, alarms: frozenset[str]) -> ExitPolicy:
    return ExitPolicy(
        kind="breakpoint",
        alarms=alarms,
        name=breakpoint_name(prefix),
        directory=directory,
        signals=DEFAULT_SIGNALS if "signal" in alarms else (),
        append_info=config.header_info,
        final_name=final_name(prefix) if config.final_save else None,
        prefix=prefix,
    )


def _check_saved_network(config: CheckpointConfig, run_context: RunContext) -> None:
    params = run_context.original_args()
    if config.saved_network is not None and config.saved_network not in (
        params.network,
        params.train_network,
    ):
        raise UsageError(
            "saved_network is not the network that is trained, so its checkpoint could not be resumed; leave it out, "
            "and save other networks with torch.save or Guard(stateful=...)"
        )
