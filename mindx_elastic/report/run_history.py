"""What happened in a run, put together from the agent's event log and those of its ranks.

Their lines are not trusted: what is torn, or no event, is counted and left out, and values of the wrong type are taken
as unknown.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.agent.history import FINISHED, NOTABLE, STOPPED, AgentRun, AttemptRecord, read_last_lines, runs_of
from mindx_elastic.core.events import EVENTS_FILE, read_events
from mindx_elastic.core.values import real, text, whole
from mindx_elastic.rejoin.record import IN_PLACE
from mindx_elastic.start.unused_state import find_unused_state, proof_in_events, remarks

__all__ = ["Bar", "Mark", "RunHistory", "TimeShare", "remarks_of_run", "shares_of", "tell"]

_ALARMS = (*NOTABLE, "pause")
_MOST_RANKS = 1024
_OF_STEPS = ("save", "resume", "durable", "worker_end", "attempt_end", "rejoin", "pause")
"""Events that name a step that was passed."""


@dataclass(frozen=True)
class Bar:
    """One process of a rank, from its start to its end (unix seconds)."""

    rank: int
    attempt: int
    start: float
    end: float
    how: str
    """How it ended; empty: it has not."""
    is_bad: bool


@dataclass(frozen=True)
class Mark:
    """Something at a moment: ``fault``, ``save``, ``recovery`` or another event."""

    kind: str
    time: float
    rank: int | None
    step: int | None
    text: str


@dataclass(frozen=True)
class TimeShare:
    """A part of the run's time."""

    name: str
    seconds: float
    meaning: str


@dataclass
class RunHistory:
    run: AgentRun
    start: float
    end: float
    """Unix seconds; of the last event where the end is not recorded."""
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    step: int | None = None
    """The highest one that is known to have been passed."""
    shares: list[TimeShare] = field(default_factory=list)
    sources: list[Path] = field(default_factory=list)
    """The logs that were read."""
    torn: int = 0
    """Lines that are no events."""
    older_runs: int = 0
    last_lines: dict[int, list[str]] = field(default_factory=dict)
    """What failed ranks of the log's node wrote last, by rank; the first line says how one failed."""


def tell(log: Path) -> RunHistory | None:
    """The newest agent's run in the log of a RUN_DIR; None: no agent has run there. Raises OSError."""
    lines, torn = _read(log)
    runs = runs_of(lines)
    if not runs:
        return None
    run = runs[-1]
    sources = [log]
    for folder in _checkpoint_folders(run):
        path = folder / EVENTS_FILE
        if path.is_file() and os.access(path, os.R_OK) and not path.samefile(log):
            more, more_torn = _read(path)
            lines, torn, sources = lines + more, torn + more_torn, [*sources, path]
    began = run.started
    if began is None:
        began = min((line["time"] for line in lines), default=0.0)
    ours = sorted((line for line in lines if line["time"] >= began), key=lambda line: line["time"])
    end = run.ended if run.ended is not None else max((line["time"] for line in ours), default=began)
    ours = [line for line in ours if line["time"] <= end]
    story = RunHistory(run, began, max(end, began), sources=sources, torn=torn, older_runs=len(runs) - 1)
    story.bars = list(_bars(run.records, ours, story.end))
    story.marks = list(_marks(run, ours))
    steps = [whole(line.get("step")) for line in ours if line["event"] in _OF_STEPS]
    known = [step for step in (*steps, *(record.step_reached for record in run.records)) if step is not None]
    story.step = max(known, default=None)
    with suppress(OSError):
        story.last_lines = read_last_lines(log.parent)
    entered = [line["time"] for line in ours if line["event"] in ("start", "resume")]
    first_start_s = max(0.0, entered[0] - began) if entered else 0.0
    durations = _durations(run.records, ours, entered)
    story.shares = shares_of(run.records, durations, story.end - story.start, first_start_s)
    return story


def remarks_of_run(run: AgentRun) -> list[str]:
    """What the ranks of an agent that has ended could not bring to disk, and whether their resumes are proved."""
    saved = max((record.saved_step or -1 for record in run.records), default=-1)
    said = []
    for folder in map(Path, run.directories):
        proof = proof_in_events(folder)
        lines = [*remarks(find_unused_state(folder), saved), *([f"exact: {proof}"] if proof else [])]
        said += [f"{folder}: {line}" for line in lines]
    return said


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events that have a time, and how many lines are none."""
    events, num_others = read_events(path)
    timed = [event for event in events if real(event.get("time")) is not None]
    return timed, num_others + len(events) - len(timed)


def _checkpoint_folders(run: AgentRun) -> list[Path]:
    """Where the ranks of the run may have their log: where its end says, else above the files that attempts resumed
    from."""
    if run.directories:
        return [Path(each) for each in run.directories]
    for record in reversed(run.records):
        if record.resumed_path:
            folder = Path(record.resumed_path).parent
            return [each for each in (folder, *list(folder.parents)[:2]) if (each / EVENTS_FILE).is_file()][:1]
    return []


def _bars(records: Sequence[AttemptRecord], lines: Iterable[dict[str, Any]], end: float) -> Iterator[Bar]:
    """A rank whose process was replaced in place has several. The ranks are those of the node that wrote the log, where
    it says which they are."""
    ends: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for line in lines:
        rank, attempt = whole(line.get("worker_rank")), whole(line.get("attempt"))
        if line["event"] == "worker_end" and rank is not None and attempt is not None:
            ends.setdefault(attempt, {}).setdefault(rank, []).append(line)
    here = sorted({rank for of_attempt in ends.values() for rank in of_attempt})
    for record, last in zip(records, _next_starts(records, end), strict=True):
        if record.started is None:
            continue
        of_attempt = ends.get(record.attempt, {})
        ranks = here or range(record.world_size or 0)
        for rank in ranks[:_MOST_RANKS]:
            start = record.started
            for line in of_attempt.get(rank, []):
                outcome = text(line.get("outcome"))
                how = f"{outcome}: {text(line.get('reason'))}".strip(": ")
                yield Bar(rank, record.attempt, start, max(start, line["time"]), how, outcome == "failed")
                start = line["time"]
            if not of_attempt.get(rank) or (record.in_place and start < last - 1.0):
                yield Bar(rank, record.attempt, start, max(start, last), record.outcome or "", False)


def _marks(run: AgentRun, lines: Iterable[dict[str, Any]]) -> Iterator[Mark]:
    for line in lines:
        event, outcome = line["event"], text(line.get("outcome"))
        step, reason = whole(line.get("step")), text(line.get("reason"))
        if event == "worker_end" and outcome == "failed":
            yield Mark("fault", line["time"], whole(line.get("worker_rank")), step, reason or outcome)
        elif event == "save" and outcome == "saved":
            yield Mark("save", line["time"], whole(line.get("rank")), step, text(line.get("kind")) or "saved")
        elif event in _ALARMS:
            yield Mark(event, line["time"], None, step, reason)
    for record in run.recoveries:
        if record.time is not None:
            kind = "recovery" if record.outcome == IN_PLACE else "no recovery"
            for rank in record.ranks or (None,):
                yield Mark(kind, record.time, rank, record.step, f"{record.cause} {record.reason}".strip())


def _next_starts(records: Sequence[AttemptRecord], end: float) -> list[float]:
    """For each of these attempts when the next one began, `end` at the latest."""
    found = []
    for record in reversed(records):
        found.append(end)
        end = min(end, record.started if record.started is not None else end)
    return found[::-1]


def _durations(
    records: Sequence[AttemptRecord], lines: Iterable[dict[str, Any]], entered: Sequence[float]
) -> dict[int, float]:
    """Seconds from the first guard that was entered in each attempt, or else its start, to its end, by its number;
    those that have not ended are not in it."""
    started = {record.attempt: record.started for record in records}
    found = {}
    for line in lines:
        attempt = whole(line.get("attempt"))
        begin = started.get(-1 if attempt is None else attempt)
        if line["event"] == "attempt_end" and attempt is not None and begin is not None:
            first = bisect_left(entered, begin)
            if first < len(entered) and entered[first] < line["time"]:
                begin = entered[first]
            found[attempt] = max(0.0, line["time"] - begin)
    return found


def shares_of(
    records: Sequence[AttemptRecord], durations: Mapping[int, float], total_s: float, first_start_s: float
) -> list[TimeShare]:
    """Where the time of a run went; the parts are never more than `total_s` together. Pure.

    durations: seconds from the begin of an attempt's training to its end, by its number.

    The four times of a record count from the failure; one that is not known counts as the one before.
    """
    detect = save = restart = load = redone = 0.0
    for record in records:
        if record.outcome not in (None, FINISHED, STOPPED):  # failed, or restarted for other nodes
            known = [record.detect_s, record.save_s, record.restart_s, record.first_step_s]
            marks = [0.0]
            for value in known:
                marks.append(marks[-1] if value is None else max(marks[-1], value))
            parts = [b - a for a, b in itertools.pairwise(marks)]
            detect, save, restart, load = detect + parts[0], save + parts[1], restart + parts[2], load + parts[3]
        redone += _redone(record, durations.get(record.attempt))
    in_place = sum(max(0.0, record.in_place_s or 0.0) for record in records)
    paused = sum(max(0.0, record.paused_s or 0.0) for record in records)
    stall = sum(max(0.0, record.stall_s or 0.0) for record in records)
    lost = [
        TimeShare("stall", stall, "periodic saves, while they held up the training"),
        TimeShare("redone", redone, "steps that were done again, at the speed of their attempt"),
        TimeShare("detect", detect, "from a failure until it was noticed"),
        TimeShare("save", save, "until the newest step was safe"),
        TimeShare("restart", restart, "until new processes ran"),
        TimeShare("resume", load, "until every rank had passed a step again"),
        TimeShare("in place", in_place, "recoveries without a restart"),
        TimeShare("first start", first_start_s, "until the first guard was entered"),
        TimeShare("paused", paused, "by command"),
    ]
    over = sum(share.seconds for share in lost)
    factor = total_s / over if over > total_s > 0 else 1.0
    lost = [TimeShare(share.name, share.seconds * factor, share.meaning) for share in lost if share.seconds > 0]
    productive = max(0.0, total_s - sum(share.seconds for share in lost))
    return [TimeShare("productive", productive, "all the rest: training, evaluations"), *lost]


def _redone(record: AttemptRecord, duration_s: float | None) -> float:
    """Seconds that the steps which this attempt has lost had taken."""
    lost = (record.steps_lost or 0) + (record.in_place_steps_lost or 0)
    done = (record.step_reached or 0) - max(0, record.resumed_step or 0)
    if lost <= 0 or done <= 0 or duration_s is None:
        return 0.0
    return duration_s * min(1.0, lost / done)
