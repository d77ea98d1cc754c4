"""What is known of a checkpoint directory beside its files: a save that has failed, and a snapshot in shared memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["find_remains", "remarks"]

_FAILED = "failed: "


def find_remains(directory: Path) -> dict[str, Any]:
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
