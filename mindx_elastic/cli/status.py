"""``mindx-elastic status``: what happened to a job under the agent, and where its workers are now."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    RUN_DIR,
    JsonOption,
    RunDirArgument,
    make_console,
)
from mindx_elastic.cli.status_report import make_report
from mindx_elastic.cli.watch import Look, print_frame, watch
from mindx_elastic.core.printable import printable

__all__ = ["status_command", "top_command"]


def status_command(
    path: RunDirArgument = RUN_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job: its attempts, why each ended, what was saved and lost, how long it took.

    Times are seconds after the failure. While the agent runs on this machine, the current steps of its workers are
    shown too. If several agents have written to the same directory, the newest is shown.

    Recoveries in place (run --recover in-place) are listed below the attempts: who died, who stood in, and how many
    milliseconds after the failure each stage was reached.

    \b
    [bold]Exit code[/bold]
    0  a run was found and shown, however it went
    2  wrong usage, for example no such RUN_DIR
    3  no agent has run there (no checkpoint is read: inspect does that)

    \b
    [bold]Examples[/bold]
    mindx-elastic status mindx-run
    mindx-elastic status mindx-run --json | jq '.totals'
    """
    look = Look(path)
    report = look.take()
    if report is not None and not as_json:
        print_frame(make_console(), report, look.run, with_clock=False)
        if older := report["older_runs"]:
            typer.echo(f"{older} older run{'' if older == 1 else 's'} of an agent in the same file: not shown")
    elif report is not None:
        typer.echo(json.dumps(report, indent=2))
    else:
        if as_json:
            typer.echo(json.dumps(make_report(path, [], now=time.time()), indent=2))
        else:
            typer.echo(printable(f"no agent has run in {path}"))
        raise typer.Exit(EXIT_NOTHING)


def top_command(
    path: RunDirArgument = RUN_DIR,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Between two looks.")] = 1.0,
) -> None:
    """Show a job live: each rank's step and rate, and what would be lost now if all were killed, or the machine lost.

    Waits for the job where it has not been started yet. Into a pipe or a file it prints one frame.

    \b
    [bold]Exit code[/bold]
    0  the agent has ended, the frame was printed, or Ctrl-C
    2  wrong usage, for example a RUN_DIR that cannot be read

    \b
    [bold]Examples[/bold]
    mindx-elastic top
    mindx-elastic top /data/job7/mindx-run --interval 5
    """
    watch(path, interval)
