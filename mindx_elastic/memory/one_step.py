"""Copies what the ranks of a living job keep of one step in shared memory, while the job goes on.

The copy of a rank's folder looks as a kill at that step would have left it, so that a start can go on from it. The
writer wipes a slot's record before it touches the first byte (see `arena`): a record that is the same before and after
the copy vouches for all bytes in between.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.memory.arena import COMMIT_FILE, SLOT_FILES, STEPS_FILE, SlotState, ranks_here, read_records
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, read_ring
from mindx_elastic.memory.folders import make_private, rank_folders

__all__ = ["SNAPSHOT", "copy_newest", "lay_copy", "newest_kept"]

SNAPSHOT = SLOT_FILES[0]
"""The snapshot in a copy of a rank's folder. A rank whose state another one has copied for all has none."""


def newest_kept(job: Path) -> tuple[int, int] | None:
    """Attempt and number of the newest step of which each rank that keeps snapshots has one; ranks that hold the same
    keep one together. `job`: the job's folder."""
    records = [read_records(folder) for folder in ranks_here(job).values()]
    kept = [found for each in records if (found := {(r.attempt, r.step) for r in each if r.state})]
    return max(set.intersection(*kept), default=None) if kept else None


def copy_newest(job: Path, into: Path, *, after: int = -1) -> tuple[int, int] | None:
    """Copy that step to the folder `into`, and return it. None: it is not later than `after`, or it was overtaken while
    it was copied; try again. Raises OSError where there is no room. Any thread."""
    found = newest_kept(job)
    if found is None or found[1] <= after:
        return None
    into.mkdir(mode=0o700, exist_ok=True)
    is_whole = all(_copy_rank(folder, into / folder.name, *found) for folder in ranks_here(job).values())
    return found if is_whole else None


def _copy_rank(folder: Path, to: Path, attempt: int, step: int) -> bool:
    """Whether it is whole."""
    make_private(to)
    try:
        for name in (BOUNDARIES_FILE, STEPS_FILE):
            if (folder / name).exists():
                shutil.copyfile(folder / name, to / name)
        before = read_records(folder)
        index = next((i for i, r in enumerate(before) if r.state and (r.attempt, r.step) == (attempt, step)), None)
        if index is None:
            rings = read_ring(to / BOUNDARIES_FILE)
            is_pinned = any((r.attempt, r.step) == (attempt, step) and not r.forecast for r in rings)
            return is_pinned and not any(r.state for r in before)
        shutil.copyfile(folder / SLOT_FILES[index], to / SNAPSHOT)
        after = read_records(folder)[index]
    except (FileNotFoundError, CorruptCheckpointError, LookupError):  # the job has ended
        return False
    # Its digests may just have been filled in: the start does that again.
    (to / COMMIT_FILE).write_bytes(before[index]._replace(state=SlotState.COPIED).pack())
    return after._replace(state=before[index].state) == before[index]


def lay_copy(copied: Path, to: Path) -> None:
    """Lay a copy of `copy_newest` to the folder `to` of the same file system; snapshots, of which a start changes the
    digests at most, are not copied again."""
    for folder in rank_folders(copied).values():
        make_private(to / folder.name)
        for path in folder.iterdir():
            lay = os.link if path.name == SNAPSHOT else shutil.copyfile
            lay(path, to / folder.name / path.name)
