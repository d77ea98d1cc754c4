"""``mindx-elastic run``: torchrun with an agent that restarts the job without losing steps."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = ["RUN_SETTINGS", "RunCommand", "run_command"]

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
