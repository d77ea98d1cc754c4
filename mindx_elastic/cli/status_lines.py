"""What `status` shows a person: a document in, lines out. Reads nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mindx_elastic.cli.common import human_age
from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["status_lines"]

_STYLES = {"training": "green", "between": "cyan", "starting": "cyan", "paused": "cyan", "stopping": "yellow"}


def status_lines(report: dict[str, Any], run: AgentRun, *, width: int) -> list[Text]:
    """`run`: whose `report` it is. `width`: of the table of attempts."""
    lines = [Text(printable(_agent_line(report["agent"])), style="bold")]
    if report["agent"]["running"] is not False:
        lines += _ranks(report["workers"])
    lines += [*_pause(report), *_saves(report), *_outlook(report), *_attempts(report, run, width), *_alarms(report)]
    return lines + [Text(printable(line)) for line in report["remarks"]]


def _agent_line(agent: dict[str, Any]) -> str:
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


def _ranks(workers: Sequence[dict[str, Any]]) -> list[Text]:
    if not workers:
        return [Text("no worker of this machine runs at the moment")]
    head = Text(f"{'rank':>5} {'now':<9} {'step':>8} {'steps/s':>8}  last step   pid", style="bold")
    return [head, *map(_rank, workers)]


def _rank(worker: dict[str, Any]) -> Text:
    phase = (worker["phase"] or "?") if worker["alive"] else "gone"
    step = "-" if worker["step"] < 0 else str(worker["step"])
    rate = worker["steps_per_s"]
    speed = "-" if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"
    idle = "-" if worker["since_boundary_s"] is None else f"{_short(worker['since_boundary_s'])} ago"
    line = Text(f"{worker['rank']:>5} ")
    line.append(f"{printable(phase):<9}", style=_STYLES.get(phase, "red"))
    line.append(f" {step:>8} {speed:>8}  {idle:<10} {worker['pid']:>5}")
    if worker["reason"]:
        line.append(f"  {printable(worker['reason'], 200)}", style="yellow")
    return line


def _outlook(report: dict[str, Any]) -> list[Text]:
    """What would be lost now, and what would stay."""
    found = report["outlook"]
    step, directory, disk = found["step"], found["directory"], found["disk"]
    if step is None:
        return []
    if directory is None:
        return [Text("what would be lost: not known, as the job has no folder in shared memory (MINDX_ARENA_DIR)")]
    rates = [worker["steps_per_s"] for worker in report["workers"] if worker["steps_per_s"]]
    rate = min(rates, default=None)
    memory, killed, lost = found["memory_step"], found["lost_if_killed"], found["lost_if_machine_lost"]
    in_memory = "no snapshot" if memory is None else f"snapshot of step {memory}"
    on_disk = f"no checkpoint in {printable(directory)}"
    if disk is not None:
        age = human_age(max(0.0, report["time"] - disk["created"]))  # it may be saved while the report is made
        on_disk = f"checkpoint of step {disk['step']}, {age} old, {printable(disk['name'])}"
    return [
        _loss("killed now", killed, rate, in_memory),
        _loss("machine lost now", lost, rate, on_disk),
    ]


def _loss(what: str, steps: int, rate: float | None, why: str) -> Text:
    words = f"{steps} step{'' if steps == 1 else 's'}"
    if steps and rate:
        words += f" ({_short(steps / rate)})"
    line = Text(f"{what}: ")
    line.append(f"{words} lost", style="bold" if steps else "green")
    return line.append(f"; {why}")


def _attempts(report: dict[str, Any], run: AgentRun, width: int) -> list[Text]:
    from mindx_elastic.agent.ledger import render

    records, workers = run.records, report["workers"]
    if records and records[-1].resumed_step is None and any(worker["step"] >= 0 for worker in workers):
        records[-1].resumed_step = min(worker["resumed_step"] for worker in workers)  # its record says so at its end
    still_open = {True: "running", False: "no end recorded", None: "no end recorded yet"}[report["agent"]["running"]]
    table = render(records, run.recoveries, still_open=still_open, width=width)
    return [Text(""), *map(Text, table.split("\n"))]


def _pause(report: dict[str, Any]) -> list[Text]:
    pause, workers = report["pause"], report["workers"]
    if pause is None:
        return []
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pause["since"]))
    who = "every rank" if len(pause["ranks"]) == len(workers) else f"{len(pause['ranks'])} of {len(workers)} ranks"
    return [
        Text(f"paused at step {pause['step']} since {since} ({human_age(pause['seconds'])}): {who} of this machine")
    ]


def _saves(report: dict[str, Any]) -> list[Text]:
    """How often the job saves."""
    lines = []
    if seconds := next(filter(None, (worker["save_every_s"] for worker in report["workers"])), None):
        lines.append(Text(f"a periodic checkpoint every {human_age(seconds)}, by what it costs (auto)"))
    if every := next(filter(None, (worker["snapshot_every"] for worker in report["workers"])), None):
        lines.append(Text(f"a snapshot in memory {'at every step' if every == 1 else f'every {every} steps'}"))
    return lines


def _alarms(report: dict[str, Any]) -> list[Text]:
    found = []
    for alarm in report["alarms"]:
        clock = time.strftime("%H:%M:%S", time.localtime(alarm["time"]))
        found.append(Text(printable(f"{clock} {alarm['event']}: {alarm['reason']}"), style="yellow"))
    return found


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else human_age(seconds)
