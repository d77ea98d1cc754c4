"""``mindx-elastic status``: what happened to a job under the agent, where its workers are, and what it would lose now.
From its event log, its workers' pages, and what is in memory and on disk.

Where every process is killed, shared memory stays, and a start goes on from the newest snapshot there, or from disk if
that is newer. Where the machine is lost, disk alone counts. (Where one rank is killed, the others save their last
boundary, and nothing is lost; the same at a stop.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from mindx_elastic.cli.checkpoints import look_at
from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    JSON_SCHEMA,
    RUN_DIR,
    JsonOption,
    RunDirArgument,
    agent_in_words,
    find_runs,
    human_age,
    is_running,
    print_table,
    say,
    show,
)
from mindx_elastic.core.pace import pace_of
from mindx_elastic.core.printable import counted, printable
from mindx_elastic.core.status_page import Status, WorkerPhase, read_pages
from mindx_elastic.core.values import real, text

if TYPE_CHECKING:
    from mindx_elastic.agent.history import AgentRun, AttemptRecord, Totals

__all__ = ["status_command"]

_STYLES = {"training": "green", "between": "cyan", "starting": "cyan", "paused": "cyan", "stopping": "yellow"}
_MOST_ALARMS = 3
_RARE = ("paused_s", "stall_s", "in_place", "in_place_s", "in_place_steps_lost", "full_size", "why_fewer")
_KEYS = ("step", "directory", "memory_step", "disk", "lost_if_killed", "lost_if_machine_lost")


def status_command(
    path: RunDirArgument = RUN_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job: its attempts, why each ended, what was saved and lost, how long it took.

    Times are seconds after the failure. While the agent runs on this machine, the steps and rates of its workers are
    shown too, and what would be lost now if all were killed, or the machine lost. If several agents have written to the
    same directory, the newest is shown.

    Recoveries in place (run --recover in-place) are listed below the attempts: who died, who stood in, and how long it
    took.

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
    report = _report(path, runs)
    if runs and runs[-1].ended is None and report["agent"]["running"] is False:
        runs = find_runs(path)  # it may have ended after they were read
        report = _report(path, runs)
    show(report, as_json, lambda console, _: _print(console, report, runs))
    if not runs:
        raise typer.Exit(EXIT_NOTHING)


# --- the document ---


def _report(path: Path, runs: Sequence[AgentRun]) -> dict[str, Any]:
    """The JSON document; what is printed comes from it, so that the two cannot disagree."""
    from mindx_elastic.agent.history import add_up
    from mindx_elastic.agent.result import read_result
    from mindx_elastic.report.run_history import remarks_of_run

    report: dict[str, Any] = {"schema": JSON_SCHEMA, "run_dir": str(path), "older_runs": max(len(runs) - 1, 0)}
    report |= {"recoveries": [], "attempts": [], "workers": [], "remarks": []}
    report |= dict.fromkeys(("agent", "totals", "pause", "result", "audit"))
    if not runs:
        return report
    run, now = runs[-1], time.time()
    running = is_running(run)
    result = read_result(path if path.is_dir() else path.parent)
    agent = {
        "pid": run.pid,
        "host": run.host or None,
        "running": running,
        "started": run.started,
        "ended": run.ended,
        "outcome": run.outcome or None,
        "reason": run.reason or None,
        "command": run.command or None,
        "agent_dir": run.agent_dir or None,
        "age_s": None if run.started is None else round(now - run.started, 3),
    }
    is_here = run.agent_dir and running is not None and run.ended is None
    pages = read_pages(Path(run.agent_dir)) if is_here else {}
    workers = _workers(pages)
    resumed = [worker["resumed_step"] for worker in workers if worker["step"] >= 0]
    last = run.records[-1] if run.records else None
    if last is not None and last.resumed_step is None and resumed and not last.in_place:
        last.resumed_step = min(resumed)  # its record says so at its end; a recovery in place has changed the pages
    return {
        **report,
        "agent": agent,
        "recoveries": [asdict(record) for record in run.recoveries],
        "attempts": [{**_facts(record), "pause_s": record.pause_s} for record in run.records],
        "totals": _facts(add_up(run.records)),
        "workers": workers,
        "pause": _pause(workers),
        "result": None if result is None else asdict(result),
        "remarks": remarks_of_run(run),
        "audit": _alarm(run.audits[-1]) | {"outcome": text(run.audits[-1].get("outcome"))} if run.audits else None,
        "time": round(now, 3),
        "outlook": _outlook(pages),
        "alarms": [_alarm(event) for event in run.notable[-_MOST_ALARMS:]],
    }


def _alarm(event: dict[str, Any]) -> dict[str, Any]:
    return {"time": real(event.get("time")) or 0.0, "event": event["event"], "reason": text(event.get("reason"))}


def _facts(content: AttemptRecord | Totals) -> dict[str, Any]:
    """Pauses and recoveries in place only where there were any: most jobs have none."""
    return {name: value for name, value in asdict(content).items() if name not in _RARE or value}


def _workers(pages: Mapping[int, Status]) -> list[dict[str, Any]]:
    from mindx_elastic.core.posix import is_alive

    phases = {phase.value: phase.name.lower() for phase in WorkerPhase}
    now_ns, found = time.monotonic_ns(), []
    for rank, status in sorted(pages.items()):
        waits = status.phase == WorkerPhase.BETWEEN and status.paused_ns > 0  # by command (`mindx-elastic pause`)
        worker = {
            "rank": rank,
            "pid": status.pid,
            "alive": is_alive(status.pid, None),
            "phase": "paused" if waits else phases.get(status.phase),
            "step": status.step,
            "since_boundary_s": round((now_ns - status.boundary_ns) / 1e9, 3) if status.boundary_ns else None,
            "boundaries": status.boundaries,
            "steps_per_s": _rate(status),
            "wait_s": None if (pace := pace_of(rank, status)) is None else pace.middle / 1e6,
            "resumed_step": status.resumed_step,
            "saved_step": status.saved_step,
            "save_every_s": status.save_every_s or None,
            "snapshot_every": status.snapshot_every or None,
            "paused_step": status.paused_step if waits else None,
            "paused_s": round((now_ns - status.paused_ns) / 1e9, 3) if waits else None,
            "reason": status.reason or None,
        }
        found.append(worker)
    return found


def _rate(status: Status) -> float | None:
    """Since the first step of the process; None: it has passed no second boundary."""
    passed, took_ns = status.boundaries - 1, status.boundary_ns - status.first_boundary_ns
    return round(1e9 * passed / took_ns, 3) if passed > 0 and took_ns > 0 else None


def _pause(workers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where the ranks of this machine wait by command, and since when; None: none of them waits."""
    waiting = [worker for worker in workers if worker["paused_s"] is not None and worker["alive"]]
    if not waiting:
        return None
    step, seconds = max(worker["paused_step"] for worker in waiting), min(worker["paused_s"] for worker in waiting)
    since = round(time.time() - seconds, 3)
    return {"step": step, "since": since, "seconds": seconds, "ranks": [worker["rank"] for worker in waiting]}


def _outlook(pages: Mapping[int, Status]) -> dict[str, Any]:
    """What the job of these pages would lose now, for a document; None: not known, or there is none. Reads headers.

    * ``step``: newest boundary that a rank of this machine has passed; ``directory``: of its checkpoints
    * ``memory_step``: newest boundary from which a start could go on by memory
    * ``disk``: ``step``, ``created`` (unix seconds) and ``name`` of the newest complete step on disk
    * ``lost_if_killed``, ``lost_if_machine_lost``: steps
    """
    from mindx_elastic.memory.one_step import newest_kept

    found: dict[str, Any] = dict.fromkeys(_KEYS)
    passed = [page for page in pages.values() if page.step >= 0]
    if not passed or len({page.arena for page in passed}) > 1:  # the latter: ranks that are separate jobs
        return found
    first, step = passed[0], max(page.step for page in passed)
    kept_in_memory = newest_kept(Path(first.arena)) if first.arena else None
    memory = None if kept_in_memory is None else kept_in_memory[1]
    found |= {"step": step, "memory_step": memory}
    if not first.directory:
        return found
    saved = _newest(Path(first.directory), first.run_id)
    on_disk = 0 if saved is None else saved["step"]
    losses = {"lost_if_killed": max(on_disk, memory or 0), "lost_if_machine_lost": on_disk}
    found |= {name: max(0, step - kept) for name, kept in losses.items()}
    return {**found, "directory": first.directory, "disk": saved}


def _newest(directory: Path, run_id: str) -> dict[str, Any] | None:
    """The newest complete save of the run. A directory that cannot be read has none."""
    from mindx_elastic.errors import MindxError

    try:
        newest = look_at(directory).newest_complete(run_id or None)
    except (MindxError, OSError):
        return None
    if newest is None:
        return None
    created = max((entry.info.created for entry in newest.entries if entry.info is not None), default=0.0)
    name = newest.entries[0].path.name if newest.entries else ""
    return {"step": newest.moment[2], "created": created, "name": name}


# --- in words ---


def _print(console: Console, report: dict[str, Any], runs: Sequence[AgentRun]) -> None:
    from mindx_elastic.agent.history import render

    if not runs:
        say(console, f"no agent has run in {report['run_dir']}")
        return
    run, agent = runs[-1], report["agent"]
    age = "" if agent["age_s"] is None else f", begun {human_age(agent['age_s'])} ago"
    say(console, agent_in_words(run, agent["running"], age), style="bold")
    if agent["running"] is not False:
        _print_workers(console, report["workers"])
        say(console, *_pause_in_words(report), *_saves(report["workers"]), *_losses(report))
    if audit := report["audit"]:
        age = human_age(max(0.0, report["time"] - audit["time"]))
        style = "green" if audit["outcome"] == "verified" else "bold red"
        say(console, f"audited {age} ago: {audit['reason']}", style=style)
    still_open = {True: "running", False: "no end recorded", None: "no end recorded yet"}[agent["running"]]
    say(console, "", *render(run.records, run.recoveries, still_open=still_open, width=console.width).split("\n"))
    for alarm in report["alarms"]:
        clock = time.strftime("%H:%M:%S", time.localtime(alarm["time"]))
        say(console, f"{clock} {alarm['event']}: {alarm['reason']}", style="yellow")
    say(console, *report["remarks"])
    if older := report["older_runs"]:
        say(console, f"{counted(older, 'older run')} of an agent in the same file: not shown")


def _print_workers(console: Console, workers: Sequence[dict[str, Any]]) -> None:
    if not workers:
        say(console, "no worker of this machine runs at the moment")
        return
    print_table(
        console, ("rank", "now", "step", "steps/s", "waits", "last step", "pid", ""), map(_cells, workers), left="now|"
    )


def _cells(worker: dict[str, Any]) -> Sequence[str | Text]:
    phase, rate = (worker["phase"] or "?") if worker["alive"] else "gone", worker["steps_per_s"]
    return (
        str(worker["rank"]),
        Text(phase, style=_STYLES.get(phase, "red")),
        "-" if worker["step"] < 0 else str(worker["step"]),
        "-" if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}",
        "-" if worker["wait_s"] is None else f"{1000 * worker['wait_s']:.0f} ms",
        "-" if worker["since_boundary_s"] is None else f"{_short(worker['since_boundary_s'])} ago",
        str(worker["pid"]),
        Text(printable(worker["reason"] or "", 200), style="yellow"),
    )


def _pause_in_words(report: dict[str, Any]) -> Iterator[str]:
    if pause := report["pause"]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pause["since"]))
        of, waiting = len(report["workers"]), len(pause["ranks"])
        who = "every rank" if waiting == of else f"{waiting} of {of} ranks"
        yield f"paused at step {pause['step']} since {since} ({human_age(pause['seconds'])}): {who} of this machine"


def _saves(workers: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How often the job saves."""
    if seconds := next(filter(None, (worker["save_every_s"] for worker in workers)), None):
        yield f"a periodic checkpoint every {human_age(seconds)}, by what it costs (auto)"
    if every := next(filter(None, (worker["snapshot_every"] for worker in workers)), None):
        yield f"a snapshot in memory {'at every step' if every == 1 else f'every {every} steps'}"


def _losses(report: dict[str, Any]) -> Iterator[str | Text]:
    """What would be lost now, and what would stay."""
    found = report["outlook"]
    directory, disk, memory = found["directory"], found["disk"], found["memory_step"]
    if found["step"] is None:
        return
    if directory is None:
        yield "what would be lost: not known, as the job has no folder in shared memory (MINDX_ARENA_DIR)"
        return
    rate = min((worker["steps_per_s"] for worker in report["workers"] if worker["steps_per_s"]), default=None)
    on_disk = f"no checkpoint in {directory}"
    if disk is not None:
        age = human_age(max(0.0, report["time"] - disk["created"]))  # it may be saved while the report is made
        on_disk = f"checkpoint of step {disk['step']}, {age} old, {disk['name']}"
    in_memory = "no snapshot" if memory is None else f"snapshot of step {memory}"
    yield _loss("killed now", found["lost_if_killed"], rate, in_memory)
    yield _loss("machine lost now", found["lost_if_machine_lost"], rate, on_disk)


def _loss(what: str, steps: int, rate: float | None, why: str) -> Text:
    words = counted(steps, "step") + (f" ({_short(steps / rate)})" if steps and rate else "")
    return Text.assemble(f"{what}: ", (f"{words} lost", "bold" if steps else "green"), f"; {printable(why)}")


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else human_age(seconds)
