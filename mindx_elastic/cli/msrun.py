"""``mindx-elastic msrun``: a dynamic cluster with the options of MindSpore's launcher."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["msrun_command"]


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
