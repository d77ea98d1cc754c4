"""How a thread wakes up the agent's main thread, which sleeps in a poll."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["Wakeup"]


class Wakeup:
    """A descriptor, `fd`, that `ring` makes readable. Any thread may ring; the rest is the main thread's."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def ring(self) -> None:
        with suppress(OSError):  # full: the main thread will wake up anyway
            os.write(self._writer, b"!")

    def drain(self) -> None:
        """`fd` was readable."""
        with suppress(BlockingIOError):
            os.read(self.fd, 512)

    def close(self) -> None:
        """Not while a thread may still ring: the number could be another file's by then."""
        os.close(self.fd)
        os.close(self._writer)
