"""Values of files that are not trusted: one of the wrong type is taken as unknown. Pure."""

from __future__ import annotations

__all__ = ["real", "text", "whole"]

_MOST, _MOST_S = 1 << 62, 1e11
"""What is beyond them is no step, rank or size, and no time."""


def whole(value: object) -> int | None:
    """A whole number; None: it is unknown."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST else None


def real(value: object) -> float | None:
    """Seconds; None: they are unknown."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < _MOST_S:
        return None
    return float(value)


def text(value: object) -> str:
    """A text; empty: it is unknown."""
    return value if isinstance(value, str) else ""
