"""Looks at objects of the program and of its libraries: none of them ends a program, and those at attributes run none
of its code.

`getattr` and `hasattr` run properties and `__getattr__`, which may raise anything (a stand-in for what is not built
yet), draw random numbers or begin a collective; `isinstance` runs a property ``__class__``, so of an object that the
program has not named ``issubclass(type(value), ...)`` is asked. `len`, `==` and `repr` are code of the object in any
case, also of a class made from `list` or `dict`. So attributes and items are read from the tables where Python keeps
them, and what has to be called is called here.
"""

from __future__ import annotations

import math
import struct
import types
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = [
    "are_equal",
    "askable",
    "asked",
    "attributes_of",
    "defines",
    "has_attributes",
    "has_method",
    "is_comparable",
    "is_its_attributes",
    "items_of",
    "length_of",
    "table_of",
    "text_of",
]

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque, set, frozenset)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_K = TypeVar("_K")
_Tables = tuple[Any, tuple[tuple[str, types.MemberDescriptorType], ...]]
_tables: dict[int, tuple[weakref.ref[type], _Tables]] = {}
"""Tables by the id of the class: its metaclass may have its own ``==``."""


def is_comparable(kind: type) -> bool:
    """Whether a class can be compared with others, and be in a table: its metaclass has no own ``==`` or hash,
    which may raise anything (one with an ``==`` alone has no hash)."""
    metaclass: Any = type(kind)
    return metaclass.__eq__ is object.__eq__ and metaclass.__hash__ is object.__hash__


def askable(items: Iterable[tuple[_K, Any]]) -> list[tuple[_K, Any]]:
    """The pairs whose value's class `is_comparable`."""
    return [item for item in items if type(type(item[1])) is type or is_comparable(type(item[1]))]


def attributes_of(value: object) -> dict[str, Any]:
    """The instance dictionary of `value` and its slots, as far as they are `askable`. No code of the program runs."""
    found: dict[str, Any] = {}
    table, slots = _tables_of(type(value))
    if table is not None:
        with suppress(AttributeError, TypeError):
            found.update(table.__get__(value))
    for name, slot in slots:
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue
    for held in found.values():
        if type(type(held)) is not type and not is_comparable(type(held)):  # no call for nearly all
            return dict(askable(found.items()))
    return found


def table_of(value: object) -> dict[str, Any] | None:
    """The instance dictionary itself; of a class it is read-only. None: it has none. No code of the program runs."""
    table = _tables_of(type(value))[0]
    try:
        return None if table is None else table.__get__(value)
    except (AttributeError, TypeError):
        return None


def has_attributes(value: object) -> bool:
    """Whether it has an instance dictionary or slots. No code of the program runs."""
    return _tables_of(type(value)) != (None, ())


def is_its_attributes(value: object) -> bool:
    """Whether Python keeps no more of it than its attributes: C code would have made its instances larger."""
    kind = type(value)
    room = 2 + len(_tables_of(kind)[1])  # pointers: to its dictionary, to weak references, and its slots
    return not kind.__itemsize__ and kind.__basicsize__ <= object.__basicsize__ + room * struct.calcsize("P")


def items_of(value: object, most: float = math.inf) -> list[tuple[Any, Any]] | None:
    """Places and `askable` items of a list, tuple, deque, set or dict, or of a class made from one, as Python keeps
    them; none where there are more than `most`. None: it is not a container. A dict is read at once: other threads
    may write."""
    kind, base = type(value), None
    for base in _CONTAINERS:
        if issubclass(kind, base):
            break
    else:
        return None
    if base.__len__(value) > most:
        return []
    found = list(dict.items(value)) if base is dict else list(enumerate(base.__iter__(value)))  # type: ignore[arg-type]
    for _, held in found:
        if type(type(held)) is not type and not is_comparable(type(held)):
            return askable(found)
    return found


def asked(value: object, name: str, default: Any = None) -> Any:
    """``getattr(value, name, default)`` for the few names that packages agree on (the ``dataset`` of a loader), which
    may be properties; `default` also where it raises anything."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def has_method(value: object, *names: str) -> bool:
    """Whether `value`, which the program has named, has all of these methods. No property runs; ``__getattr__`` is
    asked where a class has one."""
    kinds = type(value).__mro__[:-1]
    asks = any("__getattr__" in kind.__dict__ or "__getattribute__" in kind.__dict__ for kind in kinds)
    known = [_defines(value, name) for name in names]
    return all(
        asks and callable(asked(value, name)) if is_one is None else is_one
        for name, is_one in zip(names, known, strict=True)
    )


def defines(value: object, *names: str) -> bool:
    """The same of any object: whether its class or its attributes have these methods. No code of the program runs."""
    return all(_defines(value, name) for name in names)


def _defines(value: object, name: str) -> bool | None:
    """None: neither its class nor its attributes have the name."""
    for kind in type(value).__mro__:
        if name in kind.__dict__:
            return callable(kind.__dict__[name]) or isinstance(kind.__dict__[name], (classmethod, staticmethod))
    attributes = attributes_of(value)
    return callable(attributes[name]) if name in attributes else None


def length_of(value: Any) -> int | None:
    """``len(value)``; None where it has none, or fails."""
    try:
        return len(value)
    except Exception:
        return None


def are_equal(one: Any, other: Any) -> bool:
    """``one == other`` as one truth; an array's is that of all its items. False where it fails."""
    try:
        same = one == other
        return bool(same.all()) if has_method(same, "all") else bool(same)
    except Exception:
        return False


def text_of(value: object) -> str:
    """``repr(value)``; the class where that fails."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _tables_of(kind: type) -> _Tables:
    """Python's own descriptors of the instance dictionary (None: there is none, or a property ``__dict__`` of the class
    hides it) and of the slots."""
    if (known := _tables.get(id(kind))) is not None and known[0]() is kind:
        return known[1]
    table, slots = None, {}
    for each in reversed(kind.__mro__):
        own = each.__dict__
        table = own["__dict__"] if type(own.get("__dict__")) in _DESCRIPTORS else table
        for name in _slot_names(own["__slots__"]) if "__slots__" in own else ():
            if type(slot := own.get(name)) is types.MemberDescriptorType:
                slots[name] = slot
    _tables[id(kind)] = weakref.ref(kind), (found := (table, tuple(slots.items())))
    return found


def _slot_names(slots: object) -> tuple[str, ...]:
    if isinstance(slots, str):
        return (slots,)
    return tuple(slots) if isinstance(slots, (tuple, list)) else ()
