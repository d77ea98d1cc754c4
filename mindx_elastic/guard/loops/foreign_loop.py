"""Finds a loop that a library runs: its trainer (an Engine, a Runner, a Learner) calls the program back, counts its
steps by itself and begins anew in a resumed run.

What runs decides, not the source: the innermost function that was already running at the boundary before has the loop
in it, or called it.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from mindx_elastic.guard.checks.surroundings import is_library

__all__ = ["ForeignLoop"]

_NONE = ("torch", "mindx_elastic", "builtins")


class ForeignLoop:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: list[FrameType] = []

    def at_first_boundary(self, frame: FrameType | None, entered: CodeType | None) -> None:
        """`frame`: where the boundary is. `entered`: the function that has entered the guard."""
        self._before = list(_inside(frame, entered))

    def at_second_boundary(self, frame: FrameType | None, entered: CodeType | None) -> tuple[str, str] | None:
        """What is known against the loop, and what to write; None: it is the program's own."""
        before, self._before = self._before, []  # they have to live while they are compared
        loop = next((place for place in _inside(frame, entered) if any(place is one for one in before)), None)
        if loop is None or not _is_foreign(loop):
            return None
        trainer = loop.f_locals.get("self")
        kind = type(trainer)
        what = f"the loop is run by {loop.f_globals.get('__name__')} ({loop.f_code.co_name})"
        if trainer is None:
            return f"{what}, and begins anew after a resume", _ASK
        line = 'stateful={"trainer": trainer}' if hasattr(kind, "state_dict") else _ATTRIBUTES
        return (
            f"{what}: the {kind.__name__} counts by itself, is not named, and begins anew after a resume",
            f"Write Guard({line}, ...) with that {kind.__name__}. {_ASK}",
        )


_ASK = "Or give it what is left, by guard.position.epoch: trainer.fit(epochs, initial_epoch=...)"
_ATTRIBUTES = 'stateful={"trainer": mx.attributes(trainer, ...)} and the names of its counters'


def _inside(frame: FrameType | None, entered: CodeType | None) -> list[FrameType]:
    """The functions that run inside of the guard's block, innermost first; empty where the block is not among them."""
    found: list[FrameType] = []
    while frame is not None:
        if frame.f_code is entered:
            return found
        found.append(frame)
        frame = frame.f_back
    return []


def _is_foreign(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    root = module.partition(".")[0]
    return is_library(module) and root not in _NONE and root not in sys.stdlib_module_names
