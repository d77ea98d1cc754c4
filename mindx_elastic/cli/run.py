"""``mindx-elastic run``: torchrun with an agent that keeps what can be kept."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["RUN_SETTINGS", "run_command"]

RUN_SETTINGS = {
    # Everything is the launcher's to read: its options are torchrun's, and what follows the script is the script's.
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


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
