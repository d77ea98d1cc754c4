"""What dead jobs have left in shared memory, told from what living ones use.

Below ``{base}/mindx-elastic-{uid}/``: ``agent-{pid}-{random}/``, the private folder of an agent, and ``{16 hex}/``, the
arenas of a job (`memory.arena`). Only folders of this user are looked at; links are never followed, nor are other
names touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.posix import has_ended, is_alive, is_own_folder, open_regular, read_json_object, read_small
from mindx_elastic.core.status_page import read_page
from mindx_elastic.memory.arena import SlotRecord, rank_folders, squatted_folder, user_folders

__all__ = ["AgentLeftover", "ArenaLeftover", "find_agents", "find_arenas", "find_others", "remove"]

_AGENT = re.compile(r"agent-(\d+)-.+")
_ARENA = re.compile(r"[0-9a-f]{16}")
_RECORDS = (0, 64)
"""Where the slots' records lie in the file ``commit``."""
_YOUNG_S = 60.0


@dataclass(frozen=True)
class AgentLeftover:
    """The private folder of an agent."""

    path: Path
    pid: int
    in_use: str
    """Who uses it; empty: nobody."""
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


def find_agents(base: Path) -> list[AgentLeftover]:
    """The agents' folders. Raises OSError."""
    found = []
    for path in _folders(base):
        match = _AGENT.fullmatch(path.name)
        if match:
            pid = int(match[1])
            found.append(AgentLeftover(path, pid, _agent_user(path, pid), _size(path), _age(path.lstat().st_mtime)))
    return found


def find_arenas(base: Path) -> list[ArenaLeftover]:
    """The jobs' arenas. Raises OSError."""
    return [_look_at_arena(path) for path in _folders(base) if _ARENA.fullmatch(path.name)]


def find_others(base: Path) -> list[Path]:
    """What else lies there, or in place of it; none of ours."""
    squatted = squatted_folder(base)
    known = {path for path in _folders(base) if _AGENT.fullmatch(path.name) or _ARENA.fullmatch(path.name)}
    others = [path for path in _entries(base) if path not in known]
    return others if squatted is None or is_own_folder(squatted) else [squatted, *others]


def remove(path: Path) -> bool:
    """Remove one of the folders, unless it is in use: then False. Raises OSError when it cannot be removed."""
    with _locks(path) as free:
        if not free:
            return False
        shutil.rmtree(path)  # refuses a link, and follows none
    with suppress(OSError):
        path.parent.rmdir()  # the user's folder, when this was the last
    return True


def _entries(base: Path) -> list[Path]:
    folders = user_folders(base)
    squatted = squatted_folder(base)
    if squatted is not None and is_own_folder(squatted):  # ours, and no longer private: what is in it may go
        folders.append(squatted)
    return [path for folder in folders for path in sorted(folder.iterdir())]


def _folders(base: Path) -> list[Path]:
    """Real folders of this user in the user's folders."""
    return [path for path in _entries(base) if is_own_folder(path)]


def _agent_user(path: Path, pid: int) -> str:
    agent, own = _read_json(path / "agent.json"), json.loads(own_identity())
    space, ticks = agent.get("space"), agent.get("started")
    if isinstance(space, str) and space != own["space"]:
        return f"agent {pid} is one of another container; whether it runs cannot be seen from here"
    if not has_ended(pid, ticks) if isinstance(ticks, str) else is_alive(pid, path.lstat().st_mtime):
        return f"agent {pid} runs"
    for page in sorted(path.glob("rank_*.page")):
        status = read_page(page)
        if status is not None and is_alive(status.pid, time.time()):
            return f"agent {pid} is gone, its worker {status.pid} still runs"
    with _locks(path) as free:
        return "" if free else "a process has locked it"


def _look_at_arena(path: Path) -> ArenaLeftover:
    owner = _read_json(path / "owner.json")
    directory, run_id, created = owner.get("directory"), owner.get("run_id"), owner.get("created")
    directory = directory if isinstance(directory, str) and os.path.isabs(directory) and "\0" not in directory else ""
    began = created if isinstance(created, (int, float)) and not isinstance(created, bool) else path.lstat().st_mtime
    return ArenaLeftover(
        path=path,
        directory=directory,
        directory_exists=bool(directory) and _exists(directory),
        run_id=run_id if isinstance(run_id, str) else "",
        ranks=tuple(rank_folders(path)),
        newest_step=_newest_step(path),
        in_use=_arena_user(path),
        size=_size(path),
        age_s=_age(began),
    )


def _read_json(path: Path) -> dict[str, object]:
    """An object of ours; empty when there is none."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def _exists(directory: str) -> bool:
    """In doubt (no permission, a stale mount) it does."""
    try:
        os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _newest_step(path: Path) -> int | None:
    common: set[int] | None = None
    for folder in rank_folders(path).values():
        steps = _steps(folder)
        common = steps if common is None else common & steps
    return max(common) if common else None


def _steps(folder: Path) -> set[int]:
    try:
        data = read_small(folder / "commit", 4096)
    except OSError:
        return set()
    records = (SlotRecord.unpack(data[start : start + 64].ljust(64, b"\0")) for start in _RECORDS)
    return {record.step for record in records if record.state}


def _arena_user(path: Path) -> str:
    if not any(path.glob("rank_*/lock")) and _age(path.lstat().st_mtime) < _YOUNG_S:
        return "it is less than a minute old: a job may just be starting"
    with _locks(path) as free:
        return "" if free else "a job runs"


@contextmanager
def _locks(path: Path) -> Iterator[bool]:
    """Hold every lock below the folder; False: somebody else has one. Both kinds: the file says not which is used."""
    with ExitStack() as stack:
        for lock in sorted([*path.glob("rank_*/lock"), *path.glob("lock")]):
            if not is_own_folder(lock.parent):
                continue
            try:
                fd = open_regular(lock, os.O_RDWR)
            except FileNotFoundError:
                continue
            except OSError:
                yield False  # a link, or not ours: not a thing to remove
                return
            stack.callback(os.close, fd)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
        yield True


def _size(path: Path) -> int:
    """Bytes of memory that the folder takes."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _age(since: float) -> float:
    return time.time() - since
