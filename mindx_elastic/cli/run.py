"""``mindx-elastic run``: torchrun with an agent that restarts the job without losing steps. ``mindx-elastic msrun``: a
dynamic cluster with the options of MindSpore's launcher.

Both command lines are read by argparse, which torchrun's options come from.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = ["RUN_SETTINGS", "LauncherCommand", "msrun_command", "run_command"]

RUN_SETTINGS: dict[str, Any] = {"help_option_names": []}
_Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS]", show_default=False)]


class LauncherCommand(TyperCommand):
    """Passes every argument on: the launcher reads the options, the script those after its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # After this one nothing is looked at. Without it a "--" of the user's would be taken out.
        return super().parse_args(ctx, ["--", *args])


def _about(command: Callable[..., None]) -> str:
    """Its docstring as plain text."""
    text = cleandoc(command.__doc__ or "")
    return text.replace("\b\n", "").replace("[bold]", "").replace("[/bold]", "").replace("%", "%%")


def run_command(arguments: _Words = None) -> None:
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
    from mindx_elastic.agent.launcher import launch

    raise SystemExit(launch(arguments or [], about=_about(run_command)))


def msrun_command(arguments: _Words = None) -> None:
    """Start the scheduler and this machine's workers of a dynamic cluster, as MindSpore's msrun does.

    \b
    [bold]Examples[/bold]
    mindx-elastic msrun --worker_num=8 --local_worker_num=8 --join=True train.py
    """
    from mindx_elastic.cluster.msrun import main

    raise SystemExit(main(arguments or [], about=_about(msrun_command)))
