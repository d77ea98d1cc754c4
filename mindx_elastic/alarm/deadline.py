"""When a stopping process must be gone, and how much of that time to keep for the save."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Deadline", "reserve_s"]

# For a process that has not saved yet. Disks of training machines are faster.
_ASSUMED_BYTES_PER_S = 200e6


class Deadline(NamedTuple):
    """`at` is in seconds of `time.monotonic` (this process); `grace_s` is the whole period, in seconds."""

    at: float
    grace_s: float

    @classmethod
    def after(cls, grace_s: float) -> Deadline:
        return cls(at=time.monotonic() + grace_s, grace_s=grace_s)

    def remaining_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - time.monotonic()


def reserve_s(nbytes: int, grace_s: float, *, bytes_per_s: float | None = None) -> float:
    """Seconds to keep back for agreeing on a step and writing `nbytes`; at most half of the grace period.

    `bytes_per_s` is the speed of an earlier save of this process, None when there was none. Twice the expected time,
    because the other ranks of the node write at the same moment.
    """
    expected = nbytes / (bytes_per_s or _ASSUMED_BYTES_PER_S)
    return min(2.0 + 2.0 * expected, 0.5 * grace_s)
