"""The JSON flag file of MindSpore's graceful exit: ``{"GracefulExit": 1}`` (FACTS 1).

It is polled by the watcher thread with one `stat` a period; the file is opened only when it has changed. The training
thread never touches it (opening and parsing it costs 11.7 us a step, FACTS 2.12).
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.events import logger

__all__ = ["FlagFile", "process_started_at", "watch_flag_file"]

_MAX_BYTES = 1 << 20
_COARSEST_MTIME_S = 2.0


def watch_flag_file(watcher: Watcher, flag: FlagFile, period_s: float, on_set: Callable[[Path], None]) -> None:
    """Look at `flag` every `period_s` seconds in the watcher thread and call ``on_set(path)`` there when it is set."""

    def look() -> None:
        if flag.poll():
            on_set(flag.path)
        watcher.call_at(time.monotonic() + period_s, look)

    watcher.post(look)


def process_started_at() -> float:
    """Unix time, in seconds, at which this process was started (from /proc; now, where there is none)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        # Some containers show their own uptime beside the host's start times: never in the future, or every flag were
        # stale.
        return time.time() - max(0.0, age)
    except (OSError, ValueError, IndexError):
        return time.time()


class FlagFile:
    """Watches one flag file. Used by one thread.

    A flag that was set before this process started is stale: it ended the run before, and a restart with the same
    command must go on. Such a flag is named once and then ignored until the file changes.
    """

    def __init__(self, path: Path, *, started_at: float | None = None) -> None:
        self.path = path
        self._started_at = process_started_at() if started_at is None else started_at
        self._seen: tuple[int, int, int] | None = None
        self._warned: str | None = None

    def poll(self) -> bool:
        """Whether the file now asks for a graceful exit. A bad file warns once and is tried again; never raises."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._seen = None
            return False
        except OSError as error:
            return self._warn(f"cannot be read ({error.strerror})")
        identity = (status.st_ino, status.st_mtime_ns, status.st_size)
        if identity == self._seen:
            return False
        if not stat.S_ISREG(status.st_mode):
            self._seen = identity
            return self._warn('is no regular file; put a JSON file {"GracefulExit": 0} there')
        wanted = self._read()
        if wanted is None:
            return False  # half-written: not marked as seen, so it is read again next time
        self._warned = None
        # A file that was just written may change again without a new time stamp (they are as coarse as 2 s).
        if wanted or abs(time.time() - status.st_mtime) > _COARSEST_MTIME_S:
            self._seen = identity
        if wanted and status.st_mtime < self._started_at:
            logger.warning("flag file %s was set before this start; it is taken as done until it changes", self.path)
            return False
        return wanted

    def _read(self) -> bool | None:
        try:
            with open(self.path, "rb") as file:
                content = json.loads(file.read(_MAX_BYTES).decode())
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"is not readable JSON yet ({error})")
            return None
        if not isinstance(content, dict) or "GracefulExit" not in content:
            self._warn('has no key "GracefulExit"; expected {"GracefulExit": 1}')
            return None
        value = content["GracefulExit"]
        if value not in (0, 1, True, False, "0", "1"):
            self._warn(f'has "GracefulExit": {value!r}; expected 0 or 1')
            return None
        return value in (1, True, "1")

    def _warn(self, problem: str) -> bool:
        if problem != self._warned:
            self._warned = problem
            logger.warning("flag file %s %s; it will be read again", self.path, problem)
        return False
