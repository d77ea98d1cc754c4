"""``mindx-elastic run``: torchrun with an agent that restarts the job without losing steps. ``mindx-elastic msrun``: a
dynamic cluster with the options of MindSpore's launcher.

Both command lines are read by argparse, which torchrun's options come from. Imports nothing before it is called.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from inspect import cleandoc

__all__ = ["LAUNCHERS"]


def _about(command: Callable[..., None]) -> str:
    """Its docstring as plain text."""
    text = cleandoc(command.__doc__ or "")
    return text.replace("\b\n", "").replace("[bold]", "").replace("[/bold]", "").replace("%", "%%")


def _run(arguments: list[str]) -> None:
    """Start a training job as torchrun does, and restart it after a failure without losing steps.

    A killed worker, a hanging one or a lost agent costs no more steps than it must. A script without mindx_elastic runs
    as under torchrun; one with a Guard, Model or our callbacks saves its last step whatever happens, and goes on from
    it after the restart. torchrun's options mean the same; only without --max-restarts there are 3 restarts, not 0.

    \b
    [bold]Exit code[/bold]
    0    finished
    75   worth another start: fault report, flag file, nodes that cannot meet
    143  a graceful stop on SIGTERM
    2    wrong usage
    The script's own code when it fails, 128 + number when a signal killed it.

    \b
    [bold]Examples[/bold]
    mindx-elastic run --nproc-per-node 2 train.py --epochs 3
    mindx-elastic run --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400 train.py
    mindx-elastic run --nproc-per-node 2 --recover in-place --snapshot-every 1 train.py
    """
    gc.disable()  # what imports make stays: to look for garbage in it is an eighth of their time
    from mindx_elastic.agent.launcher import launch

    gc.freeze()
    gc.enable()
    raise SystemExit(launch(arguments, about=_about(_run)))


def _msrun(arguments: list[str]) -> None:
    """Start the scheduler and this machine's workers of a dynamic cluster, as MindSpore's msrun does.

    \b
    [bold]Examples[/bold]
    mindx-elastic msrun --worker_num=8 --local_worker_num=8 --join=True train.py
    """
    from mindx_elastic.cluster.msrun import main

    raise SystemExit(main(arguments, about=_about(_msrun)))


LAUNCHERS: dict[str, Callable[[list[str]], None]] = {"run": _run, "msrun": _msrun}
"""The commands by their names. Each gets all words after its own, and ends with SystemExit."""
