"""Goes through nested dicts, lists, tuples and deques."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["ATOMS", "leaves_of", "rebuilt"]

ATOMS = frozenset((type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size))
"""Immutable. A set: to look for a type in a tuple compares it with each one, and takes ten times as long."""

_CONTAINERS = (dict, list, tuple, deque)


def leaves_of(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """All that is in `value` and no container, each with its place: ``{place}.exp_avg``."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(value)
    else:
        return [(place, value)]
    found: list[tuple[str, Any]] = []
    for key, item in items:  # no call for what is not a container: states are large
        if isinstance(item, _CONTAINERS):
            found += leaves_of(item, f"{place}.{key}")
        else:
            found.append((f"{place}.{key}", item))
    return found


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` in new containers, with what `change` makes of each leaf. Named tuples are leaves."""
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
