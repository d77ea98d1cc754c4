"""Log lines of the threads that stop a job, written by another thread: stderr may be a full pipe that nobody reads.

The lock of a log handler is held while it writes. A thread that logged by itself would wait there for ever, also when
it is another thread that hangs in the pipe.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress

from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread

__all__ = ["LogRelay"]

_PATIENCE_S = 0.25  # so that lines come out in order where somebody reads them


class LogRelay(logging.Filter):
    """While it is open, the package's lines of `threads`, during a stop of all, are handed to a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int | None] = set()
        """Identifiers of the threads that must never wait."""
        self.hurry = False
        """A stop is under way: no thread may."""
        self._hand = ReadyThread("mindx-log")

    def open(self) -> None:
        """Main thread. Raises RuntimeError when there can be no more threads."""
        self._hand.start()
        logger.addFilter(self)

    def close(self) -> None:
        logger.removeFilter(self)
        self._hand.close(_PATIENCE_S)

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.hurry and record.thread not in self.threads:
            return True
        self.do(lambda: logger.callHandlers(record), _PATIENCE_S)
        return False

    def do(self, work: Callable[[], object], timeout_s: float) -> None:
        """Do what may hang (writing, flushing); wait `timeout_s` seconds at most, not at all behind what hangs."""
        patience_s = 0.0 if self._hand.busy else timeout_s
        with suppress(TimeoutError, OSError, ValueError):  # a closed pipe must not keep a dying process
            self._hand.call(work, patience_s)

    def flush(self, timeout_s: float) -> None:
        """What was printed and logged. Any thread."""

        def flush() -> None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            logging.shutdown()

        self.do(flush, timeout_s)
