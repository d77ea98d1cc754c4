"""``mindx-elastic status``: what happened to a job under the agent, and where its workers are now."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    JSON_SCHEMA,
    RunDirArgument,
    find_cluster_recoveries,
    find_runs,
    human_age,
    is_running,
    make_console,
    printable,
)
from mindx_elastic.core.status_page import Status, WorkerPhase, read_page

if TYPE_CHECKING:
    from mindx_elastic.agent.ledger import AttemptRecord, Totals
    from mindx_elastic.agent.run_log import AgentRun
    from mindx_elastic.rejoin.record import RecoveryRecord

__all__ = ["status_command"]

_RARE = ("paused_s", "in_place", "in_place_s", "in_place_steps_lost", "full_size", "why_fewer")


def status_command(
    path: RunDirArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Show what happened to a job: its attempts, why each ended, what was saved and lost, how long it took.

    Times are seconds after the failure. While the agent runs on this machine, the current steps of its workers are
    shown too. If several agents have written to the same directory, the newest is shown.

    Recoveries in place (run --recover in-place) are listed below the attempts: who died, who stood in, and how many
    milliseconds after the failure each stage was reached. In a dynamic cluster give the checkpoint directory.

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
    runs = find_runs(path)
    recoveries = runs[-1].recoveries if runs else find_cluster_recoveries(path)
    report = _report(path, runs, recoveries, now=time.time())
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(make_console(), report, runs, recoveries)
    if not runs and not recoveries:
        raise typer.Exit(EXIT_NOTHING)


def _report(path: Path, runs: list[AgentRun], recoveries: list[RecoveryRecord], *, now: float) -> dict[str, Any]:
    """The JSON document; what is printed comes from it, so that the two cannot disagree."""
    from mindx_elastic.agent.ledger import add_up
    from mindx_elastic.agent.result import read_result

    report: dict[str, Any] = {"schema": JSON_SCHEMA, "run_dir": str(path), "older_runs": max(len(runs) - 1, 0)}
    report["recoveries"] = [asdict(record) for record in recoveries]
    if not runs:
        return {**report, "agent": None, "attempts": [], "totals": None, "workers": [], "pause": None, "result": None}
    run = runs[-1]
    running = is_running(run)
    result = read_result(path if path.is_dir() else path.parent)
    agent = {
        "pid": run.pid,
        "host": run.host or None,
        "running": running,
        "started": run.started,
        "ended": run.ended,
        "outcome": run.outcome or None,
        "agent_dir": run.agent_dir or None,
        "age_s": None if run.started is None else round(now - run.started, 3),
    }
    attempts = [{**_facts(record), "pause_s": record.pause_s} for record in run.records]
    workers = _workers(Path(run.agent_dir)) if run.agent_dir and running is not None and run.ended is None else []
    return {
        **report,
        "agent": agent,
        "attempts": attempts,
        "totals": _facts(add_up(run.records)),
        "workers": workers,
        "pause": _pause(workers),
        "result": None if result is None else asdict(result),
    }


def _facts(content: AttemptRecord | Totals) -> dict[str, Any]:
    """Pauses and recoveries in place only where there were any: most jobs have none."""
    return {name: value for name, value in asdict(content).items() if name not in _RARE or value}


def _workers(agent_dir: Path) -> list[dict[str, Any]]:
    """What the workers' pages say now, by rank."""
    from mindx_elastic.core.posix import is_alive

    phases = {phase.value: phase.name.lower() for phase in WorkerPhase}
    found = []
    for page in agent_dir.glob("rank_*.page"):
        rank, status = page.stem.removeprefix("rank_"), read_page(page)
        if not rank.isdecimal() or status is None:
            continue
        idle_s = (time.monotonic_ns() - status.boundary_ns) / 1e9 if status.boundary_ns else None
        worker = {
            "rank": int(rank),
            "pid": status.pid,
            "alive": is_alive(status.pid, None),
            "phase": "paused" if _waits(status) else phases.get(status.phase),
            "step": status.step,
            "since_boundary_s": None if idle_s is None else round(idle_s, 3),
            "boundaries": status.boundaries,
            "resumed_step": status.resumed_step,
            "saved_step": status.saved_step,
            "save_every_s": status.save_every_s or None,
            "paused_step": status.paused_step if _waits(status) else None,
            "paused_s": round((time.monotonic_ns() - status.paused_ns) / 1e9, 3) if _waits(status) else None,
            "reason": status.reason or None,
        }
        found.append(worker)
    return sorted(found, key=lambda worker: int(str(worker["rank"])))


def _waits(status: Status) -> bool:
    """Whether the rank waits by command (`mindx-elastic pause`)."""
    return status.phase == WorkerPhase.BETWEEN and status.paused_ns > 0


def _pause(workers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where the ranks of this machine wait by command, and since when; None: none of them waits."""
    waiting = [worker for worker in workers if worker["paused_s"] is not None and worker["alive"]]
    if not waiting:
        return None
    step, seconds = max(worker["paused_step"] for worker in waiting), min(worker["paused_s"] for worker in waiting)
    since = round(time.time() - seconds, 3)
    return {"step": step, "since": since, "seconds": seconds, "ranks": [worker["rank"] for worker in waiting]}


def _print(console: Console, report: dict[str, Any], runs: list[AgentRun], recoveries: list[RecoveryRecord]) -> None:
    from mindx_elastic.agent.ledger import add_up, draw, totals_line

    if not runs:
        console.print(printable(f"no agent has run in {report['run_dir']}"), soft_wrap=True)
        if recoveries:
            console.print("the workers of a dynamic cluster have written here")
            _print_recoveries(console, recoveries)
        return
    run, agent = runs[-1], report["agent"]
    console.print(printable(_agent_line(agent)), style="bold", soft_wrap=True)
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
    console.print()
    console.print(totals_line(add_up(run.records)), soft_wrap=True)
    older = report["older_runs"]
    if older:
        console.print(f"{older} older run{'' if older == 1 else 's'} of an agent in the same file: not shown")


def _print_recoveries(console: Console, recoveries: list[RecoveryRecord]) -> None:
    from mindx_elastic.rejoin.record import as_lines

    console.print()
    for line in as_lines(recoveries):
        console.print(line, soft_wrap=True)


def _agent_line(agent: dict[str, Any]) -> str:
    name = "agent" if agent["pid"] is None else f"agent {agent['pid']}"
    name += f" on {agent['host']}" if agent["host"] else ""
    age = "" if agent["age_s"] is None else f", begun {human_age(agent['age_s'])} ago"
    if agent["ended"] is not None:
        outcome = f": {agent['outcome']}" if agent["outcome"] else ""
        return f"{name} has ended{age}{outcome}"
    if agent["running"] is None:
        return f"{name} has not recorded its end{age}; whether it runs can be seen on that machine only"
    if agent["running"]:
        return f"{name} runs{age}"
    return f"{name} is gone without recording its end: it was killed{age}; start the same command again to go on"


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
