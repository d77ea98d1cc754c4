"""The thread that writes periodic checkpoints during the training."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread

__all__ = ["SaveQueue"]

_MOST_COPIES = 2


class SaveQueue:
    """One thread (``mindx-persist``), one save at a time, in order.

    Memory holds two copies of the state at most: the one that is written, and the next one, which waits or is still
    being made.
    """

    def __init__(self) -> None:
        self._thread = ReadyThread("mindx-persist")
        self._idle = threading.Condition()
        self._num_open = 0

    def start(self) -> None:
        """Start the thread now: later the process may be at its limit. Raises RuntimeError."""
        self._thread.start()

    def reserve(self) -> None:
        """Training thread, before it copies: wait until there is room for one more. `submit` or `give_up` follows."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_open < _MOST_COPIES)
            self._num_open += 1

    def give_up(self) -> None:
        """Free the room that `reserve` has taken: no save follows."""
        with self._idle:
            self._num_open -= 1
            self._idle.notify_all()

    def submit(self, job: Callable[[], bool]) -> None:
        """Training thread, after `reserve`: run `job` in the thread. Raises RuntimeError if no thread can start."""
        waiting = [job]

        def run() -> None:
            try:
                waiting.pop()()  # whose copy goes before `reserve` allows the next one
            except Exception:
                logger.exception("a background save met an unexpected error")
            finally:
                self.give_up()

        self._thread.submit(run)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait for all saves; False when they were not done in `timeout_s` seconds. Any thread."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_open == 0, timeout_s)

    def close(self, timeout_s: float | None) -> None:
        """Training thread: wait for all saves, then end the thread. Gives up waiting after `timeout_s` seconds."""
        if self.drain(timeout_s):
            self._thread.close()
