"""What is known of a job under the agent, as one JSON document: from its event log and its workers' pages."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindx_elastic.cli.common import JSON_SCHEMA, human_age, is_running
from mindx_elastic.core.status_page import Status, WorkerPhase, read_page

if TYPE_CHECKING:
    from mindx_elastic.agent.ledger import AttemptRecord, Totals
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["agent_line", "make_report", "read_pages"]

_RARE = ("paused_s", "stall_s", "in_place", "in_place_s", "in_place_steps_lost", "full_size", "why_fewer")


def make_report(path: Path, runs: list[AgentRun], *, now: float) -> dict[str, Any]:
    """The JSON document; what is printed comes from it, so that the two cannot disagree."""
    from mindx_elastic.agent.ledger import add_up
    from mindx_elastic.agent.result import read_result
    from mindx_elastic.report.run_history import remarks_of_run

    report: dict[str, Any] = {"schema": JSON_SCHEMA, "run_dir": str(path), "older_runs": max(len(runs) - 1, 0)}
    report |= {"recoveries": [], "attempts": [], "workers": [], "remarks": []}
    report |= dict.fromkeys(("agent", "totals", "pause", "result"))
    if not runs:
        return report
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
        "reason": run.reason or None,
        "command": run.command or None,
        "agent_dir": run.agent_dir or None,
        "age_s": None if run.started is None else round(now - run.started, 3),
    }
    attempts = [{**_facts(record), "pause_s": record.pause_s} for record in run.records]
    workers = _workers(Path(run.agent_dir)) if run.agent_dir and running is not None and run.ended is None else []
    return {
        **report,
        "agent": agent,
        "recoveries": [asdict(record) for record in run.recoveries],
        "attempts": attempts,
        "totals": _facts(add_up(run.records)),
        "workers": workers,
        "pause": _pause(workers),
        "result": None if result is None else asdict(result),
        "remarks": remarks_of_run(run),
    }


def _facts(content: AttemptRecord | Totals) -> dict[str, Any]:
    """Pauses and recoveries in place only where there were any: most jobs have none."""
    return {name: value for name, value in asdict(content).items() if name not in _RARE or value}


def _workers(agent_dir: Path) -> list[dict[str, Any]]:
    """What the workers' pages say now, by rank."""
    from mindx_elastic.core.posix import is_alive

    phases = {phase.value: phase.name.lower() for phase in WorkerPhase}
    found = []
    for rank, status in sorted(read_pages(agent_dir).items()):
        idle_s = (time.monotonic_ns() - status.boundary_ns) / 1e9 if status.boundary_ns else None
        worker = {
            "rank": rank,
            "pid": status.pid,
            "alive": is_alive(status.pid, None),
            "phase": "paused" if _waits(status) else phases.get(status.phase),
            "step": status.step,
            "since_boundary_s": None if idle_s is None else round(idle_s, 3),
            "boundaries": status.boundaries,
            "resumed_step": status.resumed_step,
            "saved_step": status.saved_step,
            "save_every_s": status.save_every_s or None,
            "snapshot_every": status.snapshot_every or None,
            "paused_step": status.paused_step if _waits(status) else None,
            "paused_s": round((time.monotonic_ns() - status.paused_ns) / 1e9, 3) if _waits(status) else None,
            "reason": status.reason or None,
        }
        found.append(worker)
    return found


def read_pages(agent_dir: Path) -> dict[int, Status]:
    """What the workers' pages in an agent's folder say now, by rank; those that cannot be read are left out."""
    found = {}
    for page in agent_dir.glob("rank_*.page"):
        rank, status = page.stem.removeprefix("rank_"), read_page(page)
        if rank.isdecimal() and status is not None:
            found[int(rank)] = status
    return found


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


def agent_line(agent: dict[str, Any]) -> str:
    """One line on the agent; `agent` is that of the document."""
    name = "agent" if agent["pid"] is None else f"agent {agent['pid']}"
    name += f" on {agent['host']}" if agent["host"] else ""
    age = "" if agent["age_s"] is None else f", begun {human_age(agent['age_s'])} ago"
    if agent["ended"] is not None:
        outcome = f": {agent['outcome']}" if agent["outcome"] else ""
        if outcome.startswith(": failed") and agent["reason"]:
            code = outcome.rpartition(", ")[2]  # which the reason may begin with, too
            outcome += f": {agent['reason'].removeprefix(f'{code}: ')}"
        return f"{name} has ended{age}{outcome}"
    if agent["running"] is None:
        return f"{name} has not recorded its end{age}; whether it runs can be seen on that machine only"
    if agent["running"]:
        return f"{name} runs{age}"
    return f"{name} is gone without recording its end: it was killed{age}; start the same command again to go on"
