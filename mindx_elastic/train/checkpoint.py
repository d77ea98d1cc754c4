"""The callbacks that save, and their `CheckpointConfig` with MindSpore's arguments and defaults.

`ExceptionCheckpoint` saves when the job is told to stop or fails, `ModelCheckpoint` while it runs. Each only gives
the guard a policy; the guard hears the alarm, captures the state and writes the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path

from torch import nn

from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import DEFAULT_SIGNALS
from mindx_elastic.guard.periodic import AUTO, PeriodicSave, SaveEvery
from mindx_elastic.guard.policy import ExitPolicy, PeriodicPolicy, breakpoint_policy
from mindx_elastic.train.callbacks import Callback, RunContext

__all__ = [
    "CheckpointConfig",
    "ExceptionCheckpoint",
    "ModelCheckpoint",
    "checked_file_name",
    "directory_path",
]

_ENC_MODES = ("AES-GCM", "AES-CBC", "SM4-CBC")
_APPEND_NAMES = ("epoch_num", "step_num")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, how many files to keep, what else to write into them. Raises UsageError for what cannot work.

    As in MindSpore, `save_checkpoint_steps` goes before `save_checkpoint_seconds` and `keep_checkpoint_max` before
    `keep_checkpoint_per_n_minutes`. One difference: seconds count when they are given and the steps are left at 1.
    """

    save_checkpoint_steps: int | str | None = 1
    """Save every so many optimizer updates; 0 or None: not by steps. ``"auto"``: as often as 1 % of
    the time pays for, by what a save is measured to cost, and once a minute at most."""
    save_checkpoint_seconds: float | None = 0
    """Save when so many seconds have passed since the last save; the ranks follow rank 0's clock."""
    keep_checkpoint_max: int | None = 5
    """Newest periodic files to keep; 0 or None: see the next one, or the newest only."""
    keep_checkpoint_per_n_minutes: float | None = 0
    """Keep one file for every so many minutes."""
    integrated_save: bool = True
    """Accepted; every rank writes its own whole file either way."""
    async_save: bool | str = False
    """True: the training thread copies the state to host memory and goes on, a thread writes it."""
    saved_network: nn.Module | None = None
    """None or the network that is trained; no other can be resumed from."""
    append_info: Sequence[object] | None = None
    """JSON-able dicts (and MindSpore's "epoch_num", "step_num") for the file's header."""
    enc_key: bytes | None = None
    """Must be None: encryption is not offered."""
    enc_mode: str = "AES-GCM"
    """Accepted; it has no effect without a key."""
    exception_save: bool = False
    """Also save the last boundary when an exception ends the training."""
    crc_check: bool = False
    """Accepted; every tensor carries a digest either way."""
    remove_redundancy: bool = False
    """True: in periodic saves and at the end of a training ranks of one machine that hold the same weights (DDP) write
    each part of them once, so that the files of all these ranks are needed to resume. A stop may divide them in two
    copies either way (see `guard.divided_saves`)."""
    map_param_inc: bool = False
    """Accepted; it concerns MindSpore's hash tables."""
    final_save: bool = True
    """Keep the last boundary of a training that ends by itself, where no periodic file has it; `ModelCheckpoint` alone
    saves the end as a periodic file either way."""

    def __post_init__(self) -> None:
        if isinstance(self.save_checkpoint_steps, str) and self.save_checkpoint_steps != AUTO:
            raise UsageError(
                f'save_checkpoint_steps={self.save_checkpoint_steps!r}; give a number of steps or "{AUTO}"'
            )
        for name in ("keep_checkpoint_max",) if self.adapts else ("save_checkpoint_steps", "keep_checkpoint_max"):
            _check_number(name, getattr(self, name), whole=True)
        for name in ("save_checkpoint_seconds", "keep_checkpoint_per_n_minutes"):
            _check_number(name, getattr(self, name), whole=False)
        for name in (field.name for field in fields(self) if field.type == "bool"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value!r} is a {type(value).__name__}; give True or False")
        if not isinstance(self.async_save, bool) and self.async_save not in ("thread", "process"):
            raise UsageError(f'async_save={self.async_save!r}; give True, False, or MindSpore\'s "thread" or "process"')
        if self.enc_key is not None:
            raise UsageError("enc_key: encryption is not offered; leave it out and use an encrypted disk or directory")
        if self.enc_mode not in _ENC_MODES:
            raise UsageError(f"enc_mode={self.enc_mode!r}; leave it out, encryption is not offered")
        if self.saved_network is not None and not isinstance(self.saved_network, nn.Module):
            raise UsageError(f"saved_network is a {type(self.saved_network).__name__}; give the network or None")
        _check_append_info(self.append_info)
        saves = self.steps or self.seconds or self.adapts
        if not (saves or self.keep_checkpoint_max or self.keep_checkpoint_per_n_minutes):
            raise UsageError(
                "save_checkpoint_steps, save_checkpoint_seconds, keep_checkpoint_max and "
                "keep_checkpoint_per_n_minutes cannot all be 0 or None; give at least one"
            )
        if self.save_checkpoint_seconds and not self.seconds:
            logger.warning(
                "save_checkpoint_seconds=%s is not used, because save_checkpoint_steps=%r is given too",
                self.save_checkpoint_seconds,
                self.save_checkpoint_steps,
            )

    @property
    def adapts(self) -> bool:
        """Whether the interval is measured."""
        return self.save_checkpoint_steps == AUTO

    @property
    def steps(self) -> int:
        """Updates between two periodic saves; 0: not by steps."""
        steps = self.save_checkpoint_steps or 0
        return 0 if self.seconds or isinstance(steps, str) else steps

    @property
    def seconds(self) -> float:
        """Seconds between two periodic saves; 0: not by a time that is given."""
        steps = self.save_checkpoint_steps or 0
        return 0.0 if isinstance(steps, str) or steps > 1 else float(self.save_checkpoint_seconds or 0)

    @property
    def keep_max(self) -> int | None:
        """Files to keep; None: by minutes."""
        return self.keep_checkpoint_max or (None if self.keep_checkpoint_per_n_minutes else 1)

    @property
    def keep_per_n_minutes(self) -> float | None:
        """Minutes for each of which one file is kept; None: by number."""
        return None if self.keep_checkpoint_max else self.keep_checkpoint_per_n_minutes or None

    @property
    def header_info(self) -> tuple[object, ...]:
        """`append_info` as it goes into the header; epoch and step stand there anyway."""
        return tuple(item for item in self.append_info or () if not isinstance(item, str))


class _CheckpointCallback(Callback):
    """What `ExceptionCheckpoint` and `ModelCheckpoint` have in common: a prefix, a folder and a config."""

    def __init__(self, prefix: str, directory: str | os.PathLike[str] | None, config: CheckpointConfig | None) -> None:
        if config is not None and not isinstance(config, CheckpointConfig):
            raise UsageError(f"config={config!r} is a {type(config).__name__}; give a CheckpointConfig or None")
        self.prefix = checked_file_name("prefix", prefix)
        self.directory = directory_path(directory)
        self.config = CheckpointConfig() if config is None else config

    def on_train_begin(self, run_context: RunContext) -> None:
        params, wanted = run_context.original_args(), self.config.saved_network
        if wanted is not None and wanted not in (params.network, params.train_network):
            raise UsageError(
                "saved_network is not the network that is trained, so its checkpoint could not be resumed; leave it "
                "out, and save other networks with torch.save or Guard(stateful=...)"
            )

    def _breakpoint(self, alarms: frozenset[str]) -> ExitPolicy:
        config = self.config
        return breakpoint_policy(
            self.prefix,
            self.directory,
            alarms,
            DEFAULT_SIGNALS,
            keeps_end=config.final_save,
            append_info=config.header_info,
            remove_redundancy=config.remove_redundancy,
        )


class ExceptionCheckpoint(_CheckpointCallback):
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
        super().__init__(prefix, directory, config)

    def exit_policies(self) -> Sequence[ExitPolicy]:
        return [self._breakpoint(frozenset({"signal", "exception", "fault", "peer", "request"}))]


class ModelCheckpoint(_CheckpointCallback):
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
        super().__init__(prefix, directory, config)
        config = self.config
        self.policy = PeriodicSave(
            self.prefix,
            self.directory,
            SaveEvery(steps=config.steps, seconds=config.seconds, adapts=config.adapts),
            asynchronous=bool(config.async_save),
            keep_max=config.keep_max,
            keep_per_n_minutes=config.keep_per_n_minutes,
            append_info=config.header_info,
            remove_redundancy=config.remove_redundancy,
        )

    def exit_policies(self) -> Sequence[ExitPolicy]:
        if not self.config.exception_save:
            return []
        return [self._breakpoint(frozenset({"exception", "fault", "peer"}))]

    def periodic_policies(self) -> Sequence[PeriodicPolicy]:
        return [self.policy]


def checked_file_name(argument: str, value: object) -> str:
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


def _check_number(name: str, value: object, *, whole: bool) -> None:
    kind = "a whole number" if whole else "a number"
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if whole else Real):
        raise UsageError(f"{name}={value!r} is a {type(value).__name__}; give {kind}, or 0 for none")
    if not 0 <= float(value) < math.inf:
        raise UsageError(f"{name}={value!r}; give {kind} that is not negative")


def _check_append_info(items: object) -> None:
    if items is None:
        return
    if not isinstance(items, (list, tuple)):
        raise UsageError(f"append_info={items!r}; give a list, for example [{{'epoch_num': 3}}]")
    for item in items:
        if isinstance(item, str) and item not in _APPEND_NAMES:
            raise UsageError(f"append_info holds {item!r}; a string must be one of {', '.join(_APPEND_NAMES)}")
        if not isinstance(item, (str, dict)):
            raise UsageError(f"append_info holds {item!r}; give dicts, for example {{'epoch_num': 3}}")
