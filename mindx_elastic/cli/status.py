"""``mindx-elastic status``: what happened to a job under the agent, and where its workers are now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    RUN_DIR,
    JsonOption,
    RunDirArgument,
    find_runs,
    say,
    show,
)
from mindx_elastic.cli.status_lines import status_lines
from mindx_elastic.cli.status_report import make_report

if TYPE_CHECKING:
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["status_command"]


def status_command(
    path: RunDirArgument = RUN_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job: its attempts, why each ended, what was saved and lost, how long it took.

    Times are seconds after the failure. While the agent runs on this machine, the steps and rates of its workers are
    shown too, and what would be lost now if all were killed, or the machine lost. If several agents have written to the
    same directory, the newest is shown.

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
    watch mindx-elastic status                      live
    """
    runs = find_runs(path)
    report = make_report(path, runs, now=time.time())
    show(report, as_json, lambda console, _: _print(console, path, report, runs))
    if not runs:
        raise typer.Exit(EXIT_NOTHING)


def _print(console: Console, path: Path, report: dict[str, Any], runs: list[AgentRun]) -> None:
    if not runs:
        say(console, f"no agent has run in {path}")
        return
    say(console, *status_lines(report, runs[-1], width=console.width))
    if older := report["older_runs"]:
        say(console, f"{older} older run{'' if older == 1 else 's'} of an agent in the same file: not shown")
