"""What a running job would lose if it died now: its newest boundary against the newest one in memory and on disk.

Where every process is killed, shared memory stays, and a start goes on from the newest snapshot there, or from disk if
that is newer. Where the machine is lost, disk alone counts. (Where one rank is killed, the others save their last
boundary, and nothing is lost; the same at a stop.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.core.status_page import Status

__all__ = ["expect"]

_UNKNOWN = dict.fromkeys(("step", "directory", "memory_step", "disk", "lost_if_killed", "lost_if_machine_lost"))


def expect(pages: Mapping[int, Status]) -> dict[str, Any]:
    """What the job of these pages would lose now, for a document; None: not known, or there is none. Reads headers.

    * ``step``: newest boundary that a rank of this machine has passed; ``directory``: of its checkpoints
    * ``memory_step``: newest boundary from which a start could go on by memory
    * ``disk``: ``step``, ``created`` (unix seconds) and ``name`` of the newest complete step on disk
    * ``lost_if_killed``, ``lost_if_machine_lost``: steps

    Ranks with their own folders in memory are separate jobs: the one that would lose most counts.
    """
    jobs: dict[str, list[Status]] = {}
    for page in pages.values():
        if page.step >= 0:
            jobs.setdefault(page.arena, []).append(page)
    found = [_expect(arena, ranks) for arena, ranks in jobs.items()]
    losses = ("lost_if_machine_lost", "lost_if_killed")
    return max(found, key=lambda each: [each[loss] or 0 for loss in losses], default=dict(_UNKNOWN))


def _expect(arena: str, pages: Sequence[Status]) -> dict[str, Any]:
    step = max(page.step for page in pages)
    memory = _in_memory(Path(arena)) if arena else None
    found = {**_UNKNOWN, "step": step, "memory_step": memory}
    if not pages[0].directory:
        return found
    saved = _newest(Path(pages[0].directory), pages[0].run_id)
    on_disk = 0 if saved is None else saved["step"]
    return {
        **found,
        "directory": pages[0].directory,
        "disk": saved,
        "lost_if_killed": max(0, step - max(on_disk, memory or 0)),
        "lost_if_machine_lost": max(0, step - on_disk),
    }


def _newest(directory: Path, run_id: str) -> dict[str, Any] | None:
    """The newest complete save of the run. A directory that cannot be read has none."""
    from mindx_elastic.errors import MindxError
    from mindx_elastic.start.findings import list_files, reader_trust, scan
    from mindx_elastic.start.inventory import Inventory

    try:
        found = Inventory.merge([scan(list_files([directory]), trust=reader_trust(directory))])
    except (MindxError, OSError):
        return None
    newest = found.newest_complete(run_id or None)
    if newest is None:
        return None
    created = max((entry.info.created for entry in newest.entries if entry.info is not None), default=0.0)
    name = newest.entries[0].path.name if newest.entries else ""
    return {"step": newest.moment[2], "created": created, "name": name}


def _in_memory(arena: Path) -> int | None:
    """The newest step of which each rank that keeps snapshots has one; ranks that hold the same keep one together."""
    from mindx_elastic.memory.arena import SlotState, read_records
    from mindx_elastic.memory.folders import rank_folders

    newest = []
    for folder in rank_folders(arena).values():
        steps = [record.step for record in read_records(folder) if record.state is not SlotState.EMPTY]
        if steps:
            newest.append(max(steps))
    return min(newest, default=None)
