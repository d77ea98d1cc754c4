"""How many seconds to leave between two periodic saves: from what a save costs, and how often the job dies. Pure.

Rare saves lose much work at each death, frequent ones cost time. The best interval between is known in closed form
(Young 1974; the higher terms by Daly 2006). What it needs is measured: the cost by the time that steps with a save take
longer than others, the time between two deaths by the starts of this job so far. On top, saves may not cost more than
one percent of the time.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

__all__ = ["FIRST_S", "SaveInterval", "best_interval"]

FIRST_S = 30.0
"""Until the first save, which shows what one costs."""
_MOST_SHARE = 0.01
_UNKNOWN_MTBF_S = 6 * 3600.0
"""Counts as one such time without a death, until the job itself has lived for longer."""
_PLAIN_STEPS, _FEWEST, _ENOUGH_S = 64, 8, 10.0
_FOLLOWING = 8
_COSTS = 5


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves of `cost_s` seconds each, where a job dies every `mtbf_s` on average, so
    that the least time is spent on saves and on work that is done again."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class SaveInterval:
    """Rank 0's training thread. All times in seconds; `now` by any clock that does not jump."""

    def __init__(self, *, deaths: int = 0, lived_s: float = 0.0) -> None:
        """`deaths`: how often the job has been started again. `lived_s`: since its first start."""
        self._mtbf_s = (max(0.0, lived_s) + _UNKNOWN_MTBF_S) / (deaths + 1)
        self._plain: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._last: float | None = None
        self._following = self._taken = 0
        self._extra = 0.0
        self.seconds = FIRST_S
        """From one save to the next."""

    @property
    def mtbf_s(self) -> float:
        """Between two deaths of the job, as far as it is known."""
        return self._mtbf_s

    @property
    def cost_s(self) -> float | None:
        """Of one save; None: none has been measured."""
        return median(self._costs) if self._costs else None

    @property
    def is_ready(self) -> bool:
        """Whether enough plain steps have been seen to tell what a save costs: some, or one that is long."""
        return not self._following and (len(self._plain) >= _FEWEST or sum(self._plain) >= _ENOUGH_S)

    def passed(self, now: float) -> None:
        """A step is over, and the save that may have followed the one before it."""
        last, self._last = self._last, now
        if last is None:
            return
        if not self._following:
            self._plain.append(now - last)
            return
        self._extra += now - last
        self._taken += 1
        self._following -= 1
        if not self._following:
            self._measured(max(0.0, self._extra - self._taken * median(self._plain)))

    def saves(self) -> None:
        """A save follows the step that was passed last. It may go on beside the next steps."""
        self._following, self._taken, self._extra = _FOLLOWING, 0, 0.0

    def _measured(self, cost_s: float) -> None:
        self._costs.append(cost_s)
        cost_s = median(self._costs)
        self.seconds = max(best_interval(cost_s, self._mtbf_s), cost_s / _MOST_SHARE - cost_s, median(self._plain))
