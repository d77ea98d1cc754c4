"""``mindx-elastic run``: torchrun with an agent that restarts the job without losing steps. ``mindx-elastic msrun``: a
dynamic cluster with the options of MindSpore's launcher."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = ["RUN_SETTINGS", "RunCommand", "msrun_command", "run_command"]

RUN_SETTINGS: dict[str, Any] = {"help_option_names": []}


class RunCommand(TyperCommand):
    """Passes every argument on: the launcher reads torchrun's options, the script those after its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Behind this one nothing is looked at. Without it a "--" of the user's would be taken out.
        return super().parse_args(ctx, ["--", *args])


def run_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS]", show_default=False)
    ] = None,
) -> None:
    """Start a training job as torchrun does, and restart it after a failure without losing steps.

    Takes torchrun's options and more; `mindx-elastic run --help` shows them all.
    """
    from mindx_elastic.agent.launcher import launch

    raise SystemExit(launch(arguments or []))


def msrun_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS]", show_default=False)
    ] = None,
) -> None:
    """Start the scheduler and this machine's workers of a dynamic cluster, as MindSpore's msrun does.

    `mindx-elastic msrun --help` shows the options.
    """
    from mindx_elastic.cluster.launch import main

    raise SystemExit(main(arguments or []))
