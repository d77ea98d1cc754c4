"""Escapes text from others so that it is one line and harmless to a terminal and to a log.

File names, header fields, tensor names, fault reports and the other ranks' messages may come from anywhere. Escape
sequences could colour, hide or rewrite what a person reads, and a line break could forge a line of the log.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "human_size", "listed", "printable", "printable_block"]


def printable(text: object, limit: int | None = None) -> str:
    """`text` on one line, without anything that a terminal would obey or cannot show.

    Control characters, line breaks, marks that change the writing direction, invisible ones and undecodable bytes
    become visible escapes (``\\x1b``). `limit`: most characters of `text` to show; the result then gives its length.
    """
    found = str(text)
    if limit is not None and len(found) > limit:
        # Cut first: what is escaped may be megabytes long.
        found = f"{found[:limit]}... ({len(found)} characters)"
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in found)


def listed(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first `most` items, and how many more there are: ``a, b and 3 more``, or ``a; b; and 3 more``."""
    shown = separator.join(map(str, items[:most]))
    if len(items) <= most:
        return shown
    return f"{shown}{'' if separator == ', ' else separator.rstrip()} and {len(items) - most} more"


def counted(number: int, noun: str) -> str:
    """``1 step``, ``3 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable_block(text: str) -> str:
    """The same line by line, for text whose line breaks are ours."""
    return "\n".join(map(printable, text.split("\n")))


def human_size(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at least 1."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
