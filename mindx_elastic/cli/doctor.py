"""``mindx-elastic doctor``: what of this machine would cost a job its steps, before the job is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mindx_elastic.cli.common import EXIT_BAD, JSON_SCHEMA, JsonOption, fail, parse_size, say, show
from mindx_elastic.core.printable import human_size, printable

if TYPE_CHECKING:
    from mindx_elastic.doctor.examine import Examination

__all__ = ["doctor_command"]

_STYLES = {"good": "green", "not visible": "cyan", "warning": "yellow", "problem": "bold red"}
_WIDEST = 120
_TRY_IT = (
    "Whether the job itself comes back, a first stop tries: timeout -s TERM 5m COMMAND; then COMMAND again, which says "
    "whether its first step is verified"
)


def doctor_command(
    directory: Annotated[
        Path,
        typer.Argument(metavar="[DIR]", help="The checkpoint directory of the job; it need not exist.", readable=False),
    ] = Path(),
    grace: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Grace period of the job.", show_default="MINDX_GRACE_S, or 30"),
    ] = None,
    state: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Weights and optimizer on this machine, counted once where several ranks hold the same: 18GiB.",
            show_default="from the newest checkpoint in DIR",
        ),
    ] = "",
    nproc_per_node: Annotated[
        int,
        typer.Option("--nproc-per-node", min=0, metavar="N", help="Ranks on this machine; 0: as in the checkpoint."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine before the first run: would a stop be saved in time, and what else is wrong?

    Disk speed and room against the grace period, shared memory against the state, owners and permissions, the platform
    as far as it can be seen, and the variables. Each finding has its remedy.

    It writes to DIR for a second, as a save does, and leaves nothing there. No network, no process group: run it once
    on each machine, as the user who will train, with the environment of the job.

    \b
    [bold]Exit code[/bold]
    0  no problem, though there may be warnings
    1  a problem: the job will not run, or will lose what it need not lose
    2  wrong usage

    \b
    [bold]Examples[/bold]
    mindx-elastic doctor ckpt --grace 30 --state 18GiB
    mindx-elastic doctor ckpt --nproc-per-node 8       the state's size comes from the newest checkpoint there
    mindx-elastic doctor ckpt --json | jq '.findings[] | select(.level == "problem")'
    """
    from mindx_elastic.config import MIN_GRACE_S

    if grace is not None and not MIN_GRACE_S <= grace <= 86400:
        fail(f"--grace {grace:g}: give {MIN_GRACE_S:g} to 86400 seconds")
    from mindx_elastic.doctor.examine import examine
    from mindx_elastic.doctor.finding import Level, worst

    nbytes = parse_size(state) if state else None
    found = examine(directory, os.environ, grace_s=grace, state_bytes=nbytes, ranks=nproc_per_node)
    show(_report(directory, found), as_json, lambda console, _: _print(console, directory, found))
    if worst(found.findings) is Level.PROBLEM:
        raise typer.Exit(EXIT_BAD)


def _report(directory: Path, found: Examination) -> dict[str, Any]:
    from mindx_elastic.doctor.finding import worst

    return {
        "schema": JSON_SCHEMA,
        "directory": str(directory),
        "grace_s": found.grace_s,
        "state_bytes": None if found.state is None else found.state.nbytes,
        "ranks": None if found.state is None else found.state.ranks,
        "worst": worst(found.findings).value,
        "findings": [
            {"check": each.check, "level": each.level.value, "text": each.text, "remedy": each.remedy or None}
            for each in found.findings
        ],
    }


def _print(console: Console, directory: Path, found: Examination) -> None:
    from mindx_elastic.doctor.finding import Level

    size = "size of the state not known"
    if found.state is not None:
        ranks = f"{found.state.ranks} rank{'' if found.state.ranks == 1 else 's'} here"
        size = f"a state of {human_size(found.state.nbytes)} ({found.state.source}), {ranks}"
    title = f"{directory.absolute()}: {found.grace_s:g} s of grace, {size}"
    say(console, title, style="bold")
    grid = Table.grid(*(Column(overflow="fold") for _ in range(3)), padding=(0, 1))
    for finding in found.findings:
        level = finding.level.value
        remedy = f"\n-> {printable(finding.remedy)}" if finding.remedy else ""
        grid.add_row(Text(level, style=_STYLES[level]), finding.check, Text(f"{printable(finding.text)}{remedy}"))
    console.print(grid, width=min(console.width, _WIDEST))
    counts = [(sum(finding.level is level for finding in found.findings), level.value) for level in Level]
    say(console, ", ".join(f"{number} {name}" for number, name in counts if number))
    say(console, _TRY_IT, style="dim")
