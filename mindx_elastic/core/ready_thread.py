"""Runs work that may never return (a store, a hanging file system, a full pipe) in a thread that was made beforehand.

The caller waits with a time-out, so that a stop is not held up. The thread is made beforehand because a dying process
may not get another one ("can't start new thread").
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["ReadyThread", "ThreadTask"]

_T = TypeVar("_T")


class ThreadTask(Generic[_T]):
    """One piece of work and its outcome. Made by `ReadyThread.submit`."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self.work = work
        self.result: list[_T] = []
        self.error: BaseException | None = None
        self.done = threading.Event()

    def wait(self, timeout_s: float) -> _T:
        """What the work has returned. Raises its error, or TimeoutError when it takes longer than `timeout_s` seconds.

        After a time-out the work goes on. Any thread.
        """
        if not self.done.wait(max(0.0, timeout_s)):
            raise TimeoutError(f"not done in {timeout_s:g} s")
        if self.error is not None:
            raise self.error
        return self.result[0]


class _Line:
    """The queue of one thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[ThreadTask[Any] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()  # over single assignments
        self.num_open = 0

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job.result.append(job.work())
            except BaseException as error:
                job.error = error
            del job.work  # it may hold much memory, and who waits keeps the job
            with self.lock:
                self.num_open -= 1
            job.done.set()
            del job  # while nothing is to do, keep nothing of what was


class ReadyThread:
    """One thread, one piece of work at a time, in the order of the calls. Any thread may call; so may several."""

    def __init__(self, name: str) -> None:
        """The thread starts with the first call, or with `start`."""
        self.name = name
        self._pid, self._starting = os.getpid(), threading.Lock()
        self._line = _Line()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way or waits."""
        return self._line.num_open > 0

    @property
    def num_waiting(self) -> int:
        """Pieces of work that are not done yet."""
        return self._line.num_open

    def start(self) -> None:
        """Make the thread now. Raises RuntimeError when the process can have no more threads."""
        if self._pid != os.getpid():  # a forked child: the thread stayed with the parent
            self._pid, self._starting, self._thread = os.getpid(), threading.Lock(), None
        with self._starting:
            if self._thread is None:
                line = _Line()
                thread = threading.Thread(target=line.run, name=self.name, daemon=True)
                thread.start()
                self._line, self._thread = line, thread

    def submit(self, work: Callable[[], _T]) -> ThreadTask[_T]:
        """Run `work` in the thread, after what was submitted before. Raises RuntimeError when it cannot be started."""
        if self._thread is None or self._pid != os.getpid():
            self.start()
        job, line = ThreadTask(work), self._line
        with line.lock:
            line.num_open += 1
        line.jobs.put(job)
        return job

    def call(self, work: Callable[[], _T], timeout_s: float) -> _T:
        """`submit` and `ThreadTask.wait` in one; in the thread itself the work is simply done."""
        if threading.current_thread() is self._thread:
            return work()
        return self.submit(work).wait(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread after the work at hand; left alone when that takes longer than `timeout_s` seconds.

        A later call starts another one.
        """
        thread, self._thread = self._thread, None
        if self._pid == os.getpid() and thread is not None:
            self._line.jobs.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout_s)
