"""Which functions the program's objects, classes and modules have under which name, to have them so again.

A training wraps functions in place: ``model.forward = scaled(model.forward)``, ``dataset.transform = noisy``. A
survivor of another rank's death calls the function of the training again, and would wrap what is wrapped already; a
new process, and a restarted one, wrap once. No error shows that, so each name gets back what it had at first.

Values that are modules of torch stay: what replaces them has a state, and that is for the guard's checks to judge.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from mindx_elastic.guard.checks.surroundings import attributes_of, is_library, kind_of, variables_of

__all__ = ["BoundFunctions", "is_of_torch"]

_MOST = 20_000
_MOST_ITEMS = 64
_DEPTH = 4
_WITH_ATTRIBUTES = ("module", "optimizer", "scheduler", "loader", "instance")
_OURS = __name__.partition(".")[0]
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_MISSING = object()
_OF_CLASSES = (FunctionType, staticmethod, classmethod, property)


class BoundFunctions:
    """What was bound when this was made. Training thread. It runs no code of the program, and it is bounded."""

    def __init__(self, targets: Collection[Any]) -> None:
        """`targets`: what the guard keeps. What hangs on them is looked at as well, and the program's own modules."""
        self._before = [(owner, frozenset(space), _kept(space)) for owner, space in _walk(targets)]

    def put_back(self) -> None:
        for owner, names, before in self._before:
            space = _space_of(owner)
            for name in [*before, *(space.keys() - before.keys() - _OF_EACH_MODULE)]:
                old, new = before.get(name, _MISSING), space.get(name, _MISSING)
                if old is new or not (_is_function(old) or _is_function(new)) or _is_of_others(new):
                    continue
                if old is not _MISSING:
                    _bind(owner, name, old)
                elif name not in names:
                    _unbind(owner, name)


def is_of_torch(function: Any) -> bool:
    """Also one that is wrapped, or a part of a `partial`."""
    return _root(function) == "torch"


def _root(function: Any) -> str:
    for _ in range(_DEPTH):
        inner = function.func if isinstance(function, partial) else attributes_of(function).get("hook")
        if inner is None:
            break
        function = inner
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]


def _is_of_others(function: Any) -> bool:
    """What torch or this package has bound belongs to what they have made of the object, and they take it back."""
    return function is not _MISSING and _is_function(function) and _root(function) in ("torch", _OURS)


def _is_function(value: Any) -> bool:
    if type(value) in _OF_CLASSES:
        return True
    return callable(value) and not isinstance(value, (nn.Module, type, weakref.ref))


def _kept(space: Mapping[str, Any]) -> dict[str, Any]:
    """What can be bound again; other values are not held on to."""
    items = ((name, value) for name, value in space.items() if name not in _OF_EACH_MODULE)
    return {
        name: value for name, value in items if value is None or (type(value) not in _PLAIN and _is_function(value))
    }


def _space_of(owner: Any) -> dict[str, Any]:
    if isinstance(owner, type):
        return dict(vars(owner))
    return owner if type(owner) is dict else object.__getattribute__(owner, "__dict__")


def _bind(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        type.__setattr__(owner, name, value)
    else:
        _space_of(owner)[name] = value


def _unbind(owner: Any, name: str) -> None:
    if isinstance(owner, type):
        type.__delattr__(owner, name)
    else:
        _space_of(owner).pop(name, None)


def _walk(targets: Collection[Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Owners of names, and their names: objects, classes of the program, and the dictionaries of its modules."""
    known: set[int] = set()
    waiting: deque[tuple[Any, int]] = deque((target, 0) for target in targets)
    for _, variables in variables_of(None):
        if type(variables) is dict:
            yield variables, variables
            waiting.extend((value, 1) for value in list(variables.values()))
    while waiting and len(known) < _MOST:
        value, depth = waiting.popleft()
        kind = kind_of(type(value))
        if id(value) in known or depth > _DEPTH or kind not in (*_WITH_ATTRIBUTES, "class", "dict", "sequence"):
            continue
        if kind != "class":
            known.add(id(value))
        if kind in ("dict", "sequence"):
            if len(value) <= _MOST_ITEMS:
                waiting.extend((child, depth + 1) for child in (value.values() if kind == "dict" else list(value)))
            continue
        for each in value.__mro__ if kind == "class" else type(value).__mro__:
            if id(each) not in known and not is_library(each.__module__):
                known.add(id(each))
                yield each, _space_of(each)
        if kind != "class":
            with suppress(AttributeError):  # it has slots alone
                yield value, _space_of(value)
            waiting.extend((child, depth + (kind != "module")) for child in _children(value, kind))


def _children(value: Any, kind: str) -> Iterator[Any]:
    attributes = attributes_of(value)
    if kind == "module":
        yield from list(attributes.get("_modules", {}).values())
    for name, each in list(attributes.items()):
        if name not in _OF_EACH_MODULE and type(each) not in _PLAIN:
            yield each
