"""Limits of the process and of its container."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.doctor.finding import Finding, gib, good, problem, warning
from mindx_elastic.doctor.saving import State

__all__ = ["CgroupLimits", "available_memory", "judge_limits", "look_at_limits", "read_cgroup"]

_LEAST_FILES, _GOOD_FILES = 256, 4096
_GOOD_THREADS = 2048
_NO_LIMIT = 1 << 60  # what version 1 of cgroups says for none, and anything like it


@dataclass(frozen=True)
class CgroupLimits:
    """What the container may take; None: no limit, or it cannot be seen."""

    memory_bytes: int | None = None
    memory_used: int | None = None
    pids: int | None = None
    pids_used: int | None = None

    @property
    def memory_left(self) -> int | None:
        if self.memory_bytes is None:
            return None
        return max(0, self.memory_bytes - (self.memory_used or 0))


def read_cgroup(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> CgroupLimits:
    """The limits of this process's cgroup, version 2 or 1, and of those above it as far as they can be seen."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return CgroupLimits()
    groups = {kind: path for _, kinds, path in (line for line in lines if len(line) == 3) for kind in kinds.split(",")}
    if (root / "cgroup.controllers").exists():
        unified = _folders(root, groups.get("", "/"))
        memory, pids = unified, unified
        names = ("memory.max", "memory.current")
    else:
        memory = _folders(root / "memory", groups.get("memory", "/"))
        pids = _folders(root / "pids", groups.get("pids", "/"))
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    most, used = _tightest(memory, *names)
    return CgroupLimits(most, used, *_tightest(pids, "pids.max", "pids.current"))


def _folders(root: Path, path: str) -> list[Path]:
    """From the group's own folder up to the root; inside a container only the root may be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _tightest(folders: list[Path], most: str, used: str) -> tuple[int | None, int | None]:
    """The limit that leaves least, and what is used of it."""
    found = []
    for folder in folders:
        limit = _number(folder / most)
        if limit is not None and limit < _NO_LIMIT:
            now = _number(folder / used)
            found.append((limit - (now or 0), limit, now))
    if not found:
        return None, None
    _, limit, now = min(found, key=lambda each: each[0])
    return limit, now


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def available_memory(cgroup: CgroupLimits, path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of memory that this process may still take, by the machine and by its container; None: not visible."""
    found = [] if cgroup.memory_left is None else [cgroup.memory_left]
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        text = ""
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE):
        found.append(int(match[1]) << 10)
    return min(found, default=None)


def look_at_limits(cgroup: CgroupLimits, state: State | None) -> Iterator[Finding]:
    """The limits of this process (``ulimit``), and what its container has of threads."""
    return judge_limits(lambda name: resource.getrlimit(name)[0], cgroup, state)


def judge_limits(soft: Callable[[int], int], cgroup: CgroupLimits, state: State | None) -> Iterator[Finding]:
    """`soft`: the soft limit by the numbers of `resource`."""
    files = soft(resource.RLIMIT_NOFILE)
    text = f"{_amount(files)} open files (ulimit -n)"
    remedy = f"ulimit -n {_GOOD_FILES} before the start (docker run --ulimit nofile={_GOOD_FILES})"
    if 0 <= files < _LEAST_FILES:
        yield problem("limits", f"{text}: loaders and connections of a few ranks need more", remedy)
    elif 0 <= files < _GOOD_FILES // 4:
        yield warning(
            "limits", f"{text}: each recovery in place leaves some open, and loader workers need many", remedy
        )
    else:
        yield good("limits", text)
    rooms = [limit for limit in (soft(resource.RLIMIT_NPROC),) if limit >= 0]
    rooms += [] if cgroup.pids is None else [max(0, cgroup.pids - (cgroup.pids_used or 0))]
    left = min(rooms, default=-1)
    text = f"{_amount(left)} processes and threads (ulimit -u, pids.max)"
    if 0 <= left < _GOOD_THREADS // 8:
        yield problem("limits", f"{text}: torch alone starts tens a rank", _more_threads())
    elif 0 <= left < _GOOD_THREADS:
        yield warning("limits", f"{text}: many ranks with loader workers need more", _more_threads())
    else:
        yield good("limits", text)
    size = soft(resource.RLIMIT_FSIZE)
    if size >= 0 and (state is None or size < state.nbytes):
        text = f"files may have {gib(size)} (ulimit -f)" + (f"; the state has {gib(state.nbytes)}" if state else "")
        yield problem("limits", f"{text}: a save beyond that fails", "ulimit -f unlimited before the start")
    if cgroup.memory_bytes is not None:
        left_text = "" if cgroup.memory_used is None else f", {gib(cgroup.memory_left or 0)} left"
        yield good(
            "limits", f"{gib(cgroup.memory_bytes)} of memory for the container{left_text}; /dev/shm counts in it"
        )


def _more_threads() -> str:
    return "ulimit -u unlimited; docker run --pids-limit=-1; Kubernetes: podPidsLimit of the kubelet"


def _amount(limit: int) -> str:
    return "unlimited" if limit < 0 else f"{limit:,}"
