"""``mindx-elastic audit``: makes the last steps of a living job again beside it, and compares."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    RUN_DIR,
    JsonOption,
    RunDirArgument,
    agent_in_words,
    fail,
    find_runs,
    is_running,
    say,
    show,
)
from mindx_elastic.cli.prove import leave
from mindx_elastic.core.posix import answered_by

if TYPE_CHECKING:
    from mindx_elastic.prove.audit import Audit

__all__ = ["audit_command"]

_Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Make so many steps again, and up to the next snapshot.")]
_Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Without a step for so long the job stands.")]
_MayWrite = Annotated[
    list[str] | None,
    typer.Option(
        "--may-write", metavar="PATH", help="The script may write there, though the job does too; / allows all."
    ),
]


def audit_command(
    path: RunDirArgument = RUN_DIR,
    steps: _Steps = 20,
    may_write: _MayWrite = None,
    timeout: _Timeout = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Make steps of a living job again beside it, and compare them: has a bit flipped, is a kernel not deterministic?

    The job's ranks must be on this machine and keep snapshots (mindx-elastic run --snapshot-every). Two of them are
    copied while the job goes on. Its own command goes on from the first one in private folders, and
    must come to the second one. The result is an event of the run, which status shows.

    \b
    [bold]Exit code[/bold]
    0  every step is what it was
    1  a step differs, the same way in two audits: a flipped bit, or state that no resume gets back
    2  wrong usage, or a job that cannot be audited
    3  two audits differ from each other: the program is not deterministic; or no run was found
    4  nothing could be compared: the command fails in the audit
    130, 143  interrupted

    \b
    [bold]Examples[/bold]
    mindx-elastic audit mindx-run
    mindx-elastic audit --steps 100 --may-write logs
    17 * * * * nice -n 19 mindx-elastic audit /data/mindx-run     in a crontab: once an hour
    """
    runs_of_agents, path = find_runs(path), path.absolute()
    if not runs_of_agents:
        typer.echo(f"no agent has run in {path}")
        raise typer.Exit(EXIT_NOTHING)
    run = runs_of_agents[-1]
    if not (running := is_running(run)):
        fail(f"{agent_in_words(run, running)}: an audit needs a job that runs on this machine")
    from mindx_elastic.core.events import EVENTS_FILE
    from mindx_elastic.prove import audit as auditor
    from mindx_elastic.prove import confine
    from mindx_elastic.prove.runs import Runs

    job = auditor.find_job(run)
    writes = [os.path.abspath(each) for each in may_write or ()]
    if "/" not in writes and (why := confine.why_not()):
        fail(f"this kernel cannot keep the audit from writing where the job does ({why}): --may-write / allows it")
    if missing := [each for each in writes if not os.path.exists(each)]:
        fail(f"--may-write {missing[0]}: does not exist")
    os.chdir(job.folder)
    private: dict[str, Any] = {"environment": job.environment, "writes": None if "/" in writes else writes}
    with (
        answered_by(leave, (signal.SIGTERM, signal.SIGHUP)),
        Runs(job.command, fresh=True, timeout_s=timeout, **private) as runs,
    ):
        found = auditor.audit(job, runs, steps=steps, timeout_s=timeout)
    auditor.note(found, run, path / EVENTS_FILE if path.is_dir() else path)
    show(found.document(), as_json, lambda console, _: _print(console, found))
    raise typer.Exit(auditor.EXIT_CODES[found.outcome])


def _print(console: Console, found: Audit) -> None:
    say(console, found.words, style="bold green" if found.outcome == "verified" else "bold red")
    if found.reason not in found.words:
        say(console, f"  {found.reason}")
    say(console, *(f"  | {line}" for line in found.lines), style="dim")
