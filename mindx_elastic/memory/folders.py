"""This user's folders in shared memory: where they are, who uses them, and how they are removed.

All folders and files that are removed from a memory file system by name go through the functions at the end of this
module: a rank's when its training has ended well (`remove_rank`), an agent's or a proof's at its end (`remove_own`),
those that killed ones have left (`remove_dead`), and what `mindx-elastic clean` removes (`remove_unused`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import (
    has_ended,
    is_alive,
    is_own_folder,
    is_private_folder,
    open_regular,
    read_json_object,
)
from mindx_elastic.core.status_page import read_page
from mindx_elastic.errors import ArenaError

__all__ = [
    "MAKER_FILE",
    "OWNER_FILE",
    "job_folder",
    "make_own_folder",
    "make_private",
    "make_user_folder",
    "maker_in",
    "maker_of",
    "rank_folders",
    "read_owner",
    "remove_dead",
    "remove_own",
    "remove_rank",
    "remove_unused",
    "user_folder",
    "user_of",
]

MAKER_FILE = "agent.json"
"""In a folder of `make_own_folder`: its maker's pid, start time and process-id namespace."""
OWNER_FILE = "owner.json"
_OWN = re.compile(r"(agent|prove)-(\d+)-.+")
_TRIES = 5
_YOUNG_S = 60.0


def user_folder(base: Path) -> Path:
    """The folder for everything of this user below `base`, whether or not it exists: see `make_user_folder`."""
    return base / f"mindx-elastic-{os.geteuid()}"


def make_user_folder(base: Path) -> Path:
    """The folder of this user below `base`, made if need be. Raises OSError, as `make_private`."""
    return make_private(user_folder(base))


def make_private(folder: Path) -> Path:
    """A folder that this user alone can look into, made if need be. Raises ArenaError where it is another one: any user
    may take a name in a folder like /dev/shm; FileNotFoundError where another process takes it away; OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if is_private_folder(folder):
        return folder
    if not os.path.lexists(folder):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    raise ArenaError(
        f"{folder} is not a folder of this user's own with mode 700: somebody else could read or plant snapshots. "
        f"Remove {folder}, or give another place in MINDX_ARENA_DIR",
        path=folder,
    )


def job_folder(base: Path, directory: Path) -> Path:
    """The folder of the job that writes its checkpoints to `directory` (a resolved path)."""
    name = xxhash.xxh3_64_hexdigest(str(directory).encode())
    return user_folder(base) / name


def rank_folders(job: Path) -> dict[int, Path]:
    """Rank -> folder of a job, of this user's folders only; empty when there is no such job."""
    found: dict[int, Path] = {}
    for path in sorted(job.glob("rank_*")) if is_own_folder(job) else ():
        number = path.name[5:]
        if number.isdecimal() and is_own_folder(path):
            found[int(number)] = path
    return found


def read_owner(job: Path) -> dict[str, Any]:
    """What ``owner.json`` says of a job: ``directory``, ``run_id``, ``created``. Its values are not checked. Raises
    OSError, ValueError."""
    return read_json_object(job / OWNER_FILE)


def make_own_folder(base: Path, kind: str) -> Path:
    """A new private folder of this process, an agent or a proof (`kind`: ``agent``, ``prove``), in the folder of its
    user. Raises OSError."""
    for _ in range(_TRIES):  # the last rank of another job may take the empty parent away in between
        with suppress(FileNotFoundError):
            folder = make_user_folder(base) / f"{kind}-{os.getpid()}-{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            (folder / MAKER_FILE).write_text(own_identity())
            return folder
        if not base.is_dir():
            break
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(base))


def maker_in(folder: Path) -> tuple[str, int] | None:
    """The kind and the process id in the name that `make_own_folder` gives; None for a folder of another kind."""
    match = _OWN.fullmatch(folder.name)
    return None if match is None else (match[1], int(match[2]))


# --- who uses them ---


def maker_of(path: Path) -> str:
    """Says that the agent or proof that made this folder still runs; empty: it does not."""
    found = maker_in(path)
    assert found is not None
    made, own, who = {}, json.loads(own_identity()), f"{'proof' if found[0] == 'prove' else found[0]} {found[1]}"
    with suppress(OSError, ValueError):
        made = read_json_object(path / MAKER_FILE)
    space, ticks = made.get("space"), made.get("started")
    if isinstance(space, str) and space != own["space"]:
        return f"{who} is one of another container; whether it runs cannot be seen from here"
    if not has_ended(found[1], ticks) if isinstance(ticks, str) else is_alive(found[1], path.lstat().st_mtime):
        return f"{who} runs"
    return ""


def user_of(path: Path) -> str:
    """Who uses a folder in a user's folder, in words; empty: it is a dead agent's, proof's or job's."""
    found = maker_in(path)
    if found is None:
        if not any(path.glob("rank_*/lock")) and time.time() - path.lstat().st_mtime < _YOUNG_S:
            return "it is less than a minute old: a job may just be starting"
        with _locks(path) as free:
            return "" if free else "a job runs"
    if maker := maker_of(path):
        return maker
    for page in sorted(path.glob("rank_*.page")):
        status = read_page(page)
        if status is not None and is_alive(status.pid, time.time()):
            return f"agent {found[1]} is gone, its worker {status.pid} still runs"
    inside = user_folder(path)
    for folder in sorted(inside.iterdir()) if is_private_folder(inside) else ():
        if user := user_of(folder):
            return f"proof {found[1]} is gone, its job is not: {user}"
    return ""


@contextmanager
def _locks(path: Path) -> Iterator[bool]:
    """Hold the locks of all ranks of a job; False: another process has one."""
    with ExitStack() as stack:
        for lock in sorted(path.glob("rank_*/lock")):
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
            except OSError:
                yield False
                return
        yield True


# --- removal ---


def remove_rank(folder: Path, release: Callable[[], None]) -> None:
    """Remove the arena of a rank whose training has ended well. The last rank of the machine takes the job's folder and
    the user's too.

    `release`: gives the arena's lock back. Never raises: what others have put there, or taken away, is left.
    """
    job = folder.parent
    try:
        # The lock last: a process that gets it must find nothing that is about to go.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "lock"):
            path.unlink(missing_ok=True)
        release()
        folder.rmdir()
        if not any(job.glob("rank_*")):
            (job / OWNER_FILE).unlink(missing_ok=True)
        job.rmdir()
        job.parent.rmdir()
    except OSError:
        release()  # other ranks, or other jobs, are still there


def remove_own(folder: Path) -> None:
    """Remove the folder of this process. Never raises: the next process of its kind removes what is left."""
    shutil.rmtree(folder, ignore_errors=True)
    _remove_empty(folder.parent)


def remove_dead(parent: Path) -> list[Path]:
    """Remove the folders of this user's dead agents and proofs in `parent` and return them. Never raises.

    Leaves those of other process-id namespaces (containers that share /dev/shm), whose life cannot be seen from here,
    and those whose workers may still be saving.
    """
    removed = []
    for folder in parent.glob("*-*"):
        with suppress(OSError, ValueError):
            known = maker_in(folder) is not None and is_own_folder(folder)
            if known and read_json_object(folder / MAKER_FILE).get("space") and remove_unused(folder):
                removed.append(folder)
                logger.debug("removed %s, left by a process that was killed", folder)
    return removed


def remove_unused(folder: Path) -> bool:
    """Remove a folder of a dead agent, proof or job. False: it is in use. Raises OSError when it cannot be removed."""
    if maker_in(folder) is not None and user_of(folder):
        return False
    with _locks(folder) as free:
        if not free:
            return False
        shutil.rmtree(folder)  # refuses a link, and follows none
    _remove_empty(folder.parent)
    return True


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # other agents, or arenas, are still there
        folder.rmdir()
