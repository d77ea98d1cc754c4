"""The tree of TTP checkpoints, as MindSpore's ``train/callback/_train_fault_tolerance.py`` makes it, without a leader.

``{root}/tft_saved_checkpoints-step_{step}/rank_{r}/ttp_rank_{r}-{epoch}_{step_in_epoch}.safetensors``; while it is
being made its first folder carries ``_tmp``. In MindIO a controller renames that folder once every good rank has
reported. Here each rank that has finished looks at the folder, and the first one that finds it whole renames it; a rank
that comes later moves its own files over. A rank that dies on the way changes nothing for the others, and its finished
file counts where it is: every file is written atomically, so `catalog.find_files` looks into ``_tmp`` folders too.

Whole means: every rank has its file. Ranks that are gone, and ranks that do not even begin for a moment, are not waited
for; one that is writing is, for a few seconds. On disks that the nodes do not share each node so gets its own tree.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from mindx_elastic.core.folders import UNFINISHED, step_folder
from mindx_elastic.persist.catalog import rank_of_folder
from mindx_elastic.persist.storage import (
    TEMP_SUFFIX,
    fsync_dir,
    keep_as,
    make_directory_durable,
)
from mindx_elastic.persist.writer import previous_path

__all__ = ["settle_tft_file", "tft_path"]

_QUIET_S = 0.5  # a rank that has not begun by then is dead, or has another disk
_PATIENCE_S = 3.0
_POLL_S = 0.01


def tft_path(root: Path, *, step: int, rank: int, epoch: int, step_in_epoch: int) -> Path:
    """Where a rank's file of a step is written."""
    name = f"ttp_rank_{rank}-{epoch}_{step_in_epoch}.safetensors"
    return root / f"{step_folder(step)}{UNFINISHED}" / f"rank_{rank}" / name


def settle_tft_file(
    path: Path, *, world_size: int, gone: Callable[[], Collection[int]] = frozenset, timeout_s: float = _PATIENCE_S
) -> Path:
    """Give the tree of the finished file `path` (from `tft_path`) its final name; returns where the file is then.

    Blocks for `timeout_s` seconds at most, and no longer than for three. `gone`: ranks known to be dead. A file that is
    there already under the final name is kept as `previous_path` of it. Raises OSError when nothing could be moved; the
    file is sound where it is then. Any thread; the other ranks do the same at the same time.
    """
    own, temporary = path.parent, path.parent.parent
    final = temporary.with_name(temporary.name.removesuffix(UNFINISHED))
    target = final / own.name / path.name
    began = time.monotonic()
    while path.exists() and not final.exists():
        waited = time.monotonic() - began
        finished, writing = _look(temporary)
        missing = set(range(world_size)) - finished - set(gone())
        late = waited >= min(timeout_s, _PATIENCE_S)
        if not writing and (not missing or late or waited >= _QUIET_S):
            with suppress(OSError):  # another rank was faster
                os.rename(temporary, final)
        elif late:
            break  # a rank is stuck while it writes: its folder must not be moved away under it
        else:
            time.sleep(_POLL_S)
    if path.exists():
        _move_files(own, target.parent)
        for folder in (own, temporary):
            with suppress(OSError):  # not empty yet: another rank's turn
                folder.rmdir()
    for folder in (target.parent, final, final.parent):
        fsync_dir(folder)
    if not target.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    return target


def _look(temporary: Path) -> tuple[set[int], bool]:
    """Ranks whose file is there, and whether one is being written."""
    finished: set[int] = set()
    writing = False
    with suppress(OSError):  # renamed meanwhile
        for folder in temporary.glob("rank_*"):
            rank = rank_of_folder(folder)
            if rank is None:
                continue
            names = os.listdir(folder)
            if names and not any(name.endswith(TEMP_SUFFIX) for name in names):
                finished.add(rank)
            else:
                writing = True
    return finished, writing


def _move_files(source: Path, target: Path) -> None:
    make_directory_durable(target)
    for path in sorted(source.iterdir()):
        if path.name.endswith(TEMP_SUFFIX):
            continue
        moved = target / path.name
        if moved.exists():  # of an earlier attempt: its step may be the only one that all ranks have
            keep_as(moved, previous_path(moved))
        os.rename(path, moved)
