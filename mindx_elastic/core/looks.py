"""Looks at objects of the program and of its libraries: none of them ends a program, and those at attributes run none
of its code.

`getattr` and `hasattr` run properties and `__getattr__`, which may raise anything (a stand-in for what is not built
yet), draw random numbers or begin a collective. `len`, `==` and `repr` are code of the object in any case. So
attributes are read from the tables where Python keeps them, and what has to be called is called here.
"""

from __future__ import annotations

import types
import weakref
from contextlib import suppress
from typing import Any

import torch

__all__ = [
    "are_equal",
    "asked",
    "attributes_of",
    "has_attributes",
    "has_method",
    "is_computed",
    "length_of",
    "text_of",
]

_slots: weakref.WeakKeyDictionary[type, tuple[tuple[str, types.MemberDescriptorType], ...]]
_slots = weakref.WeakKeyDictionary()


def attributes_of(value: object) -> dict[str, Any]:
    """The instance dictionary of `value` and its slots. No code of the program runs."""
    found: dict[str, Any] = {}
    with suppress(AttributeError, TypeError):
        found.update(object.__getattribute__(value, "__dict__"))
    for name, slot in _slots_of(type(value)):
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue
    return found


def has_attributes(value: object) -> bool:
    """Whether it has an instance dictionary or slots. No code of the program runs."""
    try:
        object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return bool(_slots_of(type(value)))
    return True


def asked(value: object, name: str, default: Any = None) -> Any:
    """``getattr(value, name, default)`` for the few names that packages agree on (the ``dataset`` of a loader), which
    may be properties; `default` also where it raises anything."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def has_method(value: object, *names: str) -> bool:
    """Whether `value` has all of these methods. No property runs; ``__getattr__`` is asked where a class has one."""
    return all(_has_method(value, name) for name in names)


def _has_method(value: object, name: str) -> bool:
    for kind in type(value).__mro__:
        if name in kind.__dict__:
            return callable(kind.__dict__[name]) or isinstance(kind.__dict__[name], (classmethod, staticmethod))
    if any("__getattr__" in kind.__dict__ or "__getattribute__" in kind.__dict__ for kind in type(value).__mro__[:-1]):
        return callable(asked(value, name))
    return callable(attributes_of(value).get(name))


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


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether gradients flow from `tensor` into others. torch refuses to say it of a view made under `no_grad` whose
    base has been written since."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def _slots_of(kind: type) -> tuple[tuple[str, types.MemberDescriptorType], ...]:
    slots = _slots.get(kind)
    if slots is None:
        named = ((name, each.__dict__.get(name)) for each in kind.__mro__ for name in _slot_names(each))
        slots = tuple((name, slot) for name, slot in named if isinstance(slot, types.MemberDescriptorType))
        _slots[kind] = slots
    return slots


def _slot_names(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    if isinstance(slots, str):
        return (slots,)
    return tuple(slots) if isinstance(slots, (tuple, list)) else ()
