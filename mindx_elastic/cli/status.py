"""``mindx-elastic status``: what happened to a job under the agent, and where its workers are now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from mindx_elastic.cli.common import (
    EXIT_NOTHING,
    RUN_DIR,
    JsonOption,
    RunDirArgument,
    agent_in_words,
    find_runs,
    human_age,
    print_table,
    say,
    show,
)
from mindx_elastic.cli.status_report import make_report
from mindx_elastic.core.printable import counted, printable

if TYPE_CHECKING:
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["status_command"]

_STYLES = {"training": "green", "between": "cyan", "starting": "cyan", "paused": "cyan", "stopping": "yellow"}


def status_command(
    path: RunDirArgument = RUN_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show what happened to a job: its attempts, why each ended, what was saved and lost, how long it took.

    Times are seconds after the failure. While the agent runs on this machine, the steps and rates of its workers are
    shown too, and what would be lost now if all were killed, or the machine lost. If several agents have written to the
    same directory, the newest is shown.

    Recoveries in place (run --recover in-place) are listed below the attempts: who died, who stood in, and how long it
    took (--json: when each stage was reached).

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
    report = make_report(path, runs)
    if runs and runs[-1].ended is None and report["agent"]["running"] is False:
        runs = find_runs(path)  # it may have ended after they were read
        report = make_report(path, runs)
    show(report, as_json, lambda console, _: _print(console, report, runs))
    if not runs:
        raise typer.Exit(EXIT_NOTHING)


def _print(console: Console, report: dict[str, Any], runs: Sequence[AgentRun]) -> None:
    from mindx_elastic.agent.ledger import render

    if not runs:
        say(console, f"no agent has run in {report['run_dir']}")
        return
    run, agent = runs[-1], report["agent"]
    age = "" if agent["age_s"] is None else f", begun {human_age(agent['age_s'])} ago"
    say(console, agent_in_words(run, agent["running"], age), style="bold")
    if agent["running"] is not False:
        _print_workers(console, report["workers"])
    say(console, *_pause(report), *_saves(report["workers"]), *_outlook(report))
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
    print_table(console, ("rank", "now", "step", "steps/s", "last step", "pid", ""), map(_cells, workers), left="now|")


def _cells(worker: dict[str, Any]) -> Sequence[str | Text]:
    phase, rate = (worker["phase"] or "?") if worker["alive"] else "gone", worker["steps_per_s"]
    return (
        str(worker["rank"]),
        Text(phase, style=_STYLES.get(phase, "red")),
        "-" if worker["step"] < 0 else str(worker["step"]),
        "-" if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}",
        "-" if worker["since_boundary_s"] is None else f"{_short(worker['since_boundary_s'])} ago",
        str(worker["pid"]),
        Text(printable(worker["reason"] or "", 200), style="yellow"),
    )


def _pause(report: dict[str, Any]) -> Iterator[str]:
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


def _outlook(report: dict[str, Any]) -> Iterator[str | Text]:
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
