"""How a stopping process writes its last lines and ends, whatever hangs in it.

stderr may be a full pipe that no process reads. A log handler holds its lock while it writes, so one thread that hangs
in the pipe would block every other thread that logs: a separate thread writes the lines of a stop (`LogRelay`). The
process ends at once, while the training thread may hang (`end_process`), or by the interpreter's own way,
shortened.
"""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.core.stop_cause import flush_output, last_acts

__all__ = ["LogRelay", "end_process", "shorten_interpreter_exit"]

_PATIENCE_S = 0.25  # so that lines come out in order where they are read
_FLUSH_S = 1.0
_HANGS_S = 0.1  # a line takes 50 us


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
        if self.hurry:
            self._writer.submit(lambda: logger.callHandlers(record))
            return False
        if record.thread not in self.threads:
            return True
        self._do(lambda: logger.callHandlers(record), 0.0 if self._writer.busy else _PATIENCE_S)
        return False

    def _do(self, work: Callable[[], object], timeout_s: float) -> None:
        with suppress(TimeoutError, OSError, ValueError):  # a closed pipe must not keep a dying process
            self._writer.call(work, timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Flush what was printed and logged, as far as that is possible in `timeout_s` seconds; where a line hangs, in
        `_HANGS_S`. Any thread."""

        def flush() -> None:
            flush_output()
            logging.shutdown()

        self._do(lambda: None, _HANGS_S)
        self._do(flush, 0.0 if self._writer.busy else timeout_s)


def end_process(exit_code: int, relay: LogRelay) -> NoReturn:
    """Kill the children (loader workers), flush what was printed and logged, and leave. Any thread; never returns.

    Flushing may hang (a full pipe, a lock of a thread that hangs in it): `relay` waits for it at most a second.
    """
    for child in multiprocessing.active_children():
        child.kill()
    relay.flush(_FLUSH_S)
    last_acts()
    os._exit(exit_code)


def shorten_interpreter_exit() -> None:
    """Flush all files and exclude all objects from garbage collection: the interpreter then ends in 0.15 s, not 0.7 s.

    Without this it searches several times for cycles among all that torch has imported. The program's own ``atexit``
    code runs as usual; objects that only a cycle keeps alive are left to the operating system.
    """
    for item in gc.get_objects():
        if type(item) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):  # closed, or the other end of a pipe is
                item.flush()
    gc.freeze()
