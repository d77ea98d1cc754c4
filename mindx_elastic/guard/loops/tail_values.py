"""Keeps what the code behind an epoch needs of the epoch, for a process that is killed in that code.

::

    for epoch in guard.epochs(90):
        losses = []
        for x, y in loader:              # the inner loop
            ...
            losses.append(loss.item())
            guard.step_end()
        print(epoch, loss.item(), sum(losses) / len(losses))    # the tail

The usual stop waits for that code (`epoch_tail`); a kill, an exception and the deadline do not, and a run that is
resumed at the epoch's last boundary comes to it without a batch. So what the epoch has changed in the functions between
the loop over the epochs and the boundary is part of that boundary: variables, and attributes of the program's objects.
When the resumed loop over the loader ends, they are set in the frames of the program, as a debugger sets them.
"""

from __future__ import annotations

import ctypes
import json
import operator
import os
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from mindx_elastic.capture.copying import copy_tree, map_tensors
from mindx_elastic.core.looks import attributes_of, has_attributes
from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.guard.checks.surroundings import is_library, locals_of, program_frames
from mindx_elastic.guard.loops.resumed_state import equal_trees
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten

__all__ = ["EpochValues", "put_back_values", "stored_size"]

_VALUE, _ATTRIBUTES = "value", "attributes"  # keys of what is kept of a name
_CLASS = "mindx.class"  # beside its attributes, of an object that is in another one
_SCALARS, _SIZE_OF_SCALAR = frozenset((type(None), bool, int, float, str)), 8
_LEAVES = frozenset((torch.Tensor, np.ndarray, set, frozenset, bytes, complex, torch.Size, torch.dtype, torch.device))
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, tuple, deque))
_MOST_BYTES = 1 << 20
"""Of one rank: losses and sums have less, batches and outputs have more."""
_MOST_ITEMS = 20_000  # in all lists and dicts of a value: 10 ms, twice an epoch


class _Unknown:
    """Stands for what cannot be kept, or made again. Its objects have attributes and nothing else."""


def _function_of(frame: FrameType) -> str:
    """The name of its function, which no other function around it has; the same in the next start."""
    code = frame.f_code
    name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # new in Python 3.11
    return f"{name} in {os.path.basename(code.co_filename)}"


def _globals_of(frame: FrameType) -> str:
    return f"globals of {os.path.basename(frame.f_code.co_filename)}"


class EpochValues:
    """What the functions that run have changed: variables since a loop over epochs began, where this is made, and
    attributes of the program's objects since the epoch began. Training thread."""

    def __init__(self, frame: FrameType | None, kept: Collection[int]) -> None:
        """`frame`: that of the loop. `kept`: `id` of what the guard keeps by itself, and of data sets."""
        self._kept = kept
        place = next(program_frames(frame), None)
        self._outermost = None if place is None else place.f_code
        scopes = {} if place is None else self._scopes(place)
        self._before = {
            (scope, name): value if type(value) in _SCALARS else _copied(_TakeApart()(value, set()))
            for scope, variables in scopes.items()
            for name, value in variables.items()
            if type(value) in _SCALARS or not _is_own(value)
        }
        self._objects: dict[int, dict[str, Any]] = {}  # attributes of the program's objects, by `id`

    def begin_epoch(self, frame: FrameType | None) -> None:
        """`frame`: that of the loop over epochs."""
        place = next(program_frames(frame), None)
        scopes = {} if place is None else self._scopes(place)
        values = (value for variables in scopes.values() for value in variables.values())
        own = [value for value in values if type(value) not in _SCALARS and _is_own(value)]
        self._objects = {id(value): {name: _copied(each) for name, each in _parts(value)} for value in own}

    def changed(self, frame: FrameType, *, outermost_only: bool = False) -> dict[str, dict[str, Any]]:
        """Copies of what a checkpoint can hold and is small, by `_function_of`: what has changed in the function that
        loops over epochs, and all of those that it calls. Of an object of the program's own class it takes attributes.
        `outermost_only`: only variables of the former.

        `frame`: at the boundary, or where the loop over the loader ends.
        """
        values: list[tuple[int, str, str, str | None, Any]] = []
        for at in program_frames(frame):
            is_outermost = at.f_code is self._outermost
            if is_outermost:
                for scope, variables in self._scopes(at).items():
                    values += self._changed_in(scope, variables, variables_only=outermost_only)
                break
            if not outermost_only:
                values += self._changed_in(_function_of(at), self._variables(locals_of(at)))
        found: dict[str, dict[str, Any]] = {}
        left = _MOST_BYTES
        for size, scope, name, attribute, value in sorted(values, key=operator.itemgetter(0)):
            left -= size
            if left < 0:
                break
            device, copied = next(iter(_devices(value)), "cpu"), map_tensors(copy_tree(value), torch.Tensor.cpu)
            names = found.setdefault(scope, {})
            if attribute is None:
                names[name] = {_VALUE: copied, "device": device}
                continue
            kept = names.setdefault(name, {_ATTRIBUTES: {}, "device": device})
            kept[_ATTRIBUTES][attribute] = copied
            kept["device"] = device if kept["device"] == "cpu" else kept["device"]
        return found

    def _scopes(self, frame: FrameType) -> dict[str, dict[str, Any]]:
        """The variables of the function that loops over epochs, and those of its module."""
        scopes = {_function_of(frame): self._variables(locals_of(frame))}
        if frame.f_code.co_name != "<module>":
            scopes[_globals_of(frame)] = self._variables(frame.f_globals)
        return scopes

    def _variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        found = variables.copy() if type(variables) is dict else dict(variables)
        kept = self._kept
        return {
            name: value
            for name, value in found.items()
            if not (callable(value) or type(value) is ModuleType or id(value) in kept or name.startswith("__"))
        }

    def _changed_in(
        self, scope: str, variables: Mapping[str, Any], *, variables_only: bool = False
    ) -> Iterator[tuple[int, str, str, str | None, Any]]:
        """Size, scope, name, attribute if it is one, and value."""
        for name, value in variables.items():
            before = self._before.get((scope, name), _Unknown)
            if type(value) in _SCALARS:
                if type(before) is not type(value) or before != value:
                    yield _SIZE_OF_SCALAR + (len(value) if type(value) is str else 0), scope, name, None, value
                continue
            is_own = _is_own(value)
            if is_own and variables_only:
                continue
            if not is_own:
                taken = _TakeApart()(value, set())
                if (size := _size_of_change(taken, before)) is not None:
                    yield size, scope, name, None, taken
                continue
            attributes = self._objects.get(id(value), {})
            for attribute, taken in _parts(value):
                if (size := _size_of_change(taken, attributes.get(attribute, _Unknown))) is not None:
                    yield size, scope, name, attribute, taken


def put_back_values(frame: FrameType, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set them in the functions that run. `frame`: where the loop over the loader ends."""
    done: set[str] = set()
    for at in program_frames(frame):
        for name, kept in values.get(_function_of(at), {}).items():
            _put_back(name, kept, at.f_locals)
            if _VALUE in kept and sys.version_info < (3, 13):  # there `f_locals` is a copy, and this writes it back
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(at), ctypes.c_int(0))
        if (scope := _globals_of(at)) not in done:
            done.add(scope)
            for name, kept in values.get(scope, {}).items():
                _put_back(name, kept, at.f_globals)
        locals_of(at)


def _put_back(name: str, kept: Mapping[str, Any], variables: Any) -> None:
    kind = _VALUE if _VALUE in kept else _ATTRIBUTES
    value = map_tensors(copy_tree(kept[kind]), partial(_moved, device=kept["device"]))
    now = variables.get(name)
    if kind == _VALUE:
        variables[name] = _put_together(value, now)
    elif has_attributes(now):  # the program has made it anew
        _give(now, value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of the program's own (a meter), and so of each such object in it (a logger has a dict
    of meters)."""
    take_apart = _TakeApart()
    for name, each in attributes_of(value).items():
        yield name, take_apart(each, {id(value)})


def _small_size(taken: Any) -> int | None:
    size = stored_size(taken)
    return None if size is None or size > _MOST_BYTES else size


def _copied(taken: Any) -> Any:
    return copy_tree(map_tensors(taken, torch.Tensor.cpu))


def _size_of_change(taken: Any, before: Any) -> int | None:
    """None: it is as before, or nothing that a checkpoint can keep."""
    size = _small_size(taken)
    return None if size is None or equal_trees(map_tensors(taken, torch.Tensor.cpu), before) else size


class _TakeApart:
    """Puts a dict in the place of each object of the program's own. What is bigger than `_MOST_ITEMS` in all is not
    walked through."""

    def __init__(self) -> None:
        self._left = _MOST_ITEMS

    def __call__(self, value: Any, around: set[int]) -> Any:
        """`around`: by `id`, what `value` is in."""
        kind = type(value)
        is_own = _is_own(value)
        if not is_own and kind not in _CONTAINERS:
            is_known = kind in _SCALARS or kind in _LEAVES or issubclass(kind, np.generic)  # nothing is asked of others
            is_large = kind in (torch.Tensor, np.ndarray) and value.nbytes > _MOST_BYTES
            return value if is_known and not is_large else _Unknown
        self._left -= 1 if is_own else len(value) + 1
        if self._left < 0 or id(value) in around or len(around) > MAX_DEPTH:
            return _Unknown  # no checkpoint can hold it; perhaps it contains itself
        around = around | {id(value)}
        if is_own:
            of = [kind.__module__, kind.__qualname__]
            return {_CLASS: of, _ATTRIBUTES: {name: self(each, around) for name, each in attributes_of(value).items()}}
        if isinstance(value, dict):
            items = ((key, self(each, around)) for key, each in value.items())
            return OrderedDict(items) if kind is OrderedDict else dict(items)
        each_apart = (self(each, around) for each in value)
        return deque(each_apart, value.maxlen) if isinstance(value, deque) else kind(each_apart)


def _put_together(kept: Any, now: Any) -> Any:
    """What `_TakeApart` was given. Objects that the program has made anew (`now`, and what is in it) stay the same
    ones, and others may know them."""
    if isinstance(kept, dict):
        if _CLASS in kept:
            return _object(kept, now)
        before = now if isinstance(now, dict) else {}
        found = ((key, _put_together(each, before.get(key))) for key, each in kept.items())
        items = {key: each for key, each in found if each is not _Unknown}
        if type(before) is not defaultdict:
            return type(kept)(items)
        before.clear()  # in place: its factory is code, which no checkpoint has
        before.update(items)
        return before
    if type(kept) in (list, tuple, deque):
        others = now if type(now) is type(kept) and len(now) == len(kept) else [None] * len(kept)
        each_found = (_put_together(each, other) for each, other in zip(kept, others, strict=True))
        return deque(each_found, kept.maxlen) if isinstance(kept, deque) else type(kept)(each_found)
    return kept


def _object(kept: Mapping[str, Any], now: Any) -> Any:
    """`now` with the attributes of `kept`, or another object of its class; `_Unknown` where there is none: it is that
    of a function, say."""
    module, name = kept[_CLASS]
    if not _is_own(now) or [type(now).__module__, type(now).__qualname__] != [module, name]:
        kind = sys.modules.get(module)
        for part in name.split("."):
            kind = getattr(kind, part, None)
        if not isinstance(kind, type) or not _has_attributes_only(kind):
            return _Unknown
        now = object.__new__(kind)
    _give(now, kept[_ATTRIBUTES])
    return now


def _give(target: Any, attributes: Mapping[str, Any]) -> None:
    own = object.__getattribute__(target, "__dict__")
    own.update({name: _put_together(each, own.get(name)) for name, each in attributes.items()})


def _is_own(value: Any) -> bool:
    """Whether it is an object of the program's own with attributes, and nothing else."""
    return not callable(value) and _has_attributes_only(type(value))


def _has_attributes_only(kind: type) -> bool:
    """Whether that is so of its objects. Those of a class that goes on from a container have items, too, and a member
    of an enum is one of few."""
    is_plain = kind.__dictoffset__ != 0 and kind.__basicsize__ <= _Unknown.__basicsize__
    return is_plain and not is_library(kind.__module__) and not issubclass(kind, Enum)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.to(device)


def stored_size(value: Any) -> int | None:
    """Of `value` in a checkpoint, in bytes; None: a checkpoint cannot hold it."""
    if _count(value) > _MOST_ITEMS or (isinstance(value, torch.Tensor) and value.nbytes > _MOST_BYTES):
        return None
    try:
        tree, tensors = flatten(map_tensors(value, torch.Tensor.detach))
    except UnsupportedStateError:
        return None
    return sum(tensor.nbytes for tensor in tensors.values()) + len(json.dumps(tree))


def _count(value: Any, depth: int = 0) -> int:
    """Items, as far as `_MOST_ITEMS`: what is bigger is not walked through."""
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple, set, frozenset, deque)) or depth > MAX_DEPTH:
        return 1
    found = len(value)
    for item in items:
        if found > _MOST_ITEMS:
            break
        found += _count(item, depth + 1)
    return found


def _devices(value: Any) -> list[str]:
    """The kinds of devices that the tensors of `value` are on."""
    found: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.device.type)
        return tensor

    map_tensors(value, note)
    return found
