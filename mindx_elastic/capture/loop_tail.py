"""What `Collector.loop` says of the code after an epoch (the *tail*); `guard.loops.epoch_tail` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "CHANGES_WEIGHTS",
    "FRONT",
    "OVER",
    "VALUES",
    "changes_weights",
    "front_of",
    "names_of_tail_values",
    "tail_values_in",
    "with_tail_values",
    "without_end",
    "without_step",
]

OVER, VALUES, FRONT = "epoch_is_over", "tail_values", "in_front_of_tail"
"""The keys in `Collector.loop`."""
CHANGES_WEIGHTS = "changes_weights"
"""A key in what `FRONT` has."""


def without_end(loop: Mapping[str, Any]) -> dict[str, Any]:
    """`Collector.loop` as a new epoch begins."""
    return {key: value for key, value in loop.items() if key not in (OVER, VALUES, FRONT)}


def without_step(loop: dict[str, Any]) -> dict[str, Any]:
    """The same as another step has ended."""
    if VALUES not in loop and FRONT not in loop:
        return loop
    return {key: value for key, value in loop.items() if key not in (VALUES, FRONT)}


def front_of(loop: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of a boundary that was copied again after the tail, where there are other ranks: the small state in front of it
    (`Collector.copy_of_small`). None: any other boundary."""
    found = loop.get(FRONT)
    return found if isinstance(found, Mapping) else None


def tail_values_in(loop: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What `loop` has for a tail that comes without a batch, see `epoch_tail.EpochValues`."""
    found = loop.get(VALUES)
    return dict(found) if isinstance(found, Mapping) and OVER not in loop else {}


def names_of_tail_values(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of what `tail_values_in` has found: variables, and attributes of objects."""
    return [
        f"{owner}.{name}" if owner else name
        for owners in values.values()
        for owner, names in owners.items()
        for name in names
    ]


def with_tail_values(loop: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`loop` with those."""
    return {**loop, VALUES: dict(values)}


def changes_weights(front: Mapping[str, Any] | None) -> bool:
    """Whether the tail has, so that the weights in front of it are lost."""
    return front is not None and bool(front.get(CHANGES_WEIGHTS))
