"""How this process is about to leave, for those who tell others of it: the member of a cluster.

An exit code cannot be read at the interpreter's end, and a process that ends with a stuck training thread runs no
``atexit`` code. So what stops a training notes here how it ends, and runs `last_acts` itself in the second case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

__all__ = ["StopCause", "add_last_act", "flush_output", "last_acts", "note_stop_cause", "noted_stop_cause"]


class StopCause(NamedTuple):
    """The stop of a training."""

    kind: str
    """The kind of the alarm: ``signal``, ``peer``, ``exception``, ..."""
    code: int
    reason: str
    is_own: bool
    """This rank has heard the alarm itself."""


_noted: list[StopCause] = []
_last_acts: list[Callable[[], None]] = []


def note_stop_cause(cause: StopCause) -> None:
    """Any thread; the first one counts."""
    _noted.append(cause)


def noted_stop_cause() -> StopCause | None:
    """How a training of this process was stopped; None: none was."""
    return _noted[0] if _noted else None


def add_last_act(act: Callable[[], None]) -> None:
    """Call `act` before the process ends without the interpreter. It must not block for more than a moment."""
    _last_acts.append(act)


def flush_output() -> None:
    """What was printed, before the process ends without the interpreter. May hang in a full pipe. Any thread."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def last_acts() -> None:
    """Any thread, right before ``os._exit``."""
    for act in _last_acts:
        with suppress(Exception):
            act()
