"""What saves have cost this process and brought it, told to the agent on the status page, for `agent.metrics`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mindx_elastic.core.status_page import StatusPage

__all__ = ["SaveMeter"]


class SaveMeter:
    """Any thread may use it. Without a `page` it does nothing."""

    def __init__(self) -> None:
        self.page: StatusPage | None = None
        self._lock = threading.Lock()
        self._nbytes = self._stall_ns = 0

    def note(self, step: int, nbytes: int) -> None:
        """A file that a start can go on from is on the disk."""
        with self._lock:
            self._nbytes += nbytes
            if self.page is not None:
                self.page.set(durable_step=step, durable_ns=time.monotonic_ns(), durable_bytes=self._nbytes)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the training thread makes a save and not a step."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            with self._lock:
                self._stall_ns += time.monotonic_ns() - began
                if self.page is not None:
                    self.page.set(stall_ns=self._stall_ns)
