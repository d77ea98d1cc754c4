"""Python's garbage collector, kept from looking through all objects of the process while many are made at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, nothing is collected that only refers to itself; the rest goes as ever. Any thread.

    A state of 20,000 tensors becomes some 100,000 objects, all of which live on. Over that Python looks through all
    objects of the process several times, which takes as long as making them. Not for what takes seconds: a program may
    leave tensors in cycles. A program that has switched the collector off finds it off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
