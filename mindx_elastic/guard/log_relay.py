"""Writes the log lines of a stop in a thread of its own: stderr may be a full pipe that no process reads.

A log handler holds its lock while it writes, so one thread that hangs in the pipe would block every other thread that
logs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress

from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread

__all__ = ["LogRelay"]

_PATIENCE_S = 0.25  # so that lines come out in order where they are read


class LogRelay(logging.Filter):
    """While it is open, it writes the package's log lines of `threads`, and during a stop those of all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int | None] = set()
        """Identifiers of the threads that must never wait for a log line."""
        self.hurry = False
        """A stop is under way: no thread may wait."""
        self._writer = ReadyThread("mindx-log")

    def open(self) -> None:
        """Main thread. Raises RuntimeError when the process can have no more threads."""
        self._writer.start()
        logger.addFilter(self)

    def close(self) -> None:
        logger.removeFilter(self)
        self._writer.close(_PATIENCE_S)

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.hurry and record.thread not in self.threads:
            return True
        self.do(lambda: logger.callHandlers(record), _PATIENCE_S)
        return False

    def do(self, work: Callable[[], object], timeout_s: float) -> None:
        """Do work that may hang (writing, flushing). Waits `timeout_s` seconds at most, not at all for earlier work."""
        patience_s = 0.0 if self._writer.busy else timeout_s
        with suppress(TimeoutError, OSError, ValueError):  # a closed pipe must not keep a dying process
            self._writer.call(work, patience_s)

    def flush(self, timeout_s: float) -> None:
        """Flush what was printed and logged, as far as that is possible in time. Any thread."""

        def flush() -> None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            logging.shutdown()

        self.do(flush, timeout_s)
