"""One thing that was looked at: how it is, and what to do about it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level"]


class Level(Enum):
    """How much a finding matters, the most harmless first."""

    GOOD = "good"
    WARNING = "warning"
    """The job runs; time, steps or exactness may be lost in some case."""
    PROBLEM = "problem"
    """The job does not run, or loses what it need not lose."""


class Finding(NamedTuple):
    check: str
    """What was looked at, in a word or two; several findings may have the same."""
    level: Level
    text: str
    remedy: str = ""
    """What to do; empty where there is nothing to do."""
