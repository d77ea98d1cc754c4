"""The checkpoint directory and shared memory: whose they are, whether they can be written to, and how much room is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mindx_elastic.core.owners import check_place
from mindx_elastic.core.posix import is_private_folder
from mindx_elastic.core.printable import human_size, printable
from mindx_elastic.doctor.disk import existing_part, measure
from mindx_elastic.doctor.finding import Finding, good, problem, warning
from mindx_elastic.doctor.saving import HeldState, judge_room, judge_time
from mindx_elastic.errors import UnsafeDirectoryError
from mindx_elastic.memory.folders import user_folder
from mindx_elastic.persist.storage import free_space, try_rename

__all__ = ["file_system", "judge_memory", "look_at_directory", "look_at_memory"]

_MEMORY_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "afs")
_NUM_SLOTS = 2
_LEAST_MEMORY = 1 << 30
_MEASURE_S = 1.0


def file_system(path: Path) -> str:
    """The type of the file system that an existing `path` is on, as mount calls it; ``unknown``: it is not visible."""
    device = os.stat(path).st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        before, _, after = line.partition(" - ")
        if after and before.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"]:
            return printable(after.split()[0])
    return "unknown"


# --- the checkpoint directory ---


def look_at_directory(
    directory: Path,
    state: HeldState | None,
    grace_s: float,
    *,
    allow_shared: bool,
    page_cache: bool,
) -> Iterator[Finding]:
    """All that can be said of `directory`, which need not exist. `page_cache`: as in `SavingSettings`."""
    folder = existing_part(directory)
    name = printable(directory)
    for part in (directory, *directory.absolute().parents):
        if os.path.lexists(part) and not part.is_dir():
            what = "is a link to nothing" if not part.exists() else "is a file" if part.is_file() else "is not a folder"
            yield problem("directory", f"{printable(part)} {what}", "give a directory")
            return
    yield _place(directory, allow_shared=allow_shared)
    kind = file_system(folder)
    where = printable(f"{folder} ({kind})")
    if kind in _MEMORY_SYSTEMS:
        yield problem(
            "directory",
            f"{where} is in memory: a checkpoint there does not outlive the machine",
            "give a directory on a disk, or on a file system that all nodes see",
        )
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        yield problem("directory", f"{where} is mounted read-only", "mount it with rw, or give another directory")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield problem(
            "directory",
            f"user {os.geteuid()} cannot write to {where}",
            f"give a directory of your own, or chown {os.geteuid()} {folder}",
        )
        return
    is_new = "" if folder == directory.absolute() else " (it does not exist; the first start makes it)"
    yield good("directory", f"{name}{is_new} can be written to; {where}")
    if kind in _NETWORK_SYSTEMS or kind.startswith("fuse."):
        yield warning(
            "directory",
            f"{where} is shared over a network: other machines' saves take part of the speed below",
            "run doctor on all machines at the same moment, and take the slowest",
        )
    if why := try_rename(folder):
        text = f"{where}: no file can be renamed ({why}), so each checkpoint is written twice"
        yield warning("directory", text, "give a directory on a disk, and copy it to the bucket from there")
    yield judge_room(free_space(folder), state, where)
    try:
        disk = measure(folder, _MEASURE_S, page_cache=page_cache)
    except OSError as error:
        yield problem(
            "disk speed",
            f"writing to {where} fails: {error.strerror or error}",
            "a save would fail the same way: make room, or give another directory",
        )
        return
    yield from judge_time(disk, state, grace_s)


def _place(directory: Path, *, allow_shared: bool) -> Finding:
    try:
        check_place(directory.resolve())
        check_place(directory)
    except UnsafeDirectoryError as error:
        text, _, remedy = printable(error).partition("; ")
        if allow_shared:
            return warning("owners", f"{text} (accepted by MINDX_ALLOW_SHARED_DIRECTORY=1)", remedy)
        return problem("owners", text, remedy)
    return good("owners", f"no other user can exchange what is in {printable(directory)}")


# --- shared memory ---


def look_at_memory(base: Path | None, state: HeldState | None, limit_left: int | None) -> Iterator[Finding]:
    """Shared memory at `base` (None: MINDX_ARENA_DIR=none). `limit_left`: bytes of memory that the machine has, or that
    the limit of its container leaves; None: it cannot be seen."""
    if base is None:
        yield warning(
            "shared memory",
            "not used (MINDX_ARENA_DIR=none): a killed process loses all steps since the last checkpoint",
            "unset MINDX_ARENA_DIR",
        )
        return
    name = printable(base)
    if not base.is_dir():
        remedy = "mount a tmpfs there, or set MINDX_ARENA_DIR to one"
        yield problem("shared memory", f"{name} is not a folder", remedy)
        return
    if not os.access(base, os.W_OK | os.X_OK):
        yield problem(
            "shared memory",
            f"user {os.geteuid()} cannot write to {name}",
            f"chmod 1777 {base}, or set MINDX_ARENA_DIR to a memory file system of your own",
        )
        return
    if (kind := file_system(base)) not in (*_MEMORY_SYSTEMS, "unknown"):
        yield warning(
            "shared memory",
            f"{name} is on {kind}, not in memory: snapshots are as slow as that",
            "mount a tmpfs there, or set MINDX_ARENA_DIR to one",
        )
    own = user_folder(base)
    if os.path.lexists(own) and not is_private_folder(own):
        yield problem(
            "shared memory",
            f"{printable(own)} is not a private folder of user {os.geteuid()}: nothing can be kept in memory",
            f"remove it (rm -r {own}), or set MINDX_ARENA_DIR to another tmpfs",
        )
    yield judge_memory(name, free_space(base), state, limit_left)


def judge_memory(name: str, free_bytes: int, state: HeldState | None, limit_left: int | None) -> Finding:
    """Whether the snapshots of `state` fit. Pure."""
    room = free_bytes if limit_left is None else min(free_bytes, limit_left)
    bound = (
        ""
        if limit_left is None or free_bytes <= limit_left
        else ", and the machine or the limit of its container has no more"
    )
    text = f"{human_size(room)} free in {name}{bound}"
    if state is None:
        if room >= _LEAST_MEMORY:
            return good("shared memory", text)
        remedy = "docker run --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
        return warning("shared memory", f"{text}: less than most states take twice", remedy)
    need = _NUM_SLOTS * state.nbytes
    size = max(1, -(-int(need * 1.1) // (1 << 30)))
    remedy = (
        f"docker run --shm-size={size}g; Kubernetes: an emptyDir with medium: Memory and sizeLimit: {size}Gi at "
        "/dev/shm, which counts in the container's memory limit"
    )
    text += f"; two snapshots of {human_size(state.nbytes)} take {human_size(need)}"
    if room < need:
        why = "a killed process then loses all steps since the last checkpoint"
        return problem("shared memory", f"{text}: {why}", remedy)
    if room < need * 1.1:
        return warning("shared memory", f"{text}: hardly anything is left for loader workers", remedy)
    return good("shared memory", text)
