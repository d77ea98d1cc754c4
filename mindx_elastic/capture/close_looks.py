"""At which boundaries a guard looks closely: the first four of a process, and two of fifty.

At each boundary the small state is copied. What is large in number and seldom changes (version counters, flags of
modules and parameters, the modules' tables) is looked at in full at close ones only. A change in between shows in one
thing that is looked at always, or by a hook of torch's; where it does not, a save at the boundary looks first, and one
in the middle of a step says what it cannot tell.
"""

from __future__ import annotations

__all__ = ["CLOSE_EVERY", "CLOSE_FIRST", "is_close"]

CLOSE_FIRST, CLOSE_EVERY = 4, 50


def is_close(number: int, step: int, first: int = CLOSE_FIRST) -> bool:
    """The process's `number`-th boundary, that of `step`. Two in a row: a look is compared with the next one."""
    return number <= first or (step + 1) % CLOSE_EVERY < 2
