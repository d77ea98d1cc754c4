"""Reads one batch ahead, where only the end of a stream tells which batch was its last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["with_last"]


def with_last(loader: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Its batches, and whether each is the last one."""
    batches = iter(loader)
    nothing: Any = object()
    batch = next(batches, nothing)
    while batch is not nothing:
        following = next(batches, nothing)
        yield batch, following is nothing
        batch = following
