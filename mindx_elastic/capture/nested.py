"""Goes through nested dicts, lists, tuples and deques."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["leaves_of", "rebuilt"]


def leaves_of(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All that is in `value` and no container, each with its place: ``{place}.exp_avg``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple, deque)):
        for number, item in enumerate(value):
            yield from leaves_of(item, f"{place}.{number}")
    else:
        yield place, value


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` in containers of its own, with what `change` makes of each leaf. Named tuples are leaves."""
    kind = type(value)
    if issubclass(kind, dict):
        made = value.copy()
        for key, item in value.items():
            made[key] = rebuilt(item, change)
        return made
    if kind in (list, tuple):
        return kind([rebuilt(item, change) for item in value])
    if kind is deque:
        return deque([rebuilt(item, change) for item in value], value.maxlen)
    return change(value)
