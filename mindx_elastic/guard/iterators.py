"""Where an iterator of the program stands: Python's own ones and generators, without advancing them.

What stands for a position is a text that changes when the iterator goes on. No code of the program is run, so an
iterator of a class of the program has none here (its attributes tell), nor has one that asks such an object.
"""

from __future__ import annotations

import gc
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["is_iterator", "position_of"]

_MODULES = ("builtins", "itertools")
_DEPTH = 4
_MOST_INNER = 16
_NUMBERS = (int, float)
# Those of objects with a __getitem__ or a callable: to ask for their length runs code of the program.
_ASK_OTHERS = ("iterator", "callable_iterator", "reversed")


def is_iterator(value: object) -> bool:
    """Whether it is a generator, or an iterator of Python itself."""
    kind = type(value)
    return kind.__module__ in _MODULES and hasattr(kind, "__next__")


def position_of(value: Any, plain: Callable[[Any], str | None]) -> str:
    """`plain`: what stands for a value among a generator's variables; None: nothing does."""
    return _position(value, plain, 0)


def _position(value: Any, plain: Callable[[Any], str | None], depth: int) -> str:
    kind = type(value)
    parts: list[str] = []
    if kind is types.GeneratorType:
        if value.gi_frame is None:
            return "ended"
        parts.append(str(value.gi_frame.f_lasti))
        for name, variable in value.gi_frame.f_locals.items():
            if (text := plain(variable)) is not None:
                parts.append(f"{name}={text}")
    elif kind.__module__ == "builtins" and kind.__name__.endswith("iterator") and kind.__name__ not in _ASK_OTHERS:
        parts.append(str(operator.length_hint(value, -1)))
    elif kind.__name__ == "count" and all(type(each) in _NUMBERS for each in gc.get_referents(value)):
        parts.append(repr(value))
    elif kind.__name__ == "repeat":
        parts.append(str(operator.length_hint(value, -1)))
    elif kind.__name__ == "cycle":
        parts += [str(len(each)) for each in gc.get_referents(value) if type(each) is list]
    if depth < _DEPTH:
        parts += [f"({_position(each, plain, depth + 1)})" for each in _inner(value)]
    return " ".join(parts)


def _inner(value: Any) -> Iterator[Any]:
    """The iterators that this one draws from."""
    for each in gc.get_referents(value):
        if is_iterator(each):
            yield each
        elif type(each) is tuple and len(each) <= _MOST_INNER:
            yield from filter(is_iterator, each)
