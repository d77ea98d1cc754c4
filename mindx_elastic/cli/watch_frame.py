"""One frame of `status --watch`: a document in, lines out, for a terminal of any size. Reads nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from mindx_elastic.cli.common import human_age
from mindx_elastic.cli.status_report import agent_line
from mindx_elastic.core.printable import printable

__all__ = ["draw_frame"]

_MOST_ATTEMPTS, _MOST_RECOVERIES = 4, 3
_STYLES = {"training": "green", "between": "cyan", "starting": "cyan", "paused": "cyan", "stopping": "yellow"}
_LATE_S = 30.0


def draw_frame(report: dict[str, Any], *, width: int, height: int | None) -> list[Text]:
    """At most `height` lines (None: as many as needed) of at most `width` columns.

    Where there are too few lines, the ranks that are as they should be are left out first.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(report["time"]))
    head = [Text(printable(f"{clock}  {agent_line(report['agent'])}"), style="bold")]
    rest = [*_outlook(report), *_attempts(report), *_recoveries(report), *_alarms(report)]
    workers = report["workers"]
    if height is not None:
        room = max(1, height - len(head) - len(rest) - 1)
        ranks = _ranks(workers, room)
        rest = rest[: max(0, height - len(head) - len(ranks))]
    else:
        ranks = _ranks(workers, None)
    lines = [*head, *ranks, *rest]
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
        age = human_age(report["time"] - disk["created"])
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


def _attempts(report: dict[str, Any]) -> list[Text]:
    attempts = report["attempts"]
    lines = []
    if hidden := max(0, len(attempts) - _MOST_ATTEMPTS):
        lines.append(Text(f"{hidden} earlier attempts"))
    for record in attempts[-_MOST_ATTEMPTS:]:
        words = [f"attempt {record['attempt']}: "]
        if record["outcome"] is None:
            words.append(_beginning(record, report["workers"]))
        else:
            cause = record["cause"] or ""
            rank = "" if record["cause_rank"] is None else f"rank {record['cause_rank']}: "
            words.append(f"{record['outcome']}{f', {rank}{cause}' if cause else ''}")
            if record["steps_lost"] is not None:
                words.append(f"; {record['steps_lost']} steps lost")
            if record["pause_s"] is not None:
                words.append(f"; {_short(record['pause_s'])} not training")
        is_bad = record["outcome"] == "failed"
        lines.append(Text(printable("".join(words)), style="red" if is_bad else ""))
    return lines


def _beginning(record: dict[str, Any], workers: Sequence[dict[str, Any]]) -> str:
    """From where the attempt that runs goes on; its record says so at its end only, the workers before."""
    resumed = record["resumed_step"]
    if resumed is None and any(worker["step"] >= 0 for worker in workers):
        resumed = min(worker["resumed_step"] for worker in workers)
    return {None: "starting", -1: "runs, from the beginning"}.get(resumed, f"runs, from step {resumed}")


def _recoveries(report: dict[str, Any]) -> list[Text]:
    records = report["recoveries"]
    if not records:
        return []
    done = sum(record["outcome"] == "in place" for record in records)
    lines = [Text(f"recovered in place: {done} of {len(records)}")]
    for record in records[-_MOST_RECOVERIES:]:
        ranks = ", ".join(map(str, record["ranks"][:8]))
        took = "" if record["duration_s"] is None else f", {_short(record['duration_s'])}"
        reason = f": {record['reason']}" if record["outcome"] != "in place" and record["reason"] else ""
        text = f"  rank {ranks}: {record['cause'] or 'gone'}; {record['outcome']}{reason}{took}"
        lines.append(Text(printable(text)))
    return lines


def _alarms(report: dict[str, Any]) -> list[Text]:
    found = []
    for alarm in report["alarms"]:
        clock = time.strftime("%H:%M:%S", time.localtime(alarm["time"]))
        found.append(Text(printable(f"{clock} {alarm['event']}: {alarm['reason']}"), style="yellow"))
    return found


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else human_age(seconds)
