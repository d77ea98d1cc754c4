"""How long it took from a fault until it was noticed, until the state was safe, and until all ranks trained again.

From the events of the checkpoint directories and of the agent's run directories, and from the witnesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.core.events import EVENTS_FILE, read_events
from mindx_elastic.core.values import real
from mindx_elastic.prove.records import ProcessRecord

__all__ = ["Phases", "all_events", "find_phases"]

_NOTICED = ("alarm", "worker_end", "signal", "fault", "hang", "rejoin")
_BEGINS = ("resume", "start", "rejoin")
_ENDED_WELL = ("finished",)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds since the fault; None: it did not come to that, or nothing says when."""

    noticed_s: float | None = None
    saved_s: float | None = None
    """The last save before the training went on."""
    step_s: float | None = None
    """Every rank had passed a step again."""


def all_events(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """All events below these folders, by time."""
    logs = [path for folder in folders for path in sorted(folder.rglob(EVENTS_FILE))]
    found = [event for path in logs for event in read_events(path)[0] if real(event.get("time")) is not None]
    return sorted(found, key=lambda event: float(event["time"]))


def find_phases(
    events: Sequence[dict[str, Any]], lives: Sequence[ProcessRecord], *, fired: float, offset: float
) -> Phases:
    """`fired`: on the clock of `time.monotonic`; `offset`: from that to the clock of the events."""
    after = [life for life in lives if life.clock > fired]
    firsts = [min((step.clock for step in life.steps), default=None) for life in _one_of_each_rank(after)]
    step = max((at for at in firsts if at is not None), default=None) if firsts and None not in firsts else None
    until = float("inf") if step is None else step + offset
    late = [event for event in events if fired + offset - 0.001 <= event["time"] <= until]
    noticed = [event["time"] for event in late if event["event"] in _NOTICED and event["outcome"] not in _ENDED_WELL]
    begins = min((event["time"] for event in late if event["event"] in _BEGINS), default=until)  # then files are mended
    saved = [event["time"] for event in late if _is_saved(event) and event["time"] <= begins]
    return Phases(
        noticed_s=None if not noticed else max(0.0, noticed[0] - offset - fired),
        saved_s=None if not saved else max(0.0, saved[-1] - offset - fired),
        step_s=None if step is None else step - fired,
    )


def _is_saved(event: Mapping[str, Any]) -> bool:
    return bool(event["event"] == "durable" or (event["event"] == "save" and event["outcome"] == "saved"))


def _one_of_each_rank(lives: Iterable[ProcessRecord]) -> list[ProcessRecord]:
    """The first of each rank that has passed a step, else its last."""
    by_rank: dict[int, ProcessRecord] = {}
    for life in lives:
        if life.rank not in by_rank or not by_rank[life.rank].steps:
            by_rank[life.rank] = life
    return list(by_rank.values())
