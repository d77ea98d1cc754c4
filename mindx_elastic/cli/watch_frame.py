"""What `status` and `top` show: a document in, lines out, for a terminal of any size. Reads nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mindx_elastic.cli.common import human_age
from mindx_elastic.cli.status_report import agent_line
from mindx_elastic.core.printable import printable

if TYPE_CHECKING:
    from mindx_elastic.agent.run_log import AgentRun

__all__ = ["draw_frame"]

_MOST_ATTEMPTS, _MOST_RECOVERIES = 4, 3  # in the live view
_STYLES = {"training": "green", "between": "cyan", "starting": "cyan", "paused": "cyan", "stopping": "yellow"}
_LATE_S = 30.0


def draw_frame(
    report: dict[str, Any], run: AgentRun, *, width: int, height: int | None, with_clock: bool = True
) -> list[Text]:
    """At most `height` lines (None: as many as needed, and all attempts) of at most `width` columns. `run`: whose
    `report` it is.

    Where there are too few lines, the ranks that are as they should be are left out first.
    """
    clock = time.strftime("%H:%M:%S  ", time.localtime(report["time"])) if with_clock else ""
    head = [Text(printable(f"{clock}{agent_line(report['agent'])}"), style="bold")]
    rest = [*_pause(report), *_saves(report), *_outlook(report)]
    rest += [*_attempts(report, run, width, everything=height is None), *_alarms(report)]
    rest += [Text(printable(line)) for line in report["remarks"]]
    workers = report["workers"]
    ended = report["agent"]["running"] is False
    if height is not None:
        room = max(1, height - len(head) - len(rest) - 1)
        ranks = [] if ended else _ranks(workers, room)
        rest = rest[: max(0, height - len(head) - len(ranks))]
    else:
        ranks = [] if ended else _ranks(workers, None)
    lines = [*head, *ranks, *rest]
    if height is not None:
        for line in lines:
            line.truncate(max(width, 1), overflow="ellipsis")
    return lines


def _ranks(workers: Sequence[dict[str, Any]], room: int | None) -> list[Text]:
    """A heading and a line a rank; those that need a look in front where not all have room."""
    if not workers:
        return [Text("no worker of this machine runs at the moment")]
    shown = list(workers)
    if room is not None and len(shown) + 1 > room:
        count = max(0, room - 2)
        shown = sorted(shown, key=lambda worker: (not _is_odd(worker), worker["step"], worker["rank"]))[:count]
    lines = [Text(f"{'rank':>5} {'now':<9} {'step':>8} {'steps/s':>8}  last step   pid", style="bold")]
    lines += [_rank(worker) for worker in shown]
    if len(shown) < len(workers):
        steps = [worker["step"] for worker in workers]
        left = f"and {len(workers) - len(shown)} more; all ranks: step {min(steps)} to {max(steps)}"
        lines.append(Text(left))
    return lines


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


def _is_odd(worker: dict[str, Any]) -> bool:
    idle_s = worker["since_boundary_s"]
    return not worker["alive"] or worker["phase"] != "training" or (idle_s is not None and idle_s > _LATE_S)


def _outlook(report: dict[str, Any]) -> list[Text]:
    """The snapshot, the checkpoint, and the sentence that the command is for."""
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


def _attempts(report: dict[str, Any], run: AgentRun, width: int, *, everything: bool) -> list[Text]:
    """The attempts and recoveries in place, or the newest of them, and the totals of all."""
    from mindx_elastic.agent.ledger import add_up, render, totals_line

    records, workers = run.records, report["workers"]
    if records and records[-1].resumed_step is None and any(worker["step"] >= 0 for worker in workers):
        records[-1].resumed_step = min(worker["resumed_step"] for worker in workers)  # its record says so at its end
    still_open = {True: "running", False: "no end recorded", None: "no end recorded yet"}[report["agent"]["running"]]
    shown = records if everything else records[-_MOST_ATTEMPTS:]
    recoveries = run.recoveries if everything else run.recoveries[-_MOST_RECOVERIES:]
    lines = render(shown, recoveries, still_open=still_open, width=width).split("\n")
    lines[-1] = totals_line(add_up(records))
    if hidden := len(records) - len(shown):
        lines.insert(0, f"{hidden} earlier attempts are not shown here")
    return [Text(""), *map(Text, lines)]


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
