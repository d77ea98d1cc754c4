"""What a running job would lose if it died now: its newest boundary against the newest one in memory and on disk.

Where every process is killed, shared memory stays, and a start goes on from the newest snapshot there, or from disk if
that is newer. Where the machine is lost, disk alone counts. (Where one rank is killed, the others save their last
boundary, and nothing is lost; the same at a stop.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.cli.checkpoints import look_at
from mindx_elastic.core.status_page import Status

__all__ = ["expect"]

_KEYS = ("step", "directory", "memory_step", "disk", "lost_if_killed", "lost_if_machine_lost")


def expect(pages: Mapping[int, Status]) -> dict[str, Any]:
    """What the job of these pages would lose now, for a document; None: not known, or there is none. Reads headers.

    * ``step``: newest boundary that a rank of this machine has passed; ``directory``: of its checkpoints
    * ``memory_step``: newest boundary from which a start could go on by memory
    * ``disk``: ``step``, ``created`` (unix seconds) and ``name`` of the newest complete step on disk
    * ``lost_if_killed``, ``lost_if_machine_lost``: steps
    """
    from mindx_elastic.memory.leftovers import newest_step

    found: dict[str, Any] = dict.fromkeys(_KEYS)
    passed = [page for page in pages.values() if page.step >= 0]
    if not passed or len({page.arena for page in passed}) > 1:  # the latter: ranks that are separate jobs
        return found
    first, step = passed[0], max(page.step for page in passed)
    memory = newest_step(Path(first.arena)) if first.arena else None
    found |= {"step": step, "memory_step": memory}
    if not first.directory:
        return found
    saved = _newest(Path(first.directory), first.run_id)
    on_disk = 0 if saved is None else saved["step"]
    losses = {"lost_if_killed": max(on_disk, memory or 0), "lost_if_machine_lost": on_disk}
    found |= {name: max(0, step - kept) for name, kept in losses.items()}
    return {**found, "directory": first.directory, "disk": saved}


def _newest(directory: Path, run_id: str) -> dict[str, Any] | None:
    """The newest complete save of the run. A directory that cannot be read has none."""
    from mindx_elastic.errors import MindxError

    try:
        newest = look_at(directory).newest_complete(run_id or None)
    except (MindxError, OSError):
        return None
    if newest is None:
        return None
    created = max((entry.info.created for entry in newest.entries if entry.info is not None), default=0.0)
    name = newest.entries[0].path.name if newest.entries else ""
    return {"step": newest.moment[2], "created": created, "name": name}
