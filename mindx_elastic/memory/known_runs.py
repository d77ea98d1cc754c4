"""Which runs' memory a start may use.

Memory outlives a checkpoint directory that a user has emptied to start anew, and a machine that had no part in the last
runs still holds an older one's. So a run in memory counts only if one of these says that it belongs to this directory:

* the directory: its event log, a checkpoint file of the run, or the *marker* that a run leaves there when its event log
  cannot be written. A marker is an empty file, so a full disk has room for it.
* the memory itself, a *claim* in the job's ``owner.json``: "I could leave no trace in this directory", with the
  identity of the directory. It counts while that is still the same directory, and only if nothing that is known to any
  rank has begun later: of several claims the newest one.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from mindx_elastic.core.events import EVENTS_FILE, lines_backwards, logger, older_generation
from mindx_elastic.core.owners import Owners, Trust
from mindx_elastic.core.posix import open_regular
from mindx_elastic.memory.folders import read_owner

__all__ = ["Claim", "Trace", "claim_of", "known_runs", "leave_trace", "logged_runs", "marked_runs", "usable_runs"]

_MARK_PREFIX, _MARK_SUFFIX = "run-", ".mindx-run"
_LONGEST_NAME = 255
_RUN_ID = b'"run_id": "'
_TIME = re.compile(rb'"time": (\d{1,12}(?:\.\d{1,9})?)')
_FS_IOC_GETVERSION = 0x80087601  # the inode's generation: numbers of deleted inodes are given to new ones


@dataclass(frozen=True)
class Claim:
    """The run that began last on this machine and could leave no trace in the directory, as memory has it."""

    run_id: str
    began: float
    """Unix seconds; of its last attempt here."""


Trace = dict[str, Any]
"""What ``owner.json`` says about the traces of its run in the checkpoint directory; JSON-able."""


def usable_runs(known: Mapping[str, float], claims: Iterable[Claim]) -> set[str]:
    """The runs whose memory may be used. Pure.

    `known`: run -> its last sign of life, unix seconds, of all runs that the directories know. `claims`: of all
    machines; only the newest one can be right, and only if no other run has lived since.
    """
    usable = set(known)
    newest = max(claims, key=lambda claim: (claim.began, claim.run_id), default=None)
    if newest is not None and all(time <= newest.began for run, time in known.items() if run != newest.run_id):
        usable.add(newest.run_id)
    return usable - {""}


def known_runs(
    directories: Sequence[Path], wanted: Collection[str] | None = None, trust: Trust | None = None
) -> dict[str, float]:
    """Run -> its last sign of life, of the runs in the event logs and markers of the directories.

    `wanted`: stop looking when these are found; the run with the newest line is always there. `trust`: whose files
    count. Reads bounded parts of the logs. Any thread; blocks on the disk.
    """
    found: dict[str, float] = {}
    trust = trust or Trust()
    for directory in directories:
        owners = trust.of(directory)
        for runs in (logged_runs(directory, wanted, owners), marked_runs(directory, owners)):
            for run, time in runs.items():
                found[run] = max(time, found.get(run, 0.0))
    return found


def logged_runs(
    directory: Path, wanted: Collection[str] | None = None, owners: Owners | None = None
) -> dict[str, float]:
    """Run -> time of its newest line in the event log of `directory`; see `known_runs`."""
    found: dict[str, float] = {}
    newest = directory / EVENTS_FILE
    for path in (newest, older_generation(newest)):
        for line in lines_backwards(path, owners=owners):
            start = line.find(_RUN_ID)
            if start < 0:
                continue
            run = line[start + len(_RUN_ID) :].partition(b'"')[0].decode("utf-8", "replace")
            if run and run not in found:
                time = _TIME.search(line[:start])
                found[run] = float(time[1]) if time else 0.0
                if wanted is not None and found.keys() >= set(wanted):
                    return found
    return found


def marked_runs(directory: Path, owners: Owners | None = None) -> dict[str, float]:
    """Run -> time of its marker in `directory`; see `known_runs`."""
    found: dict[str, float] = {}
    with suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(_MARK_PREFIX) and entry.name.endswith(_MARK_SUFFIX):
                run = unquote(entry.name[len(_MARK_PREFIX) : -len(_MARK_SUFFIX)])
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if owners is None or owners.problem(status) is None:
                        found[run] = status.st_mtime
    return found


def _marker(directory: Path, run_id: str) -> Path | None:
    name = f"{_MARK_PREFIX}{quote(run_id, safe='')}{_MARK_SUFFIX}"
    return directory / name if len(name) <= _LONGEST_NAME else None


def leave_trace(directory: Path, run_id: str, *, logged: bool) -> Trace:
    """Make `directory` know the run, and return what ``owner.json`` is to say of it. Main thread, at each start.

    `logged`: its event log does. If not, a marker is left; it goes with the first start whose line can be written.
    """
    marker = _marker(directory, run_id)
    if logged:
        if marker is not None:
            with suppress(OSError):
                marker.unlink(missing_ok=True)
        return {"trace": "log"}
    if marker is not None:
        try:
            os.close(open_regular(marker, os.O_WRONLY | os.O_CREAT, 0o644))
            os.utime(marker)  # its age counts: see `usable_runs`
        except OSError as error:
            logger.debug("%s cannot be made: %s", marker, error)
        else:
            return {"trace": "marker"}
    if run_id in logged_runs(directory, [run_id]):
        return {"trace": "log"}  # another rank could write
    logger.warning(
        "%s: nothing can be written there at the moment, not even which run this is; should it be killed before that "
        "works again, a start on this machine goes on from its memory as long as the directory is the same one",
        directory,
    )
    return {"trace": "none", "directory_identity": _identity(directory)}


def claim_of(job: Path, directory: Path) -> Claim | None:
    """The claim of a job's folder in shared memory, if it makes one and `directory` is still the same folder."""
    try:
        owner = read_owner(job)
        run_id, began = owner["run_id"], owner["created"]
        if owner["trace"] != "none" or owner["directory_identity"] != _identity(directory):
            return None
        return Claim(str(run_id), float(began)) if run_id else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _identity(directory: Path) -> list[int]:
    """Of this very folder, not of its name: one that is made anew has another. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        generation = 0
        with suppress(OSError):  # not every file system has generations
            (generation,) = struct.unpack("<I", fcntl.ioctl(fd, _FS_IOC_GETVERSION, b"\0" * 8)[:4])
        return [status.st_dev, status.st_ino, generation]
    finally:
        os.close(fd)
