"""Reads a pickle as data, without running any of it.

``.metadata`` of a DCP checkpoint is a pickle. An unpickler looks names up and calls what it finds. Here every name
becomes a class of stand-ins: nothing is imported, and nothing else can be called. ``torch.load`` with ``weights_only``
does not read protocol 4, which is what DCP writes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Self

__all__ = ["PickledObject", "read_inert"]


class PickledObject:
    """What a pickle calls an object of a class, or the result of a call: what it was made of, and nothing else."""

    arguments: tuple[Any, ...]
    """The arguments of the call."""
    state: Any = None
    """What ``__setstate__`` of its class would have been given."""

    def __new__(cls, *arguments: Any, **_: Any) -> Self:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


# The one in Python: that in C makes a table as long as the largest number in the pickle says.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (PickledObject,), {"__module__": module})

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("DCP registers no classes by number")


def read_inert(data: bytes) -> Any:
    """The value that `data` describes, made of Python's plain values and containers and `PickledObject`. Raises
    ValueError for a malformed pickle."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # malformed bytes can raise anything
        raise ValueError(f"malformed pickle: {error!r:.200}") from None
