"""``mindx-elastic run``: torchrun with an agent that keeps what can be kept."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

__all__ = ["RUN_SETTINGS", "RunCommand", "run_command"]

RUN_SETTINGS: dict[str, Any] = {"help_option_names": []}


class RunCommand(TyperCommand):
    """Everything is the launcher's to read: its options are torchrun's, and what follows the script is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Behind this one nothing is looked at. Without it a "--" of the user's would be taken out.
        return super().parse_args(ctx, ["--", *args])


def run_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS]", show_default=False)
    ] = None,
) -> None:
    """Start a training job as torchrun does, and keep it alive: restarts without losing steps.

    Takes torchrun's options and more; `mindx-elastic run --help` shows them all.
    """
    from mindx_elastic.agent.launcher import launch

    raise SystemExit(launch(arguments or []))
