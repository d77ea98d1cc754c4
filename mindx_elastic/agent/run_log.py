"""The runs of agents, their attempts and recoveries, read back from ``events.jsonl``.

The file may hold more than what agents have written: the workers' events (when the run directory is the checkpoint
directory), lines of other programs, lines cut off by a kill or a full disk, and several runs of an agent, one after the
other or, on a shared file system, at the same time. Its values are not trusted: one of the wrong type is taken as
unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mindx_elastic.agent.ledger import AttemptRecord, count_recovery
from mindx_elastic.core.events import read_events
from mindx_elastic.core.posix import read_small
from mindx_elastic.core.values import real, text, whole
from mindx_elastic.rejoin.record import REJOIN, RecoveryRecord, from_event

__all__ = [
    "NOTABLE",
    "AgentRun",
    "last_lines_path",
    "load_runs",
    "read_last_lines",
    "runs_of",
    "runs_of_ranks",
]

NOTABLE = ("signal", "fault", "hang", "crash_loop", "shrink", "hold", "membership", "directory")
"""Events of the agent that a person wants to see."""

_START, _END = "agent_start", "agent_end"
_ATTEMPTS = ("attempt_start", "attempt_end", "attempt")
_MOST_LAST_BYTES = 1 << 20
_OURS = (_START, _END, REJOIN, *_ATTEMPTS, *NOTABLE)


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
    directories: list[str] = field(default_factory=list)
    """Of checkpoints, as its end tells them."""
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    """In the order in which they ended."""
    notable: list[dict[str, Any]] = field(default_factory=list)
    """Its events that a person wants to see, the oldest first."""
    by_number: dict[int, AttemptRecord] = field(default_factory=dict)
    """Its attempts."""

    @property
    def records(self) -> list[AttemptRecord]:
        """The oldest first."""
        return [self.by_number[number] for number in sorted(self.by_number)]


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


def runs_of_ranks(lines: list[dict[str, Any]]) -> tuple[list[AgentRun], list[dict[str, Any]]]:
    """The runs that the events of the ranks themselves tell where no agent was: one a run id, one attempt a start. And
    the lines that an agent would have written of their ends."""
    made: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        number = whole(line.get("attempt"))
        if number is not None and text(line.get("run_id")):
            made.setdefault((text(line.get("run_id")), number), []).append(line)
    runs: dict[str, AgentRun] = {}
    ends: list[dict[str, Any]] = []
    for (run_id, number), own in made.items():
        run = runs.setdefault(run_id, AgentRun(started=real(own[0].get("time"))))
        resumed = next((line for line in own if line["event"] == "resume"), {"step": -1})
        ranks = {whole(line.get("rank")) for line in own} - {None}
        last = [{**line, "worker_rank": line.get("rank")} for line in own if line["event"] in ("exit", "end")]
        for line in last:
            failed = line["event"] == "exit" and line.get("outcome") == "raised"
            line |= {"event": "worker_end", "outcome": "failed" if failed else text(line.get("outcome"))}
        steps = [step for line in own if (step := whole(line.get("step"))) is not None]
        of_attempt: dict[str, Any] = {"attempt": number, "world_size": len(ranks), "step": max(steps, default=-1)}
        of_attempt |= {"resumed_step": resumed.get("step"), "resumed_path": resumed.get("path")}
        _add(run, {**of_attempt, "event": "attempt_start", "time": own[0].get("time")})
        end = {**of_attempt, "event": "attempt_end"}
        if last:
            words = {line["outcome"] for line in last}
            how = "failed" if "failed" in words else "finished" if words == {"finished"} else "stopped"
            end |= {"time": last[-1]["time"], "outcome": how, "reason": text(last[-1].get("reason"))}
            run.ended, run.outcome = real(last[-1]["time"]), how
            ends.append(end)
        _add(run, end)
        ends += last
    return list(runs.values()), ends


def _begin(line: dict[str, Any]) -> AgentRun:
    return AgentRun(
        pid=whole(line.get("pid")),
        host=text(line.get("host")),
        agent_dir=text(line.get("agent_dir")),
        started=real(line.get("time")),
        command=text(line.get("command_line")),
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
        told = line.get("directories")
        run.directories = [each for each in told if isinstance(each, str)] if isinstance(told, list) else []
    elif event in NOTABLE:
        run.notable.append(line)
    elif event == REJOIN:
        _add_recovery(run, line)
    else:
        _add_attempt(run, line)


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
