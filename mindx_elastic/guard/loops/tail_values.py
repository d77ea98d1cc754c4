"""Keeps what the code behind an epoch needs of the epoch, for a process that is killed in that code.

The usual stop waits for that code (`epoch_tail`); a kill, an exception and the deadline do not, and a run that is
resumed at the epoch's last boundary comes to it without a batch. So the values that it reads (`tail_reads`) are part of
that boundary. When the resumed loop over the loader ends, they are set in the frames of the program, as a debugger sets
them.
"""

from __future__ import annotations

import ast
import ctypes
import json
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any

import torch

from mindx_elastic.capture.copying import copy_tree, map_tensors
from mindx_elastic.core.looks import has_attributes
from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.guard.checks.running_source import Entry, value_of
from mindx_elastic.guard.checks.surroundings import is_library, locals_of, program_frames
from mindx_elastic.guard.loops.tail_reads import function_of
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten

__all__ = ["put_back_values", "stored_size", "values_of"]

_VALUE, _ATTRIBUTES = "value", "attributes"  # keys of what is kept of a name
_CLASS = "mindx.class"  # beside its attributes, of an object that is in another one
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, tuple, deque))
_MOST_BYTES = 1 << 20
"""Of one rank: losses and sums have less, batches and outputs have more."""
_MOST_ITEMS = 20_000  # in all lists and dicts of a value: 10 ms, twice an epoch


class _Unknown:
    """Stands for what cannot be kept, or made again. Its objects have attributes and nothing else."""


def values_of(frame: FrameType, entry: Entry | None, names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Copies of those `names` that a checkpoint can hold and that are small, by `function_of`.

    Of an object of the program's own class it takes the attributes.

    `frame`: at the boundary, or where the loop over the loader ends. `entry`: where the guard was entered.
    """
    found: dict[str, dict[str, Any]] = {}
    left = _MOST_BYTES
    for at in program_frames(frame):
        function = function_of(at)
        for name in names.get(function, ()):
            kind, value = _plain(value_of(ast.parse(name, mode="eval").body, at))
            size = stored_size(value)
            if size is None or size > left:
                continue
            left -= size
            devices = _devices(value)
            kept = {kind: map_tensors(copy_tree(value), torch.Tensor.cpu), "device": devices[0] if devices else "cpu"}
            found.setdefault(function, {})[name] = kept
        locals_of(at)
        if entry is not None and at.f_code is entry[0]:
            break
    return found


def put_back_values(frame: FrameType, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set them in the functions that run. `frame`: where the loop over the loader ends."""
    for at in program_frames(frame):
        for name, kept in values.get(function_of(at), {}).items():
            target, kind = ast.parse(name, mode="eval").body, _VALUE if _VALUE in kept else _ATTRIBUTES
            value = map_tensors(copy_tree(kept[kind]), partial(_moved, device=kept["device"]))
            now = value_of(target, at)
            if kind == _VALUE:
                _set(target, _put_together(value, now), at)
            elif has_attributes(now):  # the program has made it anew
                _give(now, value)
        locals_of(at)


def _plain(value: Any) -> tuple[str, Any]:
    """What a checkpoint can hold of `value`: of an object of the program's own (a meter) its attributes, and so of each
    such object in it (a logger has a dict of meters)."""
    if _is_own(value):
        take_apart = _TakeApart()
        return _ATTRIBUTES, {name: take_apart(each, {id(value)}) for name, each in vars(value).items()}
    return _VALUE, _TakeApart()(value, set())


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
            return value
        self._left -= 1 if is_own else len(value) + 1
        if self._left < 0 or id(value) in around or len(around) > MAX_DEPTH:
            return _Unknown  # no checkpoint can hold it; perhaps it contains itself
        around = around | {id(value)}
        if is_own:
            of = [kind.__module__, kind.__qualname__]
            return {_CLASS: of, _ATTRIBUTES: {name: self(each, around) for name, each in vars(value).items()}}
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
    own = vars(target)
    own.update({name: _put_together(each, own.get(name)) for name, each in attributes.items()})


def _is_own(value: Any) -> bool:
    """Whether it is an object of the program's own with attributes, and nothing else."""
    return has_attributes(value) and not callable(value) and _has_attributes_only(type(value))


def _has_attributes_only(kind: type) -> bool:
    """Whether that is so of its objects. Those of a class that goes on from a container have items, too, and a member
    of an enum is one of few."""
    is_plain = kind.__dictoffset__ != 0 and kind.__basicsize__ <= _Unknown.__basicsize__
    return is_plain and not is_library(kind.__module__) and not issubclass(kind, Enum)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.to(device)


def _set(target: ast.expr, value: Any, frame: FrameType) -> None:
    if isinstance(target, ast.Attribute):
        setattr(value_of(target.value, frame), target.attr, value)
    elif isinstance(target, ast.Name):
        frame.f_locals[target.id] = value
        if sys.version_info < (3, 13):  # there `f_locals` is a copy, and this writes it back
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


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
