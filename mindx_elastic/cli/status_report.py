"""What is known of a job under the agent, as one JSON document: from its event log, its workers' pages, and what is in
memory and on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindx_elastic.cli.common import JSON_SCHEMA, is_running
from mindx_elastic.cli.possible_loss import expect
from mindx_elastic.core.status_page import Status, WorkerPhase, read_pages

if TYPE_CHECKING:
    from mindx_elastic.agent.ledger import AttemptRecord, Totals
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["make_report"]

_MOST_ALARMS = 3
_RARE = ("paused_s", "stall_s", "in_place", "in_place_s", "in_place_steps_lost", "full_size", "why_fewer")


def make_report(path: Path, runs: Sequence[AgentRun]) -> dict[str, Any]:
    """The JSON document; what is printed comes from it, so that the two cannot disagree."""
    from mindx_elastic.agent.ledger import add_up
    from mindx_elastic.agent.result import read_result
    from mindx_elastic.report.run_history import remarks_of_run

    report: dict[str, Any] = {"schema": JSON_SCHEMA, "run_dir": str(path), "older_runs": max(len(runs) - 1, 0)}
    report |= {"recoveries": [], "attempts": [], "workers": [], "remarks": []}
    report |= dict.fromkeys(("agent", "totals", "pause", "result"))
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
    if run.records and run.records[-1].resumed_step is None and any(worker["step"] >= 0 for worker in workers):
        run.records[-1].resumed_step = min(
            worker["resumed_step"] for worker in workers
        )  # its record says so at its end
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
        "time": round(now, 3),
        "outlook": expect(pages),
        "alarms": [_alarm(event) for event in run.notable[-_MOST_ALARMS:]],
    }


def _alarm(event: dict[str, Any]) -> dict[str, Any]:
    from mindx_elastic.core.values import real, text

    return {"time": real(event.get("time")) or 0.0, "event": event["event"], "reason": text(event.get("reason"))}


def _facts(content: AttemptRecord | Totals) -> dict[str, Any]:
    """Pauses and recoveries in place only where there were any: most jobs have none."""
    return {name: value for name, value in asdict(content).items() if name not in _RARE or value}


def _workers(pages: Mapping[int, Status]) -> list[dict[str, Any]]:
    from mindx_elastic.core.posix import is_alive

    phases = {phase.value: phase.name.lower() for phase in WorkerPhase}
    found = []
    for rank, status in sorted(pages.items()):
        idle_s = (time.monotonic_ns() - status.boundary_ns) / 1e9 if status.boundary_ns else None
        worker = {
            "rank": rank,
            "pid": status.pid,
            "alive": is_alive(status.pid, None),
            "phase": "paused" if _waits(status) else phases.get(status.phase),
            "step": status.step,
            "since_boundary_s": None if idle_s is None else round(idle_s, 3),
            "boundaries": status.boundaries,
            "steps_per_s": _rate(status),
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


def _rate(status: Status) -> float | None:
    """Since the first step of the process; None: it has passed no second boundary."""
    passed, took_ns = status.boundaries - 1, status.boundary_ns - status.first_boundary_ns
    return round(1e9 * passed / took_ns, 3) if passed > 0 and took_ns > 0 else None


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
