"""MindSpore's names for MindIO's fault tolerance: `TFTRegister` and `OptTFTWrapper`, as its documentation uses them.

::

    export MS_ENABLE_TFT='{TTP:1}'

    optimizer = OptTFTWrapper(optimizer)
    model = Model(network, loss_fn, optimizer)
    model.train(90, loader, callbacks=[TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/")])

In MindIO a controller on one rank watches the others and the wrapper reports each update to it; when the controller's
rank is killed nothing is saved. Here every rank saves what it holds by itself, so the controller's arguments have no
effect, and the wrapper, which has nothing to report, is the optimizer itself: the guard watches every one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from mindx_elastic.config import RankInfo, RejoinSettings, TftSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.data.position import whole_number
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import DEFAULT_SIGNALS
from mindx_elastic.guard.policy import ExitPolicy, final_name
from mindx_elastic.platforms.tft_tree import settle_tft_file, tft_path
from mindx_elastic.train.callbacks import Callback
from mindx_elastic.train.checkpoint import directory_path

__all__ = ["OptTFTWrapper", "TFTRegister"]

_PORTS = range(1024, 65536)
_INSTEAD = {
    "ARF": "mindx-elastic run --recover in-place",
    "RSC": "mindx-elastic run, which reads reset.json and starts the ranks again",
    "TRE": 'Guard(odd="back") in a loop of your own',
    "TSP": "mindx-elastic pause, and resume",
}
"""What stands here for other switches."""


class TFTRegister(Callback):
    """Saves the last boundary when the job dies: an exception, a killed rank, a fault report, a signal, a request.

    The files are ``tft_saved_checkpoints-step_{step}/rank_{r}/ttp_rank_{r}-{epoch}_{step_in_epoch}.safetensors`` in
    `ckpt_save_path`. The same command goes on from the newest step found there; no epoch and no step is to be typed.
    When a rank is gone, the others save only if they hold the same state (data parallel training); else the save is
    refused and the job ends with an exit code that is not 0.

    * `ctrl_rank_id`, `ctrl_ip`, `ctrl_port`: MindIO's controller. Checked and without effect: nothing depends on that
      rank, no port is opened, and rank 0 may be killed like any other.
    * `ckpt_save_path`: the folder for the trees.

    In a loop of your own, without `Model`, give its wish to the guard:
    ``Guard(policies=[*TFTRegister(0, "127.0.0.1", 30051, path).exit_policies()], directory=path, ...)``.

    Raises UsageError (a ValueError) for wrong arguments, and without ``MS_ENABLE_TFT='{TTP:1}'``.
    """

    def __init__(self, ctrl_rank_id: int, ctrl_ip: str, ctrl_port: int, ckpt_save_path: str | os.PathLike[str]) -> None:
        _require_ttp("TFTRegister")
        whole_number("ctrl_rank_id", ctrl_rank_id, low=0)
        if not isinstance(ctrl_ip, str) or not ctrl_ip:
            raise UsageError(f'ctrl_ip={ctrl_ip!r}; give an IP address or a host name, for example "127.0.0.1"')
        if whole_number("ctrl_port", ctrl_port, low=_PORTS.start) not in _PORTS:
            raise UsageError(f"ctrl_port={ctrl_port!r}; give a port number, {_PORTS.start} to {_PORTS.stop - 1}")
        if ckpt_save_path is None:
            raise UsageError("ckpt_save_path=None; give the folder for the checkpoints")
        self.ctrl_rank_id, self.ctrl_ip, self.ctrl_port = ctrl_rank_id, ctrl_ip, ctrl_port
        self.directory = directory_path(ckpt_save_path, "ckpt_save_path")

    @property
    def ckpt_save_path(self) -> Path:
        """The folder for the trees."""
        return self.directory

    def exit_policies(self) -> Sequence[ExitPolicy]:
        return [
            ExitPolicy(
                kind="ttp",
                alarms=frozenset({"exception", "peer", "fault", "signal", "request"}),
                name=lambda position: _place(Path(), position, RankInfo.from_env()).name,
                directory=self.directory,
                signals=DEFAULT_SIGNALS,
                place=_place,
                finish=_finish,
                needs_replica=True,
                final_name=final_name("ttp"),
            )
        ]


def OptTFTWrapper(opt: torch.optim.Optimizer) -> torch.optim.Optimizer:  # noqa: N802 - MindSpore's name
    """Gives `opt` back: the guard watches every optimizer, and checkpoints with and without this are the same.

    Raises UsageError (a ValueError) without ``MS_ENABLE_TFT='{TTP:1}'``, and TypeError (a UsageError too) for anything
    but an optimizer.
    """
    if not isinstance(opt, torch.optim.Optimizer):
        raise _NoOptimizer(f"opt is a {type(opt).__name__}; give the torch.optim.Optimizer to wrap")
    _require_ttp("OptTFTWrapper")
    return opt


class _NoOptimizer(UsageError, TypeError):
    """As MindSpore, which raises TypeError."""


def _require_ttp(who: str) -> None:
    settings = TftSettings.from_env()
    if not settings.ttp:
        raise UsageError(f"{who} is switched on by the environment: export MS_ENABLE_TFT='{{TTP:1}}' before the start")
    is_on = {"TTP", "ARF"} if RejoinSettings.from_env().in_place else {"TTP"}
    others = sorted(settings.enabled - is_on)
    if others and RankInfo.from_env().rank == 0:
        said = [f"{name} is {_INSTEAD[name]}" for name in others if name in _INSTEAD]
        if unknown := [name for name in others if name not in _INSTEAD]:
            said.append(f"nothing is done for {', '.join(unknown)}")
        logger.warning("MS_ENABLE_TFT: TTP is on; switched on otherwise here: %s", "; ".join(said))


def _place(root: Path, position: Position, ranks: RankInfo) -> Path:
    return tft_path(
        root, step=position.step, rank=ranks.rank, epoch=position.epoch, step_in_epoch=position.step_in_epoch
    )


def _finish(path: Path, ranks: RankInfo, gone: Callable[[], Collection[int]], timeout_s: float) -> Path:
    return settle_tft_file(path, world_size=ranks.world_size, gone=gone, timeout_s=timeout_s)
