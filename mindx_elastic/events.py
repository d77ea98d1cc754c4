"""What happened: one JSON object a line in ``events.jsonl``, and one log line for a person.

Format (DESIGN section 6): time (unix s), run_id, attempt, rank, step, event, reason, duration_s, bytes, outcome;
further keys where an event has more to say. Every rank appends to the same file with single `write` calls on an
`O_APPEND` descriptor, so lines of several ranks do not mix on a local file system.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mindx_elastic.ready_thread import ReadyThread

__all__ = ["EventLog", "RankFilter", "attach_console", "logger"]

logger = logging.getLogger("mindx_elastic")
_TAIL_BYTES = 1 << 18
_PATIENCE_S = 0.5  # a line takes 50 us; behind a busy interpreter a few milliseconds
_HANGS_S = 10.0
_MAX_WAITING = 1000  # lines kept in memory for a log that hangs


class RankFilter(logging.Filter):
    """Puts rank, step and attempt in front of every line of the package's console handler."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, attempt: int = 0) -> None:
        super().__init__()
        self.rank, self.world_size, self.attempt = rank, world_size, attempt
        self.step: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        where = [] if self.world_size == 1 else [f"rank {self.rank}"]
        where += [] if self.step is None else [f"step {self.step}"]
        where += [f"attempt {self.attempt}"] if self.attempt else []
        record.mindx_where = " ".join(["mindx_elastic", *where])
        return True


def attach_console(rank_filter: RankFilter, level: str) -> logging.Handler | None:
    """Give the package's logger a stderr handler, unless the program has configured logging itself.

    The lines a user waits for ("Graceful exit is triggered, stop training.") must be seen without any logging set-up;
    the root logger is never touched. Returns the handler to remove later, or None.
    """
    if logger.handlers or logging.getLogger().handlers:
        return None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(mindx_where)s] %(levelname)s %(message)s"))
    handler.addFilter(rank_filter)
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler


class EventLog:
    """Appends events to `path`; usable from any thread. A log that cannot be written warns once, it never raises."""

    def __init__(self, path: Path, *, run_id: str = "", attempt: int = 0, rank: int = 0) -> None:
        self.path = path
        self.run_id, self.attempt, self.rank = run_id, attempt, rank
        self.counters: dict[str, int] = {}
        self._lock = threading.Lock()
        self._broken = False
        self._aside: ReadyThread | None = None
        self._late_since: float | None = None

    def write_aside(self) -> None:
        """From now on another thread writes, and no event is waited for longer than a moment: the file system of a log

        may hang, and must not keep a job from stopping. Raises RuntimeError when there can be no more threads.
        """
        self._aside = ReadyThread("mindx-events")
        self._aside.start()

    def close(self) -> None:
        """End that thread; what hangs is left alone."""
        if self._aside is not None:
            self._aside.close(_PATIENCE_S)
            self._aside = None

    def has_ended(self, rank: int) -> bool:
        """Whether this log says that `rank` has finished in this attempt. Any thread; reads the log's last lines."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read().splitlines()
        except OSError:
            return False
        wanted = {"run_id": self.run_id, "attempt": self.attempt, "rank": rank, "event": "end"}
        for line in reversed(lines):
            if b'"end"' in line:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and all(found.get(key) == value for key, value in wanted.items()):
                    return True
        return False

    def emit(
        self,
        event: str,
        *,
        step: int | None = None,
        reason: str | None = None,
        duration_s: float | None = None,
        nbytes: int | None = None,
        outcome: str | None = None,
        **more: Any,
    ) -> None:
        """Record one event. Keyword values must be JSON-able; unknown objects are written as their `str`."""
        line = {"time": round(time.time(), 6), "run_id": self.run_id, "attempt": self.attempt, "rank": self.rank}
        fields: dict[str, Any] = {
            **line,
            "step": step,
            "event": event,
            "reason": reason,
            "duration_s": None if duration_s is None else round(duration_s, 6),
            "bytes": nbytes,
            "outcome": outcome,
            **more,
        }
        data = (json.dumps(fields, default=str) + "\n").encode()
        if self._aside is None:
            self._append(event, data)
        else:
            self._append_aside(self._aside, event, data)

    def _append_aside(self, aside: ReadyThread, event: str, data: bytes) -> None:
        now = time.monotonic()
        if not aside.busy:
            self._late_since = None
        elif self._late_since is not None and now - self._late_since > _HANGS_S:
            logger.warning("%s has not taken an event for %.0f s; nobody waits for it", self.path, _HANGS_S)
            self._late_since = math.inf  # said
        if aside.num_waiting > _MAX_WAITING:
            return
        job = aside.submit(lambda: self._append(event, data))
        try:
            job.wait(_PATIENCE_S if self._late_since is None else 0.0)
        except TimeoutError:
            self._late_since = now if self._late_since is None else self._late_since

    def _append(self, event: str, data: bytes) -> None:
        with self._lock:
            self.counters[event] = self.counters.get(event, 0) + 1
            if self._broken:
                return
            try:
                # Opened for each line: events are rare, and no descriptor leaks into forked loader workers.
                fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    os.write(fd, data)
                finally:
                    os.close(fd)
            except OSError as error:
                self._broken = True
                logger.warning("cannot append to %s (%s); events are no longer recorded", self.path, error)
