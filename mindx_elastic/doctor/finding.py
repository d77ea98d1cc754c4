"""One thing that was looked at: how it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Level", "good", "problem", "unknown", "warning", "worst"]


class Level(Enum):
    """How much a finding matters, the most harmless first."""

    GOOD = "good"
    UNKNOWN = "not visible"
    """It cannot be seen from here, and the remedy says where to look."""
    WARNING = "warning"
    """The job runs; time, steps or exactness may be lost in some case."""
    PROBLEM = "problem"
    """The job does not run, or loses what it need not lose."""


@dataclass(frozen=True)
class Finding:
    check: str
    """What was looked at, in a word or two; several findings may have the same."""
    level: Level
    text: str
    remedy: str = ""
    """What to do; empty where there is nothing to do."""


def good(check: str, text: str) -> Finding:
    return Finding(check, Level.GOOD, text)


def unknown(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.UNKNOWN, text, remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.PROBLEM, text, remedy)


def worst(findings: Iterable[Finding]) -> Level:
    """The level of the worst of `findings`; `Level.GOOD` where there are none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.GOOD)
