"""How many restarts are left. Pure: times are passed in."""

from __future__ import annotations

__all__ = ["Restarts"]


class Restarts:
    """Counts the restarts after failures."""

    def __init__(self, most: int, window_s: float | None = None) -> None:
        """most: allowed in all, or with `window_s` within any `window_s` seconds."""
        self.most, self.window_s = most, window_s
        self.total = 0
        self._times: list[float] = []

    def take(self, now: float) -> bool:
        """Use one up at `now` (seconds, any monotonic clock); False: none is left."""
        if self.window_s is not None:
            self._times = [then for then in self._times if then > now - self.window_s]
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        self.total += 1
        return True

    @property
    def count(self) -> str:
        """``1 of 3``, for a person."""
        within = "" if self.window_s is None else f" within {self.window_s:g} s"
        return f"{len(self._times)} of {self.most}{within}"

    @property
    def why_not(self) -> str:
        """Why `take` said no."""
        if not self.most:
            return "--max-restarts is 0"
        within = "" if self.window_s is None else f" within {self.window_s:g} s (--max-restarts-window)"
        return f"all {self.most} restarts{within} are used up (--max-restarts)"
