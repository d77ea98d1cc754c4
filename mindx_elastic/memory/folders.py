"""This user's folders in shared memory: where they are, who uses them, and how they are removed.

All folders and files that are removed from a memory file system by name go through the functions at the end of this
module: a rank's when its training has ended well (`remove_rank`), an agent's at its end (`remove_agent`), those that
killed agents have left (`remove_dead_agents`), a proof's (`remove_proof`, `remove_dead_proofs`), and what
`mindx-elastic clean` removes (`remove_unused`, `remove_unused_proof`).
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

__all__ = [
    "AGENT_FILE",
    "OWNER_FILE",
    "agent_pid",
    "job_folder",
    "make_proof_folder",
    "make_user_folder",
    "maker_of_agent",
    "proof_folders",
    "rank_folders",
    "read_owner",
    "remove_agent",
    "remove_dead_agents",
    "remove_dead_proofs",
    "remove_proof",
    "remove_rank",
    "remove_unused",
    "remove_unused_proof",
    "squatted_folder",
    "user_folder",
    "user_folders",
    "user_of_agent",
    "user_of_job",
    "user_of_proof",
]

AGENT_FILE = "agent.json"
"""In an agent's folder: its pid, start time and process-id namespace."""
OWNER_FILE = "owner.json"
_AGENT = re.compile(r"agent-(\d+)-.+")
_PROOF = re.compile(r"mindx-prove-(\d+)-[0-9a-f]+")
_PROOF_FILE = "prove.json"
_LOCK_S = 5.0
_YOUNG_S = 60.0


def user_folder(base: Path) -> Path:
    """The folder for everything of this user below `base`, whether or not it exists: see `make_user_folder`."""
    return next(iter(user_folders(base)), _usual_folder(base))


def user_folders(base: Path) -> list[Path]:
    """The private folders of this user that there are below `base`, the usual one in front."""
    usual = _usual_folder(base)
    return [path for path in (usual, *sorted(base.glob(f"{usual.name}-*"))) if is_private_folder(path)]


def squatted_folder(base: Path) -> Path | None:
    """The usual name, where it is anything but a private folder of this user."""
    usual = _usual_folder(base)
    return usual if os.path.lexists(usual) and not is_private_folder(usual) else None


def _usual_folder(base: Path) -> Path:
    return base / f"mindx-elastic-{os.geteuid()}"


def make_user_folder(base: Path) -> Path:
    """The folder of this user below `base`, made if need be. Raises OSError.

    Any user may take its usual name in a folder like /dev/shm. Then it gets a random part, so that the name cannot be
    taken beforehand; owner and mode tell every later process that it is this user's. So the next start, the agent and
    the commands find it by looking.
    """
    usual = _usual_folder(base)
    if found := user_folders(base):
        return found[0]
    with suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    if is_private_folder(usual):
        return usual
    if not os.path.lexists(usual):
        raise FileNotFoundError(
            errno.ENOENT, os.strerror(errno.ENOENT), str(usual)
        )  # taken away again: see the callers
    with _one_at_a_time(base):  # all ranks of a machine must come to the same folder
        if found := user_folders(base):
            return found[0]
        folder = base / f"{usual.name}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
    logger.warning("%s is not a folder of this user's own with mode 700; %s is used in its place", usual, folder.name)
    return folder


@contextmanager
def _one_at_a_time(base: Path) -> Iterator[None]:
    """Hold a lock of `base`, or go on without it after a few seconds: any user may hold this lock."""
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + _LOCK_S
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    break
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def job_folder(base: Path, directory: Path) -> Path:
    """The folder of the job that writes its checkpoints to `directory` (a resolved path)."""
    name = xxhash.xxh3_64_hexdigest(str(directory).encode())
    places = [folder / name for folder in user_folders(base)]
    return next((place for place in places if place.is_dir()), user_folder(base) / name)


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


def agent_pid(folder: Path) -> int | None:
    """The process id in the name of an agent's folder; None for a folder of another kind."""
    match = _AGENT.fullmatch(folder.name)
    return None if match is None else int(match[1])


def make_proof_folder(base: Path) -> Path:
    """A private memory file system for the runs of one `mindx-elastic prove`, below `base`. Raises OSError."""
    folder = base / f"mindx-prove-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    (folder / _PROOF_FILE).write_text(own_identity())
    return folder


def proof_folders(base: Path) -> dict[Path, int]:
    """This user's folders that `make_proof_folder` has made below `base`, and the process ids in their names."""
    found = ((path, _PROOF.fullmatch(path.name)) for path in sorted(base.glob("mindx-prove-*")))
    return {path: int(match[1]) for path, match in found if match is not None and is_own_folder(path)}


# --- who uses them ---


def maker_of_agent(path: Path, pid: int) -> str:
    """That the agent `pid`, whose folder this is, still runs, in words; empty: it does not."""
    return _maker(path, AGENT_FILE, "agent", pid)


def user_of_agent(path: Path, pid: int) -> str:
    """Who uses the folder of the agent `pid`, in words; empty: it is a dead agent's."""
    if maker := maker_of_agent(path, pid):
        return maker
    for page in sorted(path.glob("rank_*.page")):
        status = read_page(page)
        if status is not None and is_alive(status.pid, time.time()):
            return f"agent {pid} is gone, its worker {status.pid} still runs"
    with _locks(path) as free:
        return "" if free else "a process has locked it"


def user_of_proof(path: Path, pid: int) -> str:
    """Who uses the folder of the proof `pid`, in words; empty: it is a dead one's, and its jobs have ended, too."""
    if maker := _maker(path, _PROOF_FILE, "proof", pid):
        return maker
    for folder in (each for user in user_folders(path) for each in sorted(user.iterdir())):
        agent = agent_pid(folder)
        if user := user_of_agent(folder, agent) if agent is not None else user_of_job(folder):
            return f"proof {pid} is gone, its job is not: {user}"
    return ""


def _maker(path: Path, file: str, what: str, pid: int) -> str:
    """Whether the process that has made the folder, and has named itself in `file`, still runs, in words; empty: it
    does not."""
    made, own = {}, json.loads(own_identity())
    with suppress(OSError, ValueError):
        made = read_json_object(path / file)
    space, ticks = made.get("space"), made.get("started")
    if isinstance(space, str) and space != own["space"]:
        return f"{what} {pid} is one of another container; whether it runs cannot be seen from here"
    if not has_ended(pid, ticks) if isinstance(ticks, str) else is_alive(pid, path.lstat().st_mtime):
        return f"{what} {pid} runs"
    return ""


def user_of_job(path: Path) -> str:
    """Who uses the arenas of a job, in words; empty: they are a dead job's."""
    if not any(path.glob("rank_*/lock")) and time.time() - path.lstat().st_mtime < _YOUNG_S:
        return "it is less than a minute old: a job may just be starting"
    with _locks(path) as free:
        return "" if free else "a job runs"


@contextmanager
def _locks(path: Path) -> Iterator[bool]:
    """Hold every lock below the folder; False: another process has one. Takes both kinds of lock, because the file does
    not tell which kind is used.
    """
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


def remove_agent(folder: Path) -> None:
    """Remove the folder of this agent. Never raises: the next agent removes what is left."""
    shutil.rmtree(folder, ignore_errors=True)
    _remove_empty(folder.parent)


def remove_dead_agents(parent: Path) -> list[Path]:
    """Remove the folders of this user's dead agents below `parent` and return them. Never raises.

    Leaves those of agents in other process-id namespaces (containers that share /dev/shm), whose life cannot be seen
    from here, and those whose workers may still be saving.
    """
    removed = []
    for folder in parent.glob("agent-*"):
        pid = agent_pid(folder)
        with suppress(OSError, ValueError):
            if pid is None or not is_own_folder(folder) or not read_json_object(folder / AGENT_FILE).get("space"):
                continue
            if not user_of_agent(folder, pid):
                shutil.rmtree(folder)
                removed.append(folder)
                logger.debug("removed %s, left by an agent that was killed", folder)
    return removed


def remove_proof(folder: Path) -> None:
    """Remove the folder of this proof, whose runs have ended. Never raises: the next proof removes what is left."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_dead_proofs(base: Path) -> None:
    """Remove the folders of this user's dead proofs below `base`. Never raises."""
    for folder in proof_folders(base):
        with suppress(OSError):
            remove_unused_proof(folder)


def remove_unused_proof(folder: Path) -> bool:
    """Remove a folder of a dead proof. False: it is in use. Raises OSError when it cannot be removed."""
    pid = proof_folders(folder.parent).get(folder)
    if pid is None or user_of_proof(folder, pid):
        return False
    shutil.rmtree(folder)
    logger.debug("removed %s, left by a proof that was killed", folder)
    return True


def remove_unused(folder: Path) -> bool:
    """Remove a folder of a dead agent or job, for ``mindx-elastic clean``. False: it is in use. Raises OSError when it
    cannot be removed."""
    with _locks(folder) as free:
        if not free:
            return False
        shutil.rmtree(folder)  # refuses a link, and follows none
    _remove_empty(folder.parent)
    return True


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # other agents, or arenas, are still there
        folder.rmdir()
