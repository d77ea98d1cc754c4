"""``mindx-elastic doctor``: what of this machine would cost a job its steps, before the job is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from mindx_elastic.cli.common import EXIT_BAD, make_console, parse_size, say
from mindx_elastic.core.printable import human_size, printable

__all__ = ["doctor_command"]

_STYLES = {"good": "green", "warning": "yellow", "problem": "bold red"}
_REHEARSE = (
    "Whether the job itself comes back, its first run here tries: mindx-elastic run --rehearse 20, or MINDX_REHEARSE=20"
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
        ),
    ] = "",
    nproc_per_node: Annotated[
        int,
        typer.Option("--nproc-per-node", min=1, metavar="N", help="Ranks here that each hold all of it (DDP)."),
    ] = 1,
) -> None:
    """Look at this machine before the first run: would a stop be saved in time, and what else is wrong?

    Disk speed and room against the grace period, shared memory against the state, and variables that nothing reads.
    Each finding has its remedy. What a start refuses by itself is not looked at.

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
    mindx-elastic doctor ckpt --state 4GiB --nproc-per-node 8
    """
    from mindx_elastic.config import MemorySettings, SavingSettings, Settings
    from mindx_elastic.doctor.places import look_at_directory, look_at_first_process, look_at_memory
    from mindx_elastic.doctor.saving import HeldState, Level
    from mindx_elastic.doctor.variables import judge_variables

    settings = Settings.from_env() if grace is None else Settings.from_env().with_grace(grace)
    held = HeldState(parse_size(state), nproc_per_node) if state else None
    found = [
        *look_at_directory(directory, held, settings.grace_s, page_cache=SavingSettings.from_env().page_cache),
        look_at_memory(MemorySettings.from_env().base, held),
        *look_at_first_process(),
        *judge_variables(os.environ),
    ]
    console = make_console()
    size = "size of the state not known (--state)" if held is None else f"a state of {human_size(held.nbytes)}"
    say(console, f"{directory.absolute()}: {settings.grace_s:g} s of grace, {size}", style="bold")
    for finding in found:
        level = finding.level.value
        say(console, Text.assemble((f"{level:<8}", _STYLES[level]), f"{finding.check:<14} {printable(finding.text)}"))
        say(console, *([f"{'':<22} -> {finding.remedy}"] if finding.remedy else []))
    say(console, _REHEARSE, style="dim")
    if any(finding.level is Level.PROBLEM for finding in found):
        raise typer.Exit(EXIT_BAD)
