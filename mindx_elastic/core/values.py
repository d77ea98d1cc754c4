"""Values of files that are not trusted: one of the wrong type is taken as unknown. Pure."""

from __future__ import annotations

import sys

__all__ = ["real", "text", "whole"]


def whole(value: object) -> int | None:
    """A whole number; None: it is unknown."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def real(value: object) -> float | None:
    """A finite number; None: it is unknown."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def text(value: object) -> str:
    """A text; empty: it is unknown."""
    return value if isinstance(value, str) else ""
