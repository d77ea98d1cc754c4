"""Memory that is left to the process, by the machine and its container."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["available_memory", "memory_of_container"]

_NO_LIMIT = 1 << 60  # what version 1 of cgroups says for none, and anything like it


def memory_of_container(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's cgroup, version 2 or 1, and those above it leave, as far as they can be seen; None: no
    limit is seen."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    groups = {kind: path for _, kinds, path in (line for line in lines if len(line) == 3) for kind in kinds.split(",")}
    if (root / "cgroup.controllers").exists():
        path, most, used = groups.get("", "/"), "memory.max", "memory.current"
    else:
        path, most, used = groups.get("memory", "/"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        root = root / "memory"
    parts = [part for part in path.split("/") if part not in ("", "..")]
    # From the group's own folder up to the root; inside a container only the root may be there.
    folders = [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    limits = [(limit, _number(folder / used) or 0) for folder in folders if (limit := _number(folder / most))]
    return min((max(0, limit - now) for limit, now in limits if limit < _NO_LIMIT), default=None)


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
