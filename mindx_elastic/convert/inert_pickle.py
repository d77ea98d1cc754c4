"""Reads a pickle as data, without running any of it.

``.metadata`` of a DCP checkpoint is a pickle. An unpickler, also one that admits only some classes, looks names up and
calls what it finds. Here a name stays a name and a call stays a note of the call: nothing is imported, nothing is
called, and no dictionary is built whose keys would have to be hashed. The rejected alternatives: ``pickle.Unpickler``
with a ``find_class`` of our own (calls constructors with arguments of the file's choice), and ``torch.load`` with
``weights_only`` (does not read protocol 4, which is what DCP writes).

`pickletools` splits the bytes into operations; this module keeps the stack.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Made", "Name", "Table", "read_inert"]

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_NUM_TUPLE = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}


@dataclass(frozen=True)
class Name:
    """A class or a function that the pickle names: ``torch.Size`` is Name("torch", "Size")."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Table:
    """A dictionary; its keys are values of this module and are not hashed."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def by_text(self) -> dict[str, Any]:
        """As a dict. Raises ValueError where a key is not a string."""
        if not all(type(key) is str for key, _ in self.pairs):
            raise ValueError("a key that is not a string")
        return dict(self.pairs)


@dataclass(eq=False)
class Made:
    """What a call would have returned."""

    called: Name
    arguments: tuple[Any, ...]
    state: Any = None
    """What its ``__setstate__`` would have been given."""

    def fields(self) -> dict[str, Any]:
        """The attributes by name. Raises ValueError where the state is not a dictionary."""
        if not isinstance(self.state, Table):
            raise ValueError(f"{self.called} without fields")
        return self.state.by_text()


def read_inert(data: bytes) -> Any:
    """The value that `data` describes, made of Python's plain values, lists, tuples, `Table`, `Made` and `Name`.

    Raises ValueError for a malformed pickle, and for operations that DCP's metadata does not use.
    """
    reader = _Reader()
    try:
        for operation, argument, _ in pickletools.genops(io.BytesIO(data)):
            if operation.name == "STOP":
                return reader.stack.pop()
            reader.apply(operation.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"malformed pickle: {error!r:.200}") from None
    raise ValueError("malformed pickle: it has no end")


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def apply(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            stack.append(argument)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in _NUM_TUPLE:
            stack.append(tuple(self._take(_NUM_TUPLE[name])))
        elif name == "MARK":
            self._outer.append(stack)
            self.stack = []
        else:
            self._apply_rest(name, argument)

    def _apply_rest(self, name: str, argument: Any) -> None:
        if name == "TUPLE":
            items = tuple(self._to_mark())
            self.stack.append(items)
        elif name == "EMPTY_LIST":
            self.stack.append([])
        elif name in ("EMPTY_DICT", "EMPTY_SET"):
            self.stack.append(Table())
        elif name in ("APPEND", "APPENDS"):
            items = tuple(self._to_mark() if name == "APPENDS" else self._take(1))
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = tuple(self._to_mark() if name == "SETITEMS" else self._take(2))
            self._top(Table).pairs.extend(zip(items[::2], items[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = argument.split(" ", 1) if name == "GLOBAL" else self._take(2)
            self.stack.append(Name(_text(module), _text(attribute)))
        elif name in ("REDUCE", "NEWOBJ"):
            called, arguments = self._take(2)
            if not isinstance(called, Name) or type(arguments) is not tuple:
                raise ValueError("malformed pickle: a call of something that is not a name")
            self.stack.append(Made(called, arguments))
        elif name == "BUILD":
            (state,) = self._take(1)
            self._top(Made).state = state
        else:
            raise ValueError(f"a pickle with the operation {name}, which DCP does not write")

    def _take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("malformed pickle: its stack is too short")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def _to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._outer.pop()
        return items

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"malformed pickle: a {kind.__name__} was expected")
        return self.stack[-1]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("malformed pickle: a name that is not a string")
    return value
