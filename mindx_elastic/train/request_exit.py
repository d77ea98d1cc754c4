"""`OnRequestExit`: leave gracefully on a signal or on a JSON flag file, with a checkpoint and an exported network."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.components import unwrap_module
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.events import logger
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.policy import ExitPolicy, final_name
from mindx_elastic.persist.storage import fsync_dir
from mindx_elastic.train.callbacks import Callback, CallbackParams, RunContext
from mindx_elastic.train.checkpoint import checked_file_name, directory_path
from mindx_elastic.train.step import evaluation_mode, move_batch, split_batch

__all__ = ["OnRequestExit", "export_network"]

_EXPORT_S = 5.0  # an export of a small network takes two to five seconds, most of it imports


class OnRequestExit(Callback):
    """Ends a training (or an evaluation) gracefully when a signal or a flag file asks for it, on any rank.

    One rank of each machine logs ``Graceful exit is triggered, stop training.``, and all stop at one common step.

    * `save_ckpt`: write ``{file_name}_train.safetensors``, from which the same command goes on (from an evaluation:
      ``{file_name}_eval.safetensors``, the weights only, never resumed from).
      A training that ends by itself leaves ``{file_name}-{epoch}_{step_in_epoch}_final.safetensors``, see
      ``MINDX_FINAL_SAVE``.
    * `save_mindir`: also export the network to ``{file_name}_train.pt2`` with `torch.export` (rank 0, for inputs of the
      last batch's shape), once the checkpoint is durable and if the grace period leaves time. A failure is a warning.
    * `directory`: where both go; with several ranks the checkpoint goes into ``rank_{r}/``.
    * `config_file`: the flag file, ``{"GracefulExit": 1}``. None: none is watched, unless ``MS_ENABLE_GRACEFUL_EXIT=1``
      is set: then ``graceful_exit.json`` in `directory`. ``MS_ENABLE_GRACEFUL_EXIT=0`` switches the watching off.
      A flag that has stopped this run is taken as done until it is written again.
    * `sig`: the signal; the exit code is then 128 + its number.
    * `exit_code`: exit code after the flag file; None: 75 (temporary failure), so that orchestrators restart the job.
    """

    def __init__(
        self,
        save_ckpt: bool = True,
        save_mindir: bool = True,
        file_name: str = "Net",  # MindSpore's name for it
        directory: str | os.PathLike[str] = "./",
        config_file: str | os.PathLike[str] | None = None,
        sig: int = signal.SIGTERM,
        *,
        exit_code: int | None = None,
    ) -> None:
        for name, value in (("save_ckpt", save_ckpt), ("save_mindir", save_mindir)):
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value!r} is a {type(value).__name__}; give True or False")
        if config_file is not None and not isinstance(config_file, (str, os.PathLike)):
            raise UsageError(f"config_file={config_file!r}; give the path of the JSON flag file, or None")
        self.save_ckpt, self.save_mindir = save_ckpt, save_mindir
        self.file_name = checked_file_name("file_name", file_name)
        self.directory = directory_path(directory)
        self.config_file = None if config_file is None else Path(config_file)
        self.sig = _signal_number(sig)
        self.exit_code = _exit_code(exit_code)
        self._params: CallbackParams | None = None

    def exit_policies(self) -> Sequence[ExitPolicy]:
        return [self._policy("train")]

    def eval_policy(self) -> ExitPolicy:
        """What `Model.eval` asks of the guard when no training is under way."""
        return self._policy("eval")

    def on_train_begin(self, run_context: RunContext) -> None:
        self._params = run_context.original_args()

    def flag_file(self) -> Path | None:
        """The flag file to watch, from `config_file` and ``MS_ENABLE_GRACEFUL_EXIT``."""
        enabled = Settings.from_env().graceful_exit
        if enabled is False:
            return None
        if self.config_file is None and enabled:
            return self.directory / "graceful_exit.json"
        return self.config_file

    def _policy(self, mode: str) -> ExitPolicy:
        flag = self.flag_file()
        name = f"{self.file_name}_{mode}.safetensors"
        return ExitPolicy(
            kind="request_exit" if mode == "train" else "eval",
            alarms=frozenset({"signal", "flag"}),
            name=lambda position: name,
            directory=self.directory,
            signals=(self.sig,),
            flag_file=flag,
            exit_codes={} if self.exit_code is None else {"flag": self.exit_code},
            prefix=self.file_name,
            save=self.save_ckpt,
            final_name=final_name(self.file_name) if self.save_ckpt and mode == "train" else None,
            after_save=self._export if self.save_mindir and mode == "train" else None,
        )

    def _export(self, deadline: float) -> None:
        """Training thread, the checkpoint is durable.

        If time runs out here the watcher ends the process; the checkpoint is safe.
        """
        params = self._params
        if params is None or params.get("rank", RankInfo.from_env().rank) != 0:
            return
        target = self.directory / f"{self.file_name}_train.pt2"
        left_s = deadline - time.monotonic()
        if left_s < _EXPORT_S:
            logger.warning("%s is not exported: only %.1f s are left of the grace period", target, max(0.0, left_s))
            return
        batch = params.get("train_dataset_element")
        if batch is None:
            logger.warning("%s is not exported: no batch was seen yet, so the shape of the input is unknown", target)
            return
        try:
            export_network(params.network, batch, target, takes_targets=params.get("loss_fn") is None)
        except Exception as error:  # torch.export may raise anything; the checkpoint is written already
            first_line = (str(error).strip().splitlines() or [""])[0][:300]
            logger.warning("the network could not be exported to %s: %s: %s", target, type(error).__name__, first_line)


def export_network(network: nn.Module, batch: Any, target: Path, *, takes_targets: bool = False) -> None:
    """Write `network`, in evaluation mode and for inputs shaped like those of `batch`, to `target` (a ``.pt2`` file).

    `target` appears whole or not at all. Raises what `torch.export` raises for networks that it cannot trace.
    """
    module = unwrap_module(network)
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    args, kwargs, _ = split_batch(move_batch(batch, device), takes_targets=takes_targets)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.tmp.pt2")
    try:
        with warnings.catch_warnings(), torch.no_grad(), evaluation_mode(module):
            warnings.simplefilter("ignore")
            program = torch.export.export(module, args, kwargs, strict=False)
            torch.export.save(program, temporary)
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, target)
        fsync_dir(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    logger.info("the network is exported to %s", target)


def _signal_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"sig={value!r} is a {type(value).__name__}; give a signal number such as signal.SIGTERM")
    if value not in signal.valid_signals() or value in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"sig={value!r} is not a signal that a process can catch; give one such as signal.SIGTERM")
    return int(value)


def _exit_code(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255):
        raise UsageError(f"exit_code={value!r}; give a whole number from 0 to 255, or None")
    return value
