"""What happened: one JSON object a line in ``events.jsonl``, and one log line for a person.

Format (DESIGN section 6): time (unix s), run_id, attempt, rank, step, event, reason, duration_s, bytes, outcome;
further keys where an event has more to say. Every rank appends to the same file with single `write` calls on an
`O_APPEND` descriptor, so lines of several ranks do not mix on a local file system.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mindx_elastic.printable import printable, printable_block

__all__ = ["EventLog", "RankFilter", "attach_console", "logger"]


class _Shown(logging.Filter):
    """What others have said in a message (file names, reasons, texts of exceptions) is shown, not obeyed.

    On the logger, not on a handler: the program may have handlers of its own. A record is one line, but for tracebacks.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except Exception:  # a message that does not fit its arguments: the handler says so
            return True
        if record.exc_info and not record.exc_text:
            record.exc_text = printable_block(logging.Formatter().formatException(record.exc_info))
        return True


logger = logging.getLogger("mindx_elastic")
logger.addFilter(_Shown())
_TAIL_BYTES = 1 << 18


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
