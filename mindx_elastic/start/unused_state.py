"""What is known of a checkpoint directory besides its files: a save that has failed, a snapshot in shared memory, and
what the resumes of its job have shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.config import MemorySettings
from mindx_elastic.core.certificate import COMPARED, date_of
from mindx_elastic.core.events import EVENTS_FILE, events_backwards, lines_backwards, older_generation, parse_event
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.values import real, text, whole
from mindx_elastic.errors import MindxError

__all__ = ["RecordedSaves", "find_unused_state", "proof_in_events", "recorded_saves", "remarks"]

_FAILED = "failed: "


class RecordedSaves(NamedTuple):
    """What the event logs say of the saves of one run."""

    begun: set[int]
    """The ranks that have begun it."""
    saved: set[tuple[int | None, int | None]]
    """Rank and step of each file that was put in place."""


def find_unused_state(directory: Path) -> dict[str, Any]:
    """``failed_save``: the newest save, where it has failed (step, reason; None: it has not). ``in_memory``: the newest
    snapshot of all ranks that this machine's shared memory holds for the directory (step, folder). Raises nothing."""
    return {"failed_save": _failed_save(directory), "in_memory": _in_memory(directory)}


def remarks(remains: dict[str, Any], complete_step: int | None) -> list[str]:
    """The same in words, as far as it is about a later step than the newest complete one on disk."""
    found, least = [], -1 if complete_step is None else complete_step
    failed, memory = remains["failed_save"], remains["in_memory"]
    if failed is not None and failed["step"] > least:
        found.append(f"the save of step {failed['step']} has failed: {failed['reason']}")
    if memory is not None and memory["step"] > least:
        found.append(
            f"step {memory['step']} is in this machine's shared memory ({memory['folder']}): a start with the same "
            "command on this machine goes on from it"
        )
    return found


def proof_in_events(directory: Path) -> str:
    """What is known of the newest run's resumes, and what comparisons have shown, in words as
    `core.certificate.ResumeProof`; empty: the event log says of no run. Raises nothing."""
    run, found = None, dict[str, dict[str, Any]]()
    resume: dict[str, Any] | None = None
    for event in events_backwards(directory / EVENTS_FILE):
        run = run if run is not None else text(event.get("run_id"))
        if event["event"] == "compared" and event.get("run_id") == run:
            found.setdefault(text(event.get("outcome")), event)
        if event["event"] == "resume" and event.get("run_id") == run:
            resume = resume or event  # the newest: it has what is known of those before
    if run is None:
        return ""
    against = [] if resume is None else resume.get("unmanaged")
    if isinstance(against, list) and against:
        return f"no: {text(against[0])}"
    verified, lost, differs = (found.get(outcome) for outcome in COMPARED)
    if differs is not None:
        return f"no: since step {whole(differs.get('step'))}: {text(differs.get('reason'))}"
    if lost is not None:
        return f"not proved yet: step {whole(lost.get('step'))} equal, and not got back: {text(lost.get('reason'))}"
    if verified is None:
        return "not proved yet: no resume of this job was compared"
    ranks, date = whole(verified.get("ranks")), date_of(real(verified.get("time")) or 0.0)
    return f"proved: step {whole(verified.get('step'))} ({ranks} rank{'s' * (ranks != 1)}, {date})"


def recorded_saves(directories: Sequence[Path], trust: Trust) -> dict[str, RecordedSaves]:
    """By run, what the event logs say of its saves, where they say all. Raises nothing.

    A log that has lost lines (it was begun anew when it was full, or deleted; or one is cut off, as on a full disk)
    proves nothing. Nor does that of a run that was resumed: there was a complete step.
    """
    found, resumed = dict[str, RecordedSaves](), set[str]()
    for log in (directory / EVENTS_FILE for directory in directories):
        if os.path.lexists(older_generation(log)):
            return {}
        for event in map(parse_event, lines_backwards(log, owners=trust.of(log))):
            if event is None:
                return {}
            run, rank = text(event.get("run_id")), whole(event.get("rank"))
            record = found.setdefault(run, RecordedSaves(set(), set()))
            if event["event"] == "start" and rank is not None:
                record.begun.add(rank)
            elif event["event"] == "save" and event.get("outcome") == "saved":
                record.saved.add((rank, whole(event.get("step"))))
            elif event["event"] == "resume":
                resumed.add(run)
    return {run: record for run, record in found.items() if run not in resumed}


def _failed_save(directory: Path) -> dict[str, Any] | None:
    save = next((event for event in events_backwards(directory / EVENTS_FILE) if event["event"] == "save"), {})
    step, outcome = whole(save.get("step")), text(save.get("outcome"))
    if step is None or not outcome.startswith(_FAILED):
        return None
    return {"step": step, "reason": outcome.removeprefix(_FAILED)}


def _in_memory(directory: Path) -> dict[str, Any] | None:
    from mindx_elastic.memory.leftovers import find_leftovers  # imports torch

    try:
        base = MemorySettings.from_env().base
        arenas = [] if base is None else find_leftovers(base)[0]
    except (OSError, MindxError):
        return None
    real = os.path.realpath(directory)
    steps = [
        (arena.newest_step, str(arena.path))
        for arena in arenas
        if arena.newest_step is not None and arena.directory and os.path.realpath(arena.directory) == real
    ]
    return None if not steps else dict(zip(("step", "folder"), max(steps), strict=True))
