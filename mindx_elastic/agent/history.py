"""What happened to a job under the agent: its runs, attempts and recoveries in place, as the events tell them.

One plain model (`AgentRun`, `AttemptRecord`, `Totals`) behind `status`, `report`, ``result.json``, the metrics and what
the agent prints, and one table for a person (`render`). The agent's `Ledger` writes the events; this module reads them
back from ``events.jsonl``.

The file may hold more than what agents have written: the workers' events (when the run directory is the checkpoint
directory), lines of other programs, lines cut off by a kill or a full disk, and several runs of an agent, one after the
other or, on a shared file system, at the same time. Its values are not trusted: one of the wrong type is taken as
unknown.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mindx_elastic.core.events import read_events
from mindx_elastic.core.posix import read_small
from mindx_elastic.core.printable import counted, printable
from mindx_elastic.core.values import real, text, whole
from mindx_elastic.rejoin.record import IN_PLACE, REJOIN, RecoveryRecord, as_lines, from_event

__all__ = [
    "FAILED",
    "FINISHED",
    "NEW_NODE",
    "NOTABLE",
    "REHEARSED",
    "STOPPED",
    "AgentRun",
    "AttemptRecord",
    "Totals",
    "add_up",
    "as_attempt_event",
    "count_recovery",
    "identity",
    "last_lines_path",
    "load_runs",
    "read_last_lines",
    "render",
    "runs_of",
    "totals_line",
]

FAILED, FINISHED, STOPPED, NEW_NODE = "failed", "finished", "stopped", "restarted for a new node"
REHEARSED = "restarted for its rehearsal"
"""Values of `AttemptRecord.outcome`: ended by a failure, by itself, by request, by a change of the nodes, to try the
resume."""
NOTABLE = ("signal", "fault", "hang", "slow", "crash_loop", "shrink", "hold", "membership", "directory")
"""Events of the agent that a person wants to see."""

_START, _END, _AUDIT = "agent_start", "agent_end", "audit"
_ATTEMPTS = ("attempt_start", "attempt_end", "attempt")
_MOST_LAST_BYTES = 1 << 20
_OURS = (_START, _END, _AUDIT, REJOIN, *_ATTEMPTS, *NOTABLE)
_WIDTH = 100
_CAUSE_CHARS = 150


@dataclass(kw_only=True, slots=True)
class AttemptRecord:
    """One start of the workers of one node and how it ended; None where something is not known (yet).

    The four times are seconds *since the failure*, not since each other: survivors may have saved before the agent has
    noticed anything. So the last of them is how long the job did not train.
    """

    attempt: int
    world_size: int | None = None
    node: int | None = None
    """Rank of the node of the agent that wrote this."""
    started: float | None = None
    """Unix seconds."""
    cause: str | None = None
    """Why it ended, for a person; None when it finished."""
    cause_rank: int | None = None
    step_reached: int | None = None
    """Last boundary that every rank of the node had passed; -1: none."""
    resumed_step: int | None = None
    """Step it went on from; -1: a fresh start."""
    resumed_path: str | None = None
    saved_step: int | None = None
    """Newest step that can be gone on from after the end."""
    steps_lost: int | None = None
    detect_s: float | None = None
    """Until the failure was noticed."""
    save_s: float | None = None
    """Until the newest step was safe."""
    restart_s: float | None = None
    """Until new workers were started."""
    first_step_s: float | None = None
    """Until the next attempt has passed its first boundary: the time to recovery."""
    paused_s: float | None = None
    """How long its ranks waited by command (`mindx-elastic pause`), in all; None: they did not."""
    stall_s: float | None = None
    """How long periodic saves have held up its training: the rank that they have held up longest."""
    in_place: int | None = None
    """Failures that it has outlived: recoveries in place; None: there were none."""
    in_place_s: float | None = None
    """How long its ranks did not train because of them, in all."""
    in_place_steps_lost: int | None = None
    """By them, in all."""
    outcome: str | None = None
    """`FAILED`, `FINISHED`, `STOPPED`, `NEW_NODE`, `REHEARSED` or another word; None while it runs."""
    full_size: int | None = None
    """How many ranks the job is meant to have, where it has fewer."""
    why_fewer: str | None = None

    @property
    def pause_s(self) -> float | None:
        """Seconds without training that followed this attempt, as far as they are known."""
        return max(
            (t for t in (self.detect_s, self.save_s, self.restart_s, self.first_step_s) if t is not None), default=None
        )


@dataclass(frozen=True)
class Totals:
    """The sums over a job's attempts."""

    attempts: int
    failures: int
    """Those that were recovered from in place, too."""
    steps_lost: int
    unknown_losses: int
    """Failures of which it is not known how many steps they cost."""
    not_training_s: float
    """After failures."""
    paused_s: float = 0.0
    """By command."""
    in_place: int = 0
    """Failures that were recovered from in place."""


@dataclass
class AgentRun:
    """One agent's life, as its events tell it."""

    pid: int | None = None
    host: str = ""
    agent_dir: str = ""
    """Its private folder; gone after a clean end."""
    started: float | None = None
    """Unix seconds."""
    ended: float | None = None
    """None: it runs, or it was killed."""
    outcome: str = ""
    """How it ended, in its own words."""
    reason: str = ""
    """Why, at its end; empty: not known."""
    command: str = ""
    """That started it, as a line for a shell; empty: not known."""
    worker_command: list[str] = field(default_factory=list)
    """Of each worker; empty: not known."""
    directories: list[str] = field(default_factory=list)
    """Of checkpoints, as its end tells them."""
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    """In the order in which they ended."""
    notable: list[dict[str, Any]] = field(default_factory=list)
    """Its events that a person wants to see, the oldest first."""
    audits: list[dict[str, Any]] = field(default_factory=list)
    """The events of its audits, the oldest first."""
    by_number: dict[int, AttemptRecord] = field(default_factory=dict)
    """Its attempts."""

    @property
    def records(self) -> list[AttemptRecord]:
        """The oldest first."""
        return [self.by_number[number] for number in sorted(self.by_number)]


# --- to and from the events ---


def as_attempt_event(record: AttemptRecord) -> dict[str, Any]:
    """The arguments of `EventLog.emit` after the event's name."""
    content = asdict(record)
    cause, step = content.pop("cause"), content.pop("step_reached")
    return {"step": step, "reason": cause, **content, **identity()}


def identity() -> dict[str, Any]:
    """The agent that writes: several may write to one file, after one another or at the same time."""
    return {"pid": os.getpid(), "host": socket.gethostname()}


def count_recovery(record: AttemptRecord, recovery: RecoveryRecord) -> None:
    """What a recovery in place has cost its attempt. One that came to nothing is part of the failure that follows."""
    if recovery.outcome == IN_PLACE:
        record.in_place = (record.in_place or 0) + 1
        record.in_place_s = round((record.in_place_s or 0.0) + (recovery.duration_s or 0.0), 6)
        record.in_place_steps_lost = (record.in_place_steps_lost or 0) + (recovery.steps_lost or 0)


def load_runs(path: Path) -> list[AgentRun]:
    """All runs of agents in the events file `path`, in the order in which they began. Raises OSError."""
    return runs_of(read_events(path)[0])


def runs_of(events: Iterable[dict[str, Any]]) -> list[AgentRun]:
    """As `load_runs`, of the events of such a file."""
    runs: list[AgentRun] = []
    for line in (line for line in events if line["event"] in _OURS):
        if line["event"] == _START:
            runs.append(_begin(line))
            continue
        run = _owner(runs, line)
        if run is None:
            runs.append(run := _begin(line))
        _add(run, line)
    return runs


def _begin(line: dict[str, Any]) -> AgentRun:
    return AgentRun(
        pid=whole(line.get("pid")),
        host=text(line.get("host")),
        agent_dir=text(line.get("agent_dir")),
        started=real(line.get("time")),
        command=text(line.get("command_line")),
        worker_command=_texts(line.get("command")),
    )


def _owner(runs: list[AgentRun], line: dict[str, Any]) -> AgentRun | None:
    """The newest run with the pid and host of the line. Pids come again, in containers always."""
    pid, host = whole(line.get("pid")), text(line.get("host"))
    for run in reversed(runs):
        if (pid is None or run.pid in (None, pid)) and (not host or run.host in ("", host)):
            return None if line["event"] == "attempt_start" and _is_new_life(run, line) else run
    return None


def _is_new_life(run: AgentRun, line: dict[str, Any]) -> bool:
    """Whether an attempt begins that cannot be this run's: its own `agent_start` was cut off."""
    number = whole(line.get("attempt"))
    return run.ended is not None or number in run.by_number


def _add(run: AgentRun, line: dict[str, Any]) -> None:
    event = line["event"]
    run.host = run.host or text(line.get("host"))
    if event == _END:
        run.ended, run.reason = real(line.get("time")), text(line.get("reason"))
        run.outcome = text(line.get("outcome")) or run.outcome
        run.directories = _texts(line.get("directories"))
    elif event == _AUDIT:
        run.audits.append(line)
    elif event in NOTABLE:
        run.notable.append(line)
    elif event == REJOIN:
        _add_recovery(run, line)
    else:
        _add_attempt(run, line)


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _add_recovery(run: AgentRun, line: dict[str, Any]) -> None:
    recovery = from_event(line)
    if recovery is not None:
        run.recoveries.append(recovery)
        count_recovery(_record_of(run, recovery.attempt), recovery)


def _record_of(run: AgentRun, number: int) -> AttemptRecord:
    return run.by_number.setdefault(number, AttemptRecord(attempt=number))


def _add_attempt(run: AgentRun, line: dict[str, Any]) -> None:
    number = whole(line.get("attempt"))
    if number is None:
        return
    record = _record_of(run, number)
    if line["event"] == "attempt_start":
        record.started = record.started or real(line.get("time"))
    else:
        line = {**line, "cause": line.get("reason"), "step_reached": line.get("step")}
    for name, read in _READERS.items():
        value = read(line.get(name))
        if value not in (None, "") and (name != "outcome" or line["event"] != "attempt_start"):
            setattr(record, name, value)


_BY_TYPE: dict[object, Callable[[Any], int | float | str | None]] = {
    "int | None": whole,
    "float | None": real,
    "str | None": text,
}
_READERS = {each.name: _BY_TYPE[each.type] for each in fields(AttemptRecord) if each.name != "attempt"}
"""How each field of `AttemptRecord` but its number is read."""


def last_lines_path(run_dir: Path, rank: int) -> Path:
    """The file with the last lines of a rank that has failed; its first one says how. `agent.last_lines` writes it."""
    return run_dir / "last_lines" / f"rank_{rank}.txt"


def read_last_lines(run_dir: Path) -> dict[int, list[str]]:
    """The lines of all these files, by rank. Raises OSError."""
    found = {}
    for path in last_lines_path(run_dir, 0).parent.glob("rank_*.txt"):
        if path.stem.removeprefix("rank_").isdecimal():
            data = read_small(path, _MOST_LAST_BYTES)
            found[int(path.stem.removeprefix("rank_"))] = data.decode(errors="replace").splitlines()
    return found


# --- summed up, and for a person ---


def add_up(records: Iterable[AttemptRecord]) -> Totals:
    """The totals of some attempts."""
    records = list(records)
    failed = [record for record in records if record.outcome == FAILED]
    in_place = sum(record.in_place or 0 for record in records)
    return Totals(
        attempts=len(records),
        failures=len(failed) + in_place,
        steps_lost=sum((record.steps_lost or 0) + (record.in_place_steps_lost or 0) for record in records),
        unknown_losses=sum(record.steps_lost is None for record in failed),
        not_training_s=round(sum((record.pause_s or 0.0) + (record.in_place_s or 0.0) for record in records), 3),
        paused_s=round(sum(record.paused_s or 0.0 for record in records), 3),
        in_place=in_place,
    )


def totals_line(totals: Totals) -> str:
    """For example ``3 failures (2 recovered in place), 0 steps lost, 4.1 s not training``."""
    lost = counted(totals.steps_lost, "step") + " lost"
    if totals.unknown_losses == totals.failures > 0:
        lost = "steps lost: not known yet"
    elif totals.unknown_losses:
        lost += f" (not known yet for {counted(totals.unknown_losses, 'failure')})"
    paused = f", {_seconds(totals.paused_s)} s paused by command" if totals.paused_s else ""
    failures = counted(totals.failures, "failure")
    if totals.in_place:
        failures += f" ({'' if totals.in_place == totals.failures else f'{totals.in_place} '}recovered in place)"
    return f"{failures}, {lost}, {_seconds(totals.not_training_s)} s not training{paused}"


def render(
    records: Sequence[AttemptRecord],
    recoveries: Sequence[RecoveryRecord] = (),
    *,
    still_open: str = "running",
    width: int = _WIDTH,
) -> str:
    """The attempts as a table, the recoveries in place and the totals as plain text, without a line break at the end.

    still_open: text for an attempt without a recorded end. width: columns, 100 at least.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, row in enumerate(_cells(record, still_open) for record in records):
        for name in () if number else row:
            is_cause = name == _CAUSE
            table.add_column(Text(name), justify="left" if is_cause else "right", no_wrap=not is_cause, overflow="fold")
        table.add_row(*map(Text, row.values()))
    stream = io.StringIO()
    console = Console(
        file=stream, width=max(width, _WIDTH), color_system=None, highlight=False, markup=False, emoji=False
    )
    console.print(table if records else "no attempt yet")
    if recoveries:
        console.print()
        console.print("\n".join(as_lines(recoveries)))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join([*lines, "", totals_line(add_up(records))])


_CAUSE = "how it ended"


def _cells(record: AttemptRecord, still_open: str) -> dict[str, str]:
    """What the columns say, by their headings; the second line of a heading is the unit."""
    return {
        "#": str(record.attempt),
        "ranks": _ranks(record),
        "from\nstep": "fresh" if record.resumed_step == -1 else _number(record.resumed_step),
        "to\nstep": "none" if record.step_reached == -1 else _number(record.step_reached),
        _CAUSE: _ending(record, still_open),
        "saved\nstep": "none" if record.saved_step == -1 else _number(record.saved_step),
        "steps\nlost": _number(record.steps_lost),
        "detect\ns": _seconds(record.detect_s),
        "save\ns": _seconds(record.save_s),
        "restart\ns": _seconds(record.restart_s),
        "1st step\ns": _seconds(record.first_step_s),
    }


def _ranks(record: AttemptRecord) -> str:
    fewer = "" if record.full_size is None else f" of {record.full_size}"
    return _number(record.world_size) + fewer


def _ending(record: AttemptRecord, still_open: str) -> str:
    recovered = f"; {record.in_place} recovered in place" if record.in_place else ""
    return _how_it_ended(record, still_open) + recovered


def _how_it_ended(record: AttemptRecord, still_open: str) -> str:
    if record.outcome is None:
        return still_open
    cause, outcome = printable(record.cause or ""), printable(record.outcome)
    if len(cause) > _CAUSE_CHARS:
        cause = cause[: _CAUSE_CHARS - 3].rstrip() + "..."
    if cause and record.cause_rank is not None and record.cause_rank >= 0:
        cause = f"rank {record.cause_rank}: {cause}"
    if outcome == FAILED and cause:
        return cause
    return f"{outcome}: {cause}" if cause else outcome


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
