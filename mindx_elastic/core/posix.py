"""POSIX calls that the whole package makes in one way: files that others may have put there, our folders,
processes as /proc shows them.

Every file of ours is opened with `open_regular`: another user, or an earlier job, may have put a link, a pipe or a
device in its place. A process id alone names no process, because numbers are used again (in containers at once):
`ProcessStat.started` goes with it.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mindx_elastic.errors import StrPath

__all__ = [
    "ProcessStat",
    "answered_by",
    "boot_id",
    "catches",
    "has_ended",
    "is_alive",
    "is_missing",
    "is_own_folder",
    "is_private_folder",
    "killed_by",
    "members_of",
    "new_map",
    "open_pidfd",
    "open_regular",
    "process_started_at",
    "read_json_object",
    "read_small",
    "read_stat",
    "size_of",
    "start_ticks",
    "thread_pidfds",
]

SMALL_BYTES = 1 << 16
_PF_EXITING = 0x4  # include/linux/sched.h; part of the kernel's interface through /proc/PID/stat
_STOPS = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_LOOKS, _LOOK_AGAIN_S = 5, 0.0002
_MOST_THREADS = 2
_SLACK_S = 2.0  # the wall clock may have been adjusted a little in between


def open_regular(path: StrPath, flags: int = os.O_RDONLY, mode: int = 0o600, *, follow_link: bool = False) -> int:
    """Open a regular file and return its descriptor, which child processes do not inherit.

    Does not follow a link in the file's place (ELOOP), does not wait at a pipe, and refuses everything else that is not
    a regular file (EINVAL). `mode`: of a file that ``os.O_CREAT`` makes. `follow_link`: for a path that the user has
    named. Raises OSError. Any thread.
    """
    flags |= os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    if not flags & os.O_EXCL:  # a new file cannot be a pipe, and its writes must not be cut short by any file system
        flags |= os.O_NONBLOCK
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return fd


def new_map(path: Path, nbytes: int) -> mmap.mmap:
    """A new file of zeros in place of what is at `path`, mapped. Its memory is reserved: else a store into it would be
    a SIGBUS where the memory file system is full. Raises OSError, and leaves no file then."""
    path.unlink(missing_ok=True)
    fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def read_small(path: StrPath, max_bytes: int = SMALL_BYTES) -> bytes:
    """The first `max_bytes` of a file, opened with `open_regular`. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        return file.read(max_bytes)


def size_of(path: StrPath) -> int:
    """Of a file, in bytes; 0 where there is none, or it cannot be seen."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read_json_object(path: StrPath) -> dict[str, Any]:
    """The JSON object in a small file. Raises OSError, and ValueError for anything else in it."""
    try:
        content = json.loads(read_small(path))
    except RecursionError:
        raise ValueError(f"{os.fspath(path)}: nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"{os.fspath(path)}: not a JSON object")
    return content


def is_missing(path: StrPath) -> bool:
    """Whether there is certainly nothing at `path`; False in doubt (no permission, a stale mount)."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def is_own_folder(path: StrPath) -> bool:
    """Whether `path` is a folder of this user, not a link to one. Others may have access to it."""
    return _own_folder_mode(path) is not None


def is_private_folder(path: StrPath) -> bool:
    """Whether `path` is a folder of this user to which no other user has access."""
    mode = _own_folder_mode(path)
    return mode is not None and not mode & 0o077


def _own_folder_mode(path: StrPath) -> int | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mode if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() else None


# --- processes ---


class ProcessStat(NamedTuple):
    """The fields of ``/proc/PID/stat`` that are used here."""

    state: str
    """One letter as in ps: R running, S sleeping, D uninterruptible, T stopped, t traced, Z and X ended."""
    session: int
    flags: int
    """The kernel's flags of the main thread."""
    started: str
    """Clock ticks since the boot, as text: with the process id it names a process for good."""
    exit_status: int = 0
    """Of a main thread that is ending, as `os.waitpid` gives it; 0 where /proc does not say."""

    @property
    def is_ending(self) -> bool:
        """Whether its main thread is on its way out, or already gone while others of its threads still die."""
        return self.state in ("Z", "X", "x") or bool(self.flags & _PF_EXITING)


def read_stat(pid: int) -> ProcessStat | None:
    """What /proc says of a process. None: there is no such process, or /proc cannot be read. Any thread."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The name, in brackets, may contain anything; the fields after it may not.
        fields = text.rpartition(")")[2].split()
        return ProcessStat(
            state=fields[0],
            session=int(fields[3]),
            flags=int(fields[6]),
            started=fields[19],
            exit_status=int(fields[49]),
        )
    except (OSError, IndexError, ValueError):
        return None


def catches(pid: int, signum: int) -> bool:
    """Whether the process `pid` has a handler for the signal. False: it has none, or /proc does not say. Any thread."""
    with suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def start_ticks(pid: int) -> str:
    """When the running process `pid` began, in clock ticks since the boot; empty when there is none, or it has ended
    and was not waited for."""
    found = read_stat(pid)
    return "" if found is None or found.state in ("Z", "X") else found.started


def is_alive(pid: int, known_at: float | None) -> bool:
    """Whether the process `pid` that a file of unix time `known_at` names still runs.

    A process that began later has only inherited the number. None: any process of that number counts.
    """
    ticks = start_ticks(pid) if pid > 0 else ""
    return bool(ticks) and (known_at is None or _unix_time(ticks) <= known_at + _SLACK_S)


def process_started_at() -> float:
    """When this process was started, unix seconds; now, where /proc does not say."""
    ticks = start_ticks(os.getpid())
    return min(_unix_time(ticks), time.time()) if ticks else time.time()


def _unix_time(ticks: str) -> float:
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + int(ticks) / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int, started: str) -> bool:
    """Whether the process `pid` that began at `started` is certainly gone: before what it has left is removed."""
    if read_stat(pid) is not None:
        return start_ticks(pid) != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False  # /proc could not be read


def members_of(sessions: Collection[int]) -> list[int]:
    """Process ids of all members of these sessions, also of those that have ended and were not waited for. Any thread.

    Two microseconds for each process of the machine. Empty where /proc cannot be read.
    """
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with suppress(OSError):
                    if os.getsid(int(name)) in sessions:
                        found.append(int(name))
    return found


def open_pidfd(pid: int, started: str | None = None) -> int:
    """A descriptor that becomes readable when the process ends, however it ends; child processes do not inherit it.

    `started`: as in `ProcessStat`. Raises ProcessLookupError when the process is gone or its number belongs to another
    one, OSError where the kernel or a sandbox does not allow it.
    """
    try:
        fd = os.pidfd_open(pid)
    except AttributeError:  # a Python that was built on an old kernel
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if started is not None and start_ticks(pid) != started:
        os.close(fd)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return fd


def thread_pidfds(pid: int) -> list[int]:
    """Descriptors that become readable when one of the oldest threads of a process other than its main thread ends.

    A killed process is gone when the last of its threads has given the memory back: 20 ms for torch, 100 ms for a GiB.
    The others end at once, so two of them show a death that much earlier; `killed_by` says whether it is one. Empty
    where the kernel cannot watch threads (before Linux 6.9), or there are none.
    """
    found: list[int] = []
    with suppress(OSError, AttributeError):
        for thread in sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")):
            if thread != pid and len(found) < _MOST_THREADS:
                with suppress(ProcessLookupError):
                    found.append(os.pidfd_open(thread, os.O_EXCL))  # PIDFD_THREAD
    return found


def killed_by(pid: int, started: str | None = None) -> int:
    """After a thread of a process has ended: the signal that is ending the process for certain; 0: it is not known.

    Its main thread runs no program any more then, and never will. Any thread; takes a millisecond at most.
    """
    for _ in range(_LOOKS):
        found = read_stat(pid)
        if found is None or (started is not None and found.started != started):
            return 0
        # The status alone would not do: while a process is traced it may be a signal that has not ended anything.
        if found.is_ending and (signum := found.exit_status & 0x7F) and signum not in {0x7F, *_STOPS}:
            return signum
        time.sleep(_LOOK_AGAIN_S)
    return 0


def boot_id() -> str:
    """Names this boot of this machine. Raises OSError where /proc cannot be read."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def answered_by(handler: Callable[[int, FrameType | None], object], signals: Collection[int]) -> Iterator[None]:
    """These signals call `handler` in the block, but not those that are ignored (SIGHUP under nohup). Main thread."""
    heard = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
