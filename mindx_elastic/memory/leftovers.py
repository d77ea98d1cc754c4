"""What is in shared memory, for ``mindx-elastic clean``: folders of agents and proofs, jobs' arenas, and who uses them.

Looks at folders of this user only, and never follows a link.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindx_elastic.core.posix import is_own_folder
from mindx_elastic.memory.arena import read_records
from mindx_elastic.memory.folders import (
    maker_in,
    rank_folders,
    read_owner,
    user_folder,
    user_of,
)

__all__ = ["ArenaLeftover", "Leftovers", "ProcessLeftover", "find_leftovers", "newest_step"]

_ARENA = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class ProcessLeftover:
    """The private folder of an agent, or of one `mindx-elastic prove`."""

    path: Path
    pid: int
    in_use: str
    """Who uses it, in words; empty: no living process."""
    size: int
    age_s: float


@dataclass(frozen=True)
class ArenaLeftover:
    """The arenas of one job."""

    path: Path
    directory: str
    """The job's checkpoint directory; empty when the owner's file cannot be read."""
    directory_exists: bool
    run_id: str
    ranks: tuple[int, ...]
    newest_step: int | None
    """Newest step of which every rank here has a snapshot; None: there is none."""
    in_use: str
    size: int
    age_s: float


@dataclass(frozen=True)
class Leftovers:
    """What `find_leftovers` has found."""

    agents: list[ProcessLeftover] = field(default_factory=list)
    arenas: list[ArenaLeftover] = field(default_factory=list)
    proofs: list[ProcessLeftover] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    """What else is there, or in the place of the user's folder: not ours."""


def find_leftovers(base: Path) -> Leftovers:
    """What is in this user's folder below `base`. Raises OSError."""
    found, folder = Leftovers(), user_folder(base)
    if not os.path.lexists(folder):
        return found
    if not is_own_folder(folder):
        found.others.append(folder)
        return found
    for path in sorted(folder.iterdir()):
        maker, own = maker_in(path), is_own_folder(path)
        if own and maker is not None:
            age_s = time.time() - path.lstat().st_mtime
            its_kind = found.agents if maker[0] == "agent" else found.proofs
            its_kind.append(ProcessLeftover(path, maker[1], user_of(path), _size(path), age_s))
        elif own and _ARENA.fullmatch(path.name):
            found.arenas.append(_look_at_arena(path))
        else:
            found.others.append(path)
    return found


def _look_at_arena(path: Path) -> ArenaLeftover:
    owner: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        owner = read_owner(path)
    directory, run_id, created = owner.get("directory"), owner.get("run_id"), owner.get("created")
    directory = directory if isinstance(directory, str) and os.path.isabs(directory) and "\0" not in directory else ""
    began = created if isinstance(created, (int, float)) and not isinstance(created, bool) else path.lstat().st_mtime
    return ArenaLeftover(
        path=path,
        directory=directory,
        directory_exists=bool(directory) and _exists(directory),
        run_id=run_id if isinstance(run_id, str) else "",
        ranks=tuple(rank_folders(path)),
        newest_step=newest_step(path),
        in_use=user_of(path),
        size=_size(path),
        age_s=time.time() - began,
    )


def _exists(directory: str) -> bool:
    """Whether a directory exists; True in doubt (no permission, a stale mount)."""
    try:
        os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def newest_step(arenas: Path) -> int | None:
    """The newest step of which each rank that keeps snapshots has one; ranks that hold the same keep one together."""
    steps = [
        {record.step for record in read_records(folder) if record.state} for folder in rank_folders(arenas).values()
    ]
    return max(set.intersection(*kept), default=None) if (kept := [found for found in steps if found]) else None


def _size(path: Path) -> int:
    """Bytes of memory that the folder takes."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
