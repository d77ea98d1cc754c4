"""The thread that writes periodic checkpoints beside the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from mindx_elastic.core.events import logger

__all__ = ["SaveQueue"]

_MOST_COPIES = 2


class SaveQueue:
    """One thread (``mindx-persist``), one save at a time, in order.

    Memory holds two copies of the state at most: the one that is written, and the next one, which waits or is still
    being made.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], bool] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition()
        self._num_open = 0

    def start(self) -> None:
        """Start the thread now: later the process may be at its limit. Raises RuntimeError."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mindx-persist", daemon=True)
            thread.start()
            self._thread = thread

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
        self.start()
        self._jobs.put(job)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait for all saves; False when they were not done in `timeout_s` seconds. Any thread."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_open == 0, timeout_s)

    def close(self, timeout_s: float | None) -> None:
        """Training thread: wait for all saves, then end the thread. Gives up waiting after `timeout_s` seconds."""
        if self._thread is not None and self.drain(timeout_s):
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        job: Callable[[], bool] | None
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a background save met an unexpected error")
            finally:
                job = None  # frees the copy before `reserve` allows the next one
                self.give_up()
