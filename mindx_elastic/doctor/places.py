"""The checkpoint directory, shared memory and the container: whether they can be written to, and how much room is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mindx_elastic.core.printable import printable
from mindx_elastic.doctor.disk import existing_part, measure
from mindx_elastic.doctor.finding import Finding, Level
from mindx_elastic.doctor.machine import available_memory, memory_of_container
from mindx_elastic.doctor.saving import HeldState, judge_memory, judge_room, judge_time
from mindx_elastic.persist.storage import free_space

__all__ = ["file_system", "look_at_directory", "look_at_first_process", "look_at_memory"]

_MEMORY_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "afs")
_SHELLS = ("ash", "bash", "dash", "sh", "zsh")
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


def look_at_directory(
    directory: Path, state: HeldState | None, grace_s: float, *, page_cache: bool
) -> Iterator[Finding]:
    """All that can be said of `directory`, which need not exist. `page_cache`: as in `SavingSettings`."""
    folder = existing_part(directory)
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
