"""Checks what the other ranks have written: text that makes no sense becomes an UntrustedMessageError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindx_elastic.core.printable import printable
from mindx_elastic.errors import MindxError, UntrustedMessageError

__all__ = ["making_sense", "whole_number"]

_BROKEN = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@contextmanager
def making_sense(what: str) -> Iterator[None]:
    """Wrap the reading of a message: an error inside becomes an UntrustedMessageError. `what`: the message, for people.

    Every rank reads the same text, so every rank raises the error.
    """
    try:
        yield
    except MindxError:
        raise
    except _BROKEN as error:
        raise UntrustedMessageError(
            f"{what}, as the store of the process group has it, makes no sense ({type(error).__name__}: "
            f"{printable(error, 200)}). If all ranks run the same version, another program writes to the store: block "
            "access to its port, or give all ranks a key (MINDX_JOB_KEY_FILE)"
        ) from error


def whole_number(text: str, low: int, high: int) -> int:
    """Read a decimal number from `low` to `high`. Raises ValueError for anything else, signs and spaces included."""
    if not 0 < len(text) <= 20 or not text.isascii() or not text.isdecimal() or not low <= int(text) <= high:
        raise ValueError(f"{printable(text, 40)!r} is not a whole number from {low} to {high}")
    return int(text)
