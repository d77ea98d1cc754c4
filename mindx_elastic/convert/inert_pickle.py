"""Reads a pickle as data, without running any of it.

``.metadata`` of a DCP checkpoint is a pickle. An unpickler, also one that admits only some classes, looks names up and
calls what it finds. Here every name becomes a class of stand-ins (`torch_file.stand_in`): nothing is imported, and
nothing else is called. ``torch.load`` with ``weights_only`` does not read protocol 4, which is what DCP writes.

`pickletools` splits the bytes into operations; this module keeps the stack.
"""

from __future__ import annotations

import io
import pickletools
from typing import Any

from mindx_elastic.convert.torch_file import PickledObject, stand_in

__all__ = ["read_inert"]

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_NUM_TUPLE = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}


def read_inert(data: bytes) -> Any:
    """The value that `data` describes, made of Python's plain values, lists, tuples, dictionaries and `PickledObject`.

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
        elif name == "EMPTY_DICT":
            self.stack.append({})
        elif name in ("APPEND", "APPENDS"):
            items = tuple(self._to_mark() if name == "APPENDS" else self._take(1))
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = tuple(self._to_mark() if name == "SETITEMS" else self._take(2))
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = argument.split(" ", 1) if name == "GLOBAL" else self._take(2)
            self.stack.append(stand_in(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            called, arguments = self._take(2)
            if type(called) is not type or not issubclass(called, PickledObject) or type(arguments) is not tuple:
                raise ValueError("malformed pickle: a call of something that is not a name")
            self.stack.append(called(*arguments))
        elif name == "BUILD":
            (state,) = self._take(1)
            self._top(PickledObject).state = state
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
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"malformed pickle: a {kind.__name__} was expected")
        return self.stack[-1]
