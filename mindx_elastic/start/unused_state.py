"""What is known of a checkpoint directory besides its files: a save that has failed, a snapshot in shared memory, and
what the resumes of its job have shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindx_elastic.core.owners import Trust

__all__ = ["find_unused_state", "never_saved", "proof_in_events", "remarks"]

_FAILED = "failed: "


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
    """What comparisons of the newest run's resumes have shown, in words as `core.certificate.ResumeProof`; empty: the
    event log says of no run. Raises nothing."""
    from mindx_elastic.core.certificate import COMPARED, date_of
    from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, parse_event
    from mindx_elastic.core.values import real, text, whole

    run, found = None, dict[str, dict[str, Any]]()
    for line in lines_backwards(directory / EVENTS_FILE):
        event = parse_event(line)
        if event is None:
            continue
        run = run if run is not None else text(event.get("run_id"))
        if event["event"] == "compared" and event.get("run_id") == run:
            found.setdefault(text(event.get("outcome")), event)
    if run is None:
        return ""
    verified, lost, differs = (found.get(outcome) for outcome in COMPARED)
    if differs is not None:
        return f"no: since step {whole(differs.get('step'))}: {text(differs.get('reason'))}"
    if lost is not None:
        return f"not proved yet: step {whole(lost.get('step'))} equal, and not got back: {text(lost.get('reason'))}"
    if verified is None:
        return "not proved yet: no resume of this job was compared"
    ranks, date = whole(verified.get("ranks")), date_of(real(verified.get("time")) or 0.0)
    return f"proved: step {whole(verified.get('step'))} ({ranks} rank{'s' * (ranks != 1)}, {date})"


def never_saved(directories: Sequence[Path], trust: Trust) -> dict[str, set[int]]:
    """By run, the ranks that have begun it and never put a file in place, as the event logs say. Raises nothing.

    Where ranks are not replicas, a step is complete only when every rank has its file. After a kill in the very first
    save one rank has a file and another has none; a complete step of which a disk was lost looks the same. The first
    case may start over, the second must not. So a log that has lost lines (it was begun anew when it was full, or
    deleted; or one is cut off, as on a full disk) proves nothing, and one that is lost with a disk neither.
    """
    from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, older_generation, parse_event
    from mindx_elastic.core.values import text, whole

    begun, saved, resumed = dict[str, set[int]](), set[tuple[str, int | None]](), set[str]()
    for log in (directory / EVENTS_FILE for directory in directories):
        if os.path.lexists(older_generation(log)):
            return {}
        for event in map(parse_event, lines_backwards(log, owners=trust.of(log))):
            if event is None:
                return {}
            run, rank = text(event.get("run_id")), whole(event.get("rank"))
            if event["event"] == "start" and rank is not None:
                begun.setdefault(run, set()).add(rank)
            elif event["event"] == "save" and event.get("outcome") == "saved":
                saved.add((run, rank))
            elif event["event"] == "resume":  # from a complete step
                resumed.add(run)
    return {
        run: {rank for rank in ranks if (run, rank) not in saved} for run, ranks in begun.items() if run not in resumed
    }


def _failed_save(directory: Path) -> dict[str, Any] | None:
    from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, parse_event
    from mindx_elastic.core.values import text, whole

    for line in lines_backwards(directory / EVENTS_FILE):
        event = parse_event(line)
        if event is None or event["event"] != "save":
            continue
        step, outcome = whole(event.get("step")), text(event.get("outcome"))
        if step is None or not outcome.startswith(_FAILED):
            return None
        return {"step": step, "reason": outcome.removeprefix(_FAILED)}
    return None


def _in_memory(directory: Path) -> dict[str, Any] | None:
    from mindx_elastic.config import MemorySettings
    from mindx_elastic.errors import MindxError
    from mindx_elastic.memory.leftovers import find_leftovers

    try:
        base = MemorySettings.from_env().base
        arenas = [] if base is None else find_leftovers(base).arenas
    except (OSError, MindxError):
        return None
    real = os.path.realpath(directory)
    steps = [
        (arena.newest_step, str(arena.path))
        for arena in arenas
        if arena.newest_step is not None and arena.directory and os.path.realpath(arena.directory) == real
    ]
    return None if not steps else dict(zip(("step", "folder"), max(steps), strict=True))
