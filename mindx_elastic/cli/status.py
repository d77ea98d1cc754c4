"""``mindx-elastic status``: what happened to a job under the agent, and where its workers are now."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    RUN_DIR,
    JsonOption,
    RunDirArgument,
    find_cluster_recoveries,
    find_runs,
    human_age,
    make_console,
)
from mindx_elastic.cli.status_report import agent_line, make_report
from mindx_elastic.cli.watch import watch
from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.agent.run_log import AgentRun
    from mindx_elastic.rejoin.record import RecoveryRecord

__all__ = ["status_command", "top_command"]


def status_command(
    path: RunDirArgument = RUN_DIR,
    as_json: JsonOption = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Show it live, until the agent ends or Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="With --watch: between two looks.")
    ] = 1.0,
) -> None:
    """Show what happened to a job: its attempts, why each ended, what was saved and lost, how long it took.

    Times are seconds after the failure. While the agent runs on this machine, the current steps of its workers are
    shown too. If several agents have written to the same directory, the newest is shown.

    Recoveries in place (run --recover in-place) are listed below the attempts: who died, who stood in, and how many
    milliseconds after the failure each stage was reached. In a dynamic cluster give the checkpoint directory.

    With --watch: each rank's step and rate, and what would be lost now if every process were killed, or the machine
    lost. Into a pipe or a file it prints one frame after the other; with --json one document a line.

    \b
    [bold]Exit code[/bold]
    0  a run was found and shown, however it went
    2  wrong usage, for example no such RUN_DIR
    3  no agent has run there (no checkpoint is read: inspect does that)

    \b
    [bold]Examples[/bold]
    mindx-elastic status mindx-run
    mindx-elastic status mindx-run --json | jq '.totals'
    mindx-elastic status mindx-run --watch         the same: mindx-elastic top mindx-run
    """
    if watch_it:
        raise typer.Exit(watch(path, interval, as_json=as_json))
    runs = find_runs(path)
    recoveries = runs[-1].recoveries if runs else find_cluster_recoveries(path)
    report = make_report(path, runs, recoveries, now=time.time())
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(make_console(), report, runs, recoveries)
    if not runs and not recoveries:
        raise typer.Exit(EXIT_NOTHING)


def top_command(
    path: RunDirArgument = RUN_DIR,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Between two looks.")] = 1.0,
) -> None:
    """Show a job live: the ranks, their rates, and what would be lost now. The same as status --watch.

    Waits for the job where it has not been started yet.

    \b
    [bold]Exit code[/bold]
    0  the agent has ended, or Ctrl-C
    2  wrong usage, for example a RUN_DIR that cannot be read

    \b
    [bold]Examples[/bold]
    mindx-elastic top
    mindx-elastic top /data/job7/mindx-run --interval 5
    """
    raise typer.Exit(watch(path, interval, as_json=False))


def _print(console: Console, report: dict[str, Any], runs: list[AgentRun], recoveries: list[RecoveryRecord]) -> None:
    from mindx_elastic.agent.ledger import add_up, draw, totals_line

    if not runs:
        console.print(printable(f"no agent has run in {report['run_dir']}"), soft_wrap=True)
        if recoveries:
            console.print("the workers of a dynamic cluster have written here")
            _print_recoveries(console, recoveries)
        return
    run, agent = runs[-1], report["agent"]
    console.print(printable(agent_line(agent)), style="bold", soft_wrap=True)
    still_open = {True: "running", False: "no end recorded", None: "no end recorded yet"}[agent["running"]]
    console.print(draw(run.records, still_open=still_open, width=console.width), soft_wrap=False)
    if recoveries:
        _print_recoveries(console, recoveries)
    if report["workers"]:
        console.print()
        if report["pause"] is not None:
            console.print(_pause_line(report["pause"], report["workers"]), soft_wrap=True)
        console.print(_worker_table(report["workers"]))
        if save_every_s := next(filter(None, (worker["save_every_s"] for worker in report["workers"])), None):
            console.print(f"a periodic checkpoint every {human_age(save_every_s)}, by what it costs (auto)")
        if every := next(filter(None, (worker["snapshot_every"] for worker in report["workers"])), None):
            console.print(
                "a snapshot in memory at every step" if every == 1 else f"a snapshot in memory every {every} steps"
            )
    console.print()
    console.print(totals_line(add_up(run.records)), soft_wrap=True)
    for line in report["remarks"]:
        console.print(printable(line), soft_wrap=True)
    older = report["older_runs"]
    if older:
        console.print(f"{older} older run{'' if older == 1 else 's'} of an agent in the same file: not shown")


def _print_recoveries(console: Console, recoveries: list[RecoveryRecord]) -> None:
    from mindx_elastic.rejoin.record import as_lines

    console.print()
    for line in as_lines(recoveries):
        console.print(line, soft_wrap=True)


def _pause_line(pause: dict[str, Any], workers: list[dict[str, Any]]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pause["since"]))
    who = "every rank" if len(pause["ranks"]) == len(workers) else f"{len(pause['ranks'])} of {len(workers)} ranks"
    return f"paused at step {pause['step']} since {since} ({human_age(pause['seconds'])}): {who} of this machine"


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("rank", "pid", "now", "step", "last step"):
        table.add_column(name, justify="left" if name == "now" else "right", no_wrap=True)
    for worker in workers:
        phase = (worker["phase"] or "?") if worker["alive"] else "gone"
        idle = "-" if worker["since_boundary_s"] is None else f"{human_age(worker['since_boundary_s'])} ago"
        step = "-" if worker["step"] < 0 else str(worker["step"])
        cells = (str(worker["rank"]), str(worker["pid"]), phase, step, idle)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
