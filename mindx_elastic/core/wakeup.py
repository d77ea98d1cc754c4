"""How a thread wakes up another one, which sleeps in a poll."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["Wakeup"]


class Wakeup:
    """A descriptor, `fd`, that `ring` makes readable. Any thread may ring; the rest is the sleeping thread's."""

    def __init__(self) -> None:
        self.fd, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """`writer`: for `signal.set_wakeup_fd`."""

    def ring(self) -> None:
        with suppress(OSError):  # full: it will wake up anyway
            os.write(self.writer, b"!")

    def drain(self) -> None:
        """`fd` was readable, perhaps."""
        with suppress(BlockingIOError):
            while os.read(self.fd, 512):
                pass

    def close(self) -> None:
        """Not while a thread may still ring: the number could be another file's by then."""
        os.close(self.fd)
        os.close(self.writer)
