"""The watcher: a daemon thread that receives signals, events and timers, whatever the training thread does.

A Python signal handler runs only between two bytecodes of the main thread, so a rank that sits in a hung collective
never runs it. `signal.set_wakeup_fd` makes C code write the signal's number to a socket instead, and this thread
sleeps in `poll` on the other end. Other threads wake it through the same socket when they post a callback.

Rejected: `signal.sigwait` in a thread (needs the signal blocked in *every* thread, also those that libraries start);
`signalfd` (the same, and Linux only); work in the handler itself (never runs in a hang, and may re-enter any lock).
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from mindx_elastic.core.events import logger

__all__ = ["Watcher"]

_POST = 0  # not a signal number: a callback was posted


class Watcher:
    """Runs callbacks in one thread: on signals, on posts, at times.

    `on_signal(signum)` is called in the watcher thread. An error of a callback is logged and the thread goes on:
    without it the process would hear no alarm.
    """

    def __init__(
        self, on_signal: Callable[[int], None], *, name: str = "mindx-watcher", patience_s: float = 60.0
    ) -> None:
        """`name`: of the thread. `patience_s`: how long `stop` waits for a callback that hangs."""
        self._on_signal, self._patience_s = on_signal, patience_s
        self._receiver, self._sender = socket.socketpair()
        # Non-blocking on both ends: the C signal handler must never block, and a full buffer already means "wake up".
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._inbox: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._descriptors: dict[int, Callable[[], None]] = {}
        self._poll = select.poll()  # not select(): it cannot watch descriptors from 1024 on
        self._poll.register(self._receiver, select.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def wakeup_fd(self) -> int:
        """The descriptor for `signal.set_wakeup_fd`."""
        return self._sender.fileno()

    @property
    def ident(self) -> int | None:
        """Thread identifier, None before `start`."""
        return self._thread.ident

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the callback in progress. Any thread but the watcher; posts left over are dropped.

        A callback that hangs (in a file system) is abandoned after a while, with its thread.
        """
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(self._patience_s)
            if self._thread.is_alive():
                logger.warning("the thread %s hangs in a system call; leaving without it", self._thread.name)
                return
        self._receiver.close()
        self._sender.close()

    def post(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the watcher thread soon. Any thread, never blocks."""
        self._inbox.append(callback)
        self._wake()

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Run `callback` in the watcher thread at `when` (`time.monotonic` seconds). Any thread."""
        self.post(lambda: heapq.heappush(self._timers, (when, next(self._ids), callback)))

    def every(self, period_s: float, look: Callable[[], None]) -> None:
        """Run `look` in the watcher thread now and again, each time `period_s` seconds after the last. Any thread."""

        def again() -> None:
            try:
                look()
            finally:
                self.call_at(time.monotonic() + period_s, again)

        self.post(again)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Run `callback` in the watcher thread once `fd` is readable, then forget it. Any thread.

        The caller keeps the descriptor and closes it after `stop`.
        """

        def register() -> None:
            self._descriptors[fd] = callback
            self._poll.register(fd, select.POLLIN)

        self.post(register)

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake already; closed: it is gone
            self._sender.send(bytes([_POST]))

    def _run(self) -> None:
        while not self._stopping:
            timeout_ms = None if not self._timers else max(0.0, self._timers[0][0] - time.monotonic()) * 1000
            ready = dict(self._poll.poll(timeout_ms))
            for number in self._drain():
                if number != _POST:
                    self._call(lambda number=number: self._on_signal(number))  # type: ignore[misc]
            for fd, event in ready.items():
                if fd in self._descriptors and not self._stopping:
                    self._poll.unregister(fd)
                    callback = self._descriptors.pop(fd)
                    if not event & select.POLLNVAL:  # else the descriptor was closed
                        self._call(callback)
            while self._inbox and not self._stopping:
                self._call(self._inbox.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic() and not self._stopping:
                self._call(heapq.heappop(self._timers)[2])

    def _drain(self) -> bytes:
        try:
            return self._receiver.recv(4096)
        except BlockingIOError:
            return b""

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            logger.exception("unexpected error in the watcher thread; it goes on")
