"""The checkpoint directory, shared memory and the container: whether they can be written to, how fast, and how much
room there is."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.saving import Disk, Finding, HeldState, Level, judge_memory, judge_room, judge_time
from mindx_elastic.persist.direct_io import BlockWriter, preallocate
from mindx_elastic.persist.storage import free_space

__all__ = [
    "available_memory",
    "file_system",
    "look_at_directory",
    "look_at_first_process",
    "look_at_memory",
    "measure",
    "memory_of_container",
]

_MEMORY_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "afs")
_SHELLS = ("ash", "bash", "dash", "sh", "zsh")
_MEASURE_S = 1.0
_PIECE_BYTES = 32 << 20
_MOST_BYTES = 4 << 30
_FREE_PART = 10


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


def look_at_directory(
    directory: Path, state: HeldState | None, grace_s: float, *, page_cache: bool
) -> Iterator[Finding]:
    """All that can be said of `directory`, which need not exist. `page_cache`: as in `SavingSettings`."""
    folder = _existing_part(directory)
    kind = file_system(folder)
    where = printable(f"{folder} ({kind})")
    if kind in _MEMORY_SYSTEMS:
        yield Finding(
            "directory",
            Level.PROBLEM,
            f"{where} is in memory: a checkpoint there does not outlive the machine",
            "give a directory on a disk, or on a file system that all nodes see",
        )
    if kind in _NETWORK_SYSTEMS or kind.startswith("fuse."):
        yield Finding(
            "directory",
            Level.WARNING,
            f"{where} is shared over a network: other machines' saves take part of the speed below",
            "run doctor on all machines at the same moment, and take the slowest",
        )
    try:
        disk = measure(folder, _MEASURE_S, page_cache=page_cache)
    except OSError as error:
        text = f"writing to {where} fails: {error.strerror or error}"
        yield Finding("directory", Level.PROBLEM, text, "a save would fail the same way: give another directory")
        return
    yield judge_room(free_space(folder), state, where)
    yield judge_time(disk, state, grace_s)


def look_at_memory(base: Path | None, state: HeldState | None) -> Finding:
    """Shared memory at `base`; None: MINDX_ARENA_DIR=none."""
    if base is None:
        text = "not used (MINDX_ARENA_DIR=none): a killed process loses all steps since the last checkpoint"
        return Finding("shared memory", Level.WARNING, text, "unset MINDX_ARENA_DIR")
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        text = f"{printable(base)} is no folder that user {os.geteuid()} can write to"
        return Finding("shared memory", Level.PROBLEM, text, "mount a tmpfs there, or set MINDX_ARENA_DIR to one")
    return judge_memory(printable(base), free_space(base), state, available_memory(memory_of_container()))


def look_at_first_process() -> Iterator[Finding]:
    """Whether the first process of this container hands signals on."""
    try:
        name = Path("/proc/1/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return
    if name in _SHELLS:
        text = f"process 1 of this container is {name}, which hands no SIGTERM to the program that it runs"
        remedy = "start the program with exec in that script, or with docker run --init"
        yield Finding("platform", Level.WARNING, text, remedy)


# --- measuring ---


def _existing_part(directory: Path) -> Path:
    """`directory`, or the nearest folder above it that exists."""
    path = directory.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def measure(folder: Path, for_s: float, *, page_cache: bool = False) -> Disk:
    """Write to an existing folder for about `for_s` seconds, as saves do. `page_cache`: as in `SavingSettings`. Raises
    OSError. Blocks.

    At most a tenth of the free room is used, and 4 GiB. The file has no name, so nothing remains however this
    process ends.
    """
    data = torch.frombuffer(bytearray(os.urandom(_PIECE_BYTES)), dtype=torch.uint8)  # file systems may compress
    most = min(_MOST_BYTES, free_space(folder) // _FREE_PART)
    with (
        tempfile.TemporaryFile(dir=folder) as file,
        contextlib.closing(BlockWriter(fd := file.fileno(), 0, cached=page_cache)) as writer,
    ):
        pieces = max(1, most // _PIECE_BYTES)
        if most < _PIECE_BYTES:
            data = data[: max(1, most // 4096) * 4096]
        preallocate(fd, pieces * data.nbytes)  # as a save does
        began = time.monotonic()
        written = 0
        for _ in range(pieces):
            writer.put(data)
            written += data.nbytes
            if time.monotonic() - began > for_s:
                break
        writer.finish()
        os.fsync(fd)
        way = "direct I/O" if writer.direct else "the page cache"
        return Disk(written / max(time.monotonic() - began, 1e-6), written, way)


def memory_of_container(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's cgroup (version 2) and those above it leave, as far as they can be seen; None: no limit
    is seen."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    path = next((line[2] for line in lines if len(line) == 3 and not line[1]), "/")
    parts = [part for part in path.split("/") if part not in ("", "..")]
    # From the group's own folder up to the root; inside a container only the root may be there.
    folders = [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    limits = [(_number(folder / "memory.max"), _number(folder / "memory.current") or 0) for folder in folders]
    return min((max(0, limit - now) for limit, now in limits if limit is not None), default=None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def available_memory(left_by_container: int | None, path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of memory that this process may still take, by the machine and by its container; None: not visible."""
    found = [] if left_by_container is None else [left_by_container]
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE):
        found.append(int(match[1]) << 10)
    return min(found, default=None)
