"""What is in shared memory, for ``mindx-elastic clean``: folders of agents and proofs, jobs' arenas, and who uses them.

Looks at folders of this user only, and never follows a link.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.core.posix import is_missing, is_own_folder
from mindx_elastic.memory.folders import (
    maker_in,
    rank_folders,
    read_owner,
    user_folder,
    user_of,
)
from mindx_elastic.memory.one_step import newest_kept

__all__ = ["Leftover", "find_leftovers"]

_ARENA = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A folder of this user's in shared memory."""

    path: Path
    kind: str
    """``agent`` or ``proof``: the private folder of one; ``job``: the arenas of a job."""
    in_use: str
    """Who uses it, in words; empty: no living process."""
    size: int
    age_s: float
    pid: int | None = None
    """Of the agent, or of `mindx-elastic prove`."""
    directory: str = ""
    """The job's checkpoint directory; empty when the owner's file cannot be read."""
    directory_exists: bool = False
    run_id: str = ""
    ranks: tuple[int, ...] = ()
    newest_step: int | None = None
    """See `newest_step`; None: there is none."""


def find_leftovers(base: Path) -> tuple[list[Leftover], list[Path]]:
    """What is in this user's folder below `base`; and what else is there, or in the place of the folder: not ours.

    Raises OSError.
    """
    found, others, folder = list[Leftover](), list[Path](), user_folder(base)
    if not os.path.lexists(folder):
        return found, others
    if not is_own_folder(folder):
        return found, [folder]
    for path in sorted(folder.iterdir()):
        maker, own = maker_in(path), is_own_folder(path)
        about: dict[str, Any] = {"path": path, "in_use": user_of(path) if own else "", "size": _size(path)}
        if own and maker is not None:
            kind = "agent" if maker[0] == "agent" else "proof"
            found.append(Leftover(kind=kind, pid=maker[1], age_s=time.time() - path.lstat().st_mtime, **about))
        elif own and _ARENA.fullmatch(path.name):
            found.append(Leftover(kind="job", **about, **_look_at_arenas(path)))
        else:
            others.append(path)
    return found, others


def _look_at_arenas(path: Path) -> dict[str, Any]:
    owner: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        owner = read_owner(path)
    directory, run_id, created = owner.get("directory"), owner.get("run_id"), owner.get("created")
    directory = directory if isinstance(directory, str) and os.path.isabs(directory) and "\0" not in directory else ""
    began = created if isinstance(created, (int, float)) and not isinstance(created, bool) else path.lstat().st_mtime
    return {
        "directory": directory,
        "directory_exists": bool(directory) and not is_missing(directory),
        "run_id": run_id if isinstance(run_id, str) else "",
        "ranks": tuple(rank_folders(path)),
        "newest_step": None if (kept := newest_kept(path)) is None else kept[1],
        "age_s": time.time() - began,
    }


def _size(path: Path) -> int:
    """Bytes of memory that the folder takes."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
