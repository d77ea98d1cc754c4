"""Locks a checkpoint directory for one job. The kernel releases the lock when the process that holds it ends.

Each rank locks one byte of the file ``.mindx-lock`` in each of its directories: the byte at the offset of its rank. It
holds the byte while its guard is entered. A new start waits while its predecessor still holds bytes, because a dying
rank writes its last boundary. If byte 0 stays locked for longer than that, another job is running there and rank 0
raises DirectoryInUseError. The other ranks never raise it: rank 0 already keeps other jobs out. What they meet is a
left-over lock of the predecessor, for example one that a file server keeps for a dead machine, and after the same wait
they continue without the lock. So does rank 0 where the byte's record says that its own job holds it: that machine
stands still, say, and the job has gone on without it. A process that takes a rank's place in a running job waits for a
shorter time.

The locks are the kernel's *open file description* locks on byte ranges. They end with the process, however it ends.
They work between machines where POSIX locks do (NFSv4, Lustre with ``flock``). A POSIX lock is lost when any code in
the process opens and closes the file (a callback that copies the directory is enough); these locks are not. A forked
child shares them and closes its copy in a fork hook, so that a loader worker that outlives a killed rank does not block
the next start.

Rejected: a file with a process id (it outlives its process, and means nothing on another machine); `flock` (one lock
for the whole file: the ranks of a job would have to agree through the store on which of them holds it); a lease with a
heartbeat (a thread would have to write to a slow disk in time).

The agent locks the bytes of its dead workers while it writes their snapshots to disk (`hold_ranks`), so that a start on
another machine waits for these files.

Commands that only read, and a guard that only evaluates, take no lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Between, Words, read_text
from mindx_elastic.core.owners import Owners
from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import DirectoryInUseError
from mindx_elastic.persist.storage import LOCK_FILE

__all__ = ["DirectoryLock", "Holder", "hold_directory", "hold_ranks"]

_LONGEST_JOB = 32
_LONGEST_GRACE_S = 86400.0
_RECORD_BYTES = 256  # per rank, at offset rank * 256
_MARGIN_S = 5.0  # from the end of a grace period until the process is gone
_LEASE_S = 120.0  # an NFSv4 server releases the locks of a dead machine after its lease, usually 90 s
_POLL_S = (0.001, 0.5)  # the process that takes a killed rank's place may come while that process gives its memory back
_SAY_S = 0.2  # a shorter wait is not worth a word
_RETRY_S = 0.02
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_MODE = 0o600  # a user who can open the file can lock it


@dataclass(frozen=True)
class Holder:
    """The process that holds a byte, as its record in the file says."""

    rank: int
    host: Annotated[str, Words(200)] = ""
    pid: Annotated[int, Between(1, 1 << 31)] = 0
    since: Annotated[float, Between(0, 1e11)] = 0.0
    """Unix seconds; 0: not recorded."""
    grace_s: Annotated[float, Between(0, 1e9)] | None = None
    job: str = ""
    """A name of its job that no other one has; empty: it has none."""

    def __str__(self) -> str:
        if not self.pid:
            return f"rank {self.rank} of another job (its record cannot be read)"
        return f"rank {self.rank} of another job, {self.process}"

    @property
    def process(self) -> str:
        """The process in words."""
        if not self.pid:
            return "its record cannot be read"
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on host {self.host}, since {began}"


class DirectoryLock:
    """A rank's lock on one directory. `close` releases it; so does the end of the process.

    The last process to release its byte deletes the file. A process that has opened the file meanwhile notices that and
    opens a new one.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path, self._owner = fd, path, os.getpid()
        _held.add(self)
        _close_in_children()

    def close(self) -> None:
        if self._fd < 0:
            return
        if os.getpid() == self._owner:  # not in a forked child
            with suppress(OSError):
                _control(self._fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)
                # Delete the file only with a lock on all of it: then no other process can lock a byte meanwhile.
                if _lock(self._fd, 0, 0) and _is_at(self._fd, self._path):
                    self._path.unlink()
        os.close(self._fd)
        self._fd = -1


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()
_hooked = False


def _close_in_children() -> None:
    global _hooked  # a hook cannot be taken back
    if not _hooked:
        os.register_at_fork(after_in_child=_close_all)
        _hooked = True


def _close_all() -> None:
    for lock in list(_held):
        lock.close()


def hold_directory(
    directory: Path,
    ranks: RankInfo,
    owners: Owners,
    *,
    grace_s: float,
    joins: bool = False,
    job: str = "",
    file: str = LOCK_FILE,
    other: str = "",
) -> DirectoryLock | None:
    """Lock `directory` for this rank. Returns None, and logs one warning, where locking does not work.

    Waits for a predecessor for as long as its grace period may last (`grace_s` where the file does not record one).
    `owners`: the users whose lock file is trusted. `joins`: the job runs already, and this process is new in it, or
    enters again. `job`: a name of this job that no other one has, over all its restarts. `file`: the lock file's name.
    `other`: what another holder is, where it is no rank. Main thread; blocks. Raises DirectoryInUseError, on rank 0
    only, where another job holds it.
    """
    path = directory / file
    try:
        return _locked(path, owners, _Taking(directory, path, ranks, grace_s, joins, job, other).take)
    except OSError as error:
        reason = error.strerror or error
        logger.warning("%s cannot be locked (%s); a second job in this directory will not be noticed", path, reason)
    return None


def hold_ranks(
    directory: Path, ranks: Iterable[int], owners: Owners, *, patience_s: float, lasts_s: float
) -> tuple[DirectoryLock | None, str]:
    """Lock the bytes of several ranks, whose processes are dead, in `directory`.

    Returns the lock, and why some bytes are not locked ("" when all are). Waits up to `patience_s` for bytes that
    another process holds, then continues with the others. Other starts wait for these bytes for `lasts_s`. `owners`:
    the users whose lock file is trusted. Raises nothing. Any thread; blocks.
    """
    path, wanted, problem = directory / LOCK_FILE, sorted(ranks), ""
    until = time.monotonic() + patience_s

    def take(fd: int) -> bool:
        nonlocal problem
        # Retry on the same descriptor: it keeps the bytes that are locked already.
        while (taken := [rank for rank in wanted if not _lock(fd, rank)]) and time.monotonic() < until:
            time.sleep(_RETRY_S)
        for rank in set(wanted) - set(taken):
            _sign(fd, rank, lasts_s)
        problem = f"{directory} is in use by {_read(fd, taken[0])}" if taken else ""
        return True

    try:
        return _locked(path, owners, take), problem
    except OSError as error:
        return None, f"{path} cannot be locked ({error.strerror or error})"


def _locked(path: Path, owners: Owners, take: Callable[[int], bool]) -> DirectoryLock | None:
    """`take` locks bytes of the file that has the name `path`; again where another process deletes it meanwhile. None:
    `take` gives up."""
    while True:
        fd = _open(path, owners)
        try:
            if not take(fd):
                return None
            if _is_at(fd, path):
                lock, fd = DirectoryLock(fd, path), -1
                return lock
        finally:
            if fd >= 0:
                os.close(fd)


class _Taking:
    def __init__(
        self, directory: Path, path: Path, ranks: RankInfo, grace_s: float, joins: bool, job: str, other: str
    ) -> None:
        self._directory, self._path, self._ranks, self._other = directory, path, ranks, other
        self._grace_s, self._joins, self._job = grace_s, joins, job[:_LONGEST_JOB]
        self._began = time.monotonic()
        self._said = False

    def take(self, fd: int) -> bool:
        """Lock this rank's byte, and wait for it. False: this rank continues without the lock."""
        pause = _POLL_S[0]
        while (holder := self._try(fd)) is not None:
            if not self._wait_on(holder):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        _sign(fd, self._ranks.rank, self._grace_s, self._job)
        return True

    def _try(self, fd: int) -> Holder | None:
        """Lock this rank's byte. Returns the process that prevents it; None: the byte is locked."""
        if not _lock(fd, self._ranks.rank):
            return _read(fd, self._ranks.rank)
        if self._ranks.local_rank == 0:  # also wait for the higher ranks of a larger predecessor
            other = _first_held(fd, self._ranks.world_size)
            if other is not None and self._time_left(holder := _read(fd, other)) > 0:
                # It is not ours until those have ended.
                _control(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self._ranks.rank, 1)
                return holder
        return None

    def _is_ours(self, holder: Holder) -> bool:
        """Whether it is this rank of this very job, on a machine that the job has lost."""
        return self._joins or (bool(self._job) and holder.job == self._job)

    def _time_left(self, holder: Holder) -> float:
        grace_s = self._grace_s if holder.grace_s is None else min(holder.grace_s, _LONGEST_GRACE_S)
        patience_s = _MARGIN_S if self._joins else grace_s + _MARGIN_S
        if (
            not self._is_ours(holder)
            and self._ranks.rank == 0
            and holder.rank == 0
            and holder.host not in ("", socket.gethostname())
        ):
            patience_s = max(patience_s, _LEASE_S)
        return self._began + patience_s - time.monotonic()

    def _words(self, holder: Holder) -> str:
        return f"{self._other}, {holder.process}" if self._other else str(holder)

    def _wait_on(self, holder: Holder) -> bool:
        """Whether to try again. False: the wait is over, and this rank continues without the lock."""
        left_s, waited_s = self._time_left(holder), time.monotonic() - self._began
        if left_s > 0:
            if not self._said and waited_s > _SAY_S:
                self._said = True
                text = "%s is in use by %s; waiting for its end, %.0f s at most"
                logger.warning(text, self._directory, self._words(holder), left_s)
            return True
        if self._ranks.rank != 0 or self._is_ours(holder):
            text = "%s: rank %d goes on, though after %.0f s its predecessor still holds it: %s"
            logger.warning(text, self._directory, self._ranks.rank, waited_s, holder.process)
            return False
        raise DirectoryInUseError(
            f"{self._directory} is in use by {self._words(holder)}; it did not end in {waited_s:.0f} s. End it, or "
            f"give this job a separate directory. (NFS may keep a dead machine's lock; if nothing runs there, delete "
            f"{self._path})",
            path=self._directory,
            host=holder.host,
            pid=holder.pid,
            since=holder.since,
        )


def _open(path: Path, owners: Owners) -> int:
    """Open the lock file, or create it. Only its owner can, and root."""
    fd = open_regular(path, os.O_RDWR | os.O_CREAT, _MODE)
    status = os.fstat(fd)
    problem = owners.problem(status)
    if status.st_nlink > 1:
        problem = "has a second name (a hard link), so that it may be another file than ours"
    if problem is not None:
        os.close(fd)
        raise OSError(errno.EPERM, problem, str(path))
    return fd


def _sign(fd: int, rank: int, grace_s: float, job: str = "") -> None:
    record: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    record |= {"since": round(time.time(), 3), "grace_s": grace_s, **({"job": job} if job else {})}
    label = json.dumps(record).encode()
    label = label[: _RECORD_BYTES - 1].ljust(_RECORD_BYTES - 1) + b"\n"
    with suppress(OSError):  # a full disk: the lock works without its record
        os.pwrite(fd, label, rank * _RECORD_BYTES)


def _read(fd: int, rank: int) -> Holder:
    try:
        label = os.pread(fd, _RECORD_BYTES, rank * _RECORD_BYTES)
        return replace(read_text(Holder, label, _RECORD_BYTES), rank=rank)
    except (OSError, ValueError):
        return Holder(rank)


# --- the kernel's locks ---


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _lock(fd: int, byte: int, length: int = 1) -> bool:
    """Lock `length` bytes (0: all that follow). False: another process holds one of them. Raises OSError where the file
    system has no locks."""
    try:
        _control(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte, length)
    except OSError as error:
        if error.errno not in _BUSY:
            raise
        return False
    return True


def _first_held(fd: int, start: int) -> int | None:
    """The lowest byte from `start` on that another process holds."""
    kind, _, first, _, _ = _control(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, 0)
    return None if kind == fcntl.F_UNLCK else max(first, start)


def _control(fd: int, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
    return _FLOCK.unpack(fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)))
