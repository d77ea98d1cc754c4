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
resumed at the epoch's last boundary comes to it without a batch. So what has changed since the loop over the epochs
began, in the functions between it and the boundary, is part of that boundary: variables, and attributes of the
program's objects. When the resumed loop over the loader ends, they are set in the frames of the program, as a debugger
sets them. (To take the last step once more would give the tail the loss of other weights.)
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

from mindx_elastic.capture.copying import copy_state, copy_tree, map_tensors, same_tree
from mindx_elastic.capture.stand_ins import is_plain_class, originals
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of, table_of
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UnsupportedStateError
from mindx_elastic.guard.checks.surroundings import is_library, locals_of, program_frames
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten

__all__ = ["EpochValues", "put_back_values", "stored_size"]

_VALUE, _ATTRIBUTES, _LARGE = "value", "attributes", "large"  # keys of what is kept of a name
_SCALARS, _SIZE_OF_SCALAR = frozenset((type(None), bool, int, float, str)), 8
_LEAVES = frozenset((bytes, complex, torch.Size, torch.dtype, torch.device))
_CONTAINERS = frozenset((dict, OrderedDict, defaultdict, list, tuple, deque, set, frozenset))
_MOST_BYTES = 1 << 20
"""Of one rank: losses and sums have less, batches and outputs have more."""
_MOST_ITEMS = 20_000  # in all lists and dicts of a value: 10 ms, twice an epoch


class _Unknown:
    """Stands for what cannot be kept. Its objects have attributes and nothing else."""


class _Large(_Unknown):
    """It is larger than what is kept."""


def _function_of(frame: FrameType) -> str:
    """The name of its function, which no other function around it has; the same in the next start."""
    code = frame.f_code
    name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # new in Python 3.11
    return f"{name} in {os.path.basename(code.co_filename)}"


def _globals_of(frame: FrameType) -> str:
    return f"globals of {os.path.basename(frame.f_code.co_filename)}"


class EpochValues:
    """What the functions that run have changed since a loop over epochs began, where this is made. Training thread."""

    def __init__(self, frame: FrameType | None, kept: Collection[int]) -> None:
        """`frame`: that of the loop. `kept`: `id` of what the guard keeps by itself, and of data sets."""
        self._kept = kept
        place = next(program_frames(frame), None)
        self._outermost = None if place is None else place.f_code
        scopes = {} if place is None else self._scopes(place)
        self._before = {
            place: value if type(value) in _SCALARS else _copied(value)[1]
            for scope, variables in scopes.items()
            for place, _, _, value in _parts(scope, variables)
        }

    def changed(self, frame: FrameType, *, outermost_only: bool = False) -> dict[str, dict[str, Any]]:
        """Copies of what a checkpoint can hold and is small, by `_function_of`: what has changed in the function that
        loops over epochs, and all of those that it calls. Of an object of the program's own class it takes attributes.
        `outermost_only`: only variables of the former.

        `frame`: at the boundary, or where the loop over the loader ends.
        """
        values: list[tuple[int, str, str, str | None, Any, str]] = []
        for at in program_frames(frame):
            is_outermost = at.f_code is self._outermost
            scopes = self._scopes(at) if is_outermost else {_function_of(at): self._variables(locals_of(at))}
            for scope, variables in scopes.items():
                if is_outermost or not outermost_only:
                    values += self._changed_in(scope, variables, variables_only=outermost_only)
            if is_outermost:
                break
        found: dict[str, dict[str, Any]] = {}
        left = _MOST_BYTES
        for size, scope, name, attribute, copied, device in sorted(values, key=operator.itemgetter(0)):
            left -= size
            kept = found.setdefault(scope, {}).setdefault(name, {})
            if copied is _Large or left < 0:
                kept.setdefault(_LARGE, []).append(attribute)
                continue
            if attribute is None:
                kept[_VALUE] = copied
            else:
                kept.setdefault(_ATTRIBUTES, {})[attribute] = copied
            kept["device"] = device if kept.get("device", "cpu") == "cpu" else kept["device"]
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
        self, scope: str, variables: Mapping[str, Any], *, variables_only: bool
    ) -> Iterator[tuple[int, str, str, str | None, Any, str]]:
        """Size, scope, name, attribute if it is one, its copy and the device of its tensors."""
        for place, name, attribute, value in _parts(scope, variables):
            before = self._before.get(place, _Unknown)
            if attribute is not None and variables_only:
                continue
            if type(value) in _SCALARS and type(before) is type(value) and before == value:
                continue
            size, copied = _copied(value)
            if copied is _Unknown or copied is before:
                continue
            if copied is _Large or not same_tree(copied, before):
                yield size, scope, name, attribute, copied, next(iter(_devices(value)), "cpu")


def put_back_values(frame: FrameType, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set them in the functions that run. `frame`: where the loop over the loader ends."""
    done: set[str] = set()
    missing: list[str] = []
    for at in program_frames(frame):
        for name, kept in values.get(_function_of(at), {}).items():
            missing += _put_back(name, kept, at.f_locals)
            if _VALUE in kept and sys.version_info < (3, 13):  # there `f_locals` is a copy, and this writes it back
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(at), ctypes.c_int(0))
        if (scope := _globals_of(at)) not in done:
            done.add(scope)
            for name, kept in values.get(scope, {}).items():
                missing += _put_back(name, kept, at.f_globals)
        locals_of(at)
    if missing:
        logger.warning(
            "the code behind the epoch's loop runs without what its steps had set in %s: too large for a boundary. "
            "Keep sums or counts of it in place of all of it",
            listed(sorted(missing), 4),
        )


def _put_back(name: str, kept: Mapping[str, Any], variables: Any) -> list[str]:
    """Returns the names of what is there now (an empty list) and not as it was."""
    now = variables.get(name)
    table = table_of(now)
    if _VALUE in kept:
        variables[name] = _original(kept[_VALUE], now, kept["device"])
    elif type(table) is dict:  # the program has made it anew
        for key, value in kept.get(_ATTRIBUTES, {}).items():
            table[key] = _original(value, table.get(key), kept["device"])
    large = kept.get(_LARGE, ())
    own = [f"{name}.{key}" for key in large if key is not None and table is not None and table.get(key) is not None]
    return [*own, name] if None in large and now is not None else own


def _original(kept: Any, now: Any, device: str) -> Any:
    """The value again; `now`, what the program has made anew, where no file has all of it."""
    try:
        value = originals(map_tensors(copy_tree(kept), partial(_moved, device=device)))
    except MismatchError:  # it has no such class any more
        return now
    if type(now) is list and type(value) is list:  # others may know it, and the statement that runs
        now[:] = value
        return now
    if type(now) in (dict, defaultdict) and type(value) is dict:  # the factory of the latter is code
        now.clear()
        now.update(value)
        return now
    return value


def _parts(scope: str, variables: Mapping[str, Any]) -> Iterator[tuple[tuple[object, str], str, str | None, Any]]:
    """Where it is found again, name, None and value; in place of an object of the program's own (a meter) its
    attributes."""
    for name, value in variables.items():
        if type(value) in _SCALARS or not _is_own(value):
            yield (scope, name), name, None, value
            continue
        for attribute, each in attributes_of(value).items():
            yield (id(value), attribute), name, attribute, each


def _copied(value: Any) -> tuple[int, Any]:
    """Its size, and how a checkpoint holds it, on the CPU: `_Large` or `_Unknown` where none does."""
    size = _size(value)
    if size is None or size > _MOST_BYTES:
        return 0, _Unknown if size is None else _Large
    copied = map_tensors(copy_state(value), torch.Tensor.cpu)
    copied = dict(copied) if type(copied) is defaultdict else copied
    size = stored_size(copied)
    return (0, _Unknown) if size is None else (size, copied)


def _is_own(value: Any) -> bool:
    """Whether it is an object of the program's own with attributes, and nothing else. Those of a class that goes on
    from a container have items, too, and a member of an enum is one of few."""
    kind = type(value)
    is_plain = kind.__dictoffset__ != 0 and kind.__basicsize__ <= _Unknown.__basicsize__
    return is_plain and not callable(value) and not is_library(kind.__module__) and not issubclass(kind, Enum)


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.to(device)


def stored_size(value: Any) -> int | None:
    """Of `value` in a checkpoint, in bytes; None: a checkpoint cannot hold it, or it has more than 1 MiB."""
    size = _size(value)
    if size is None or size > _MOST_BYTES:
        return None
    try:
        tree, tensors = flatten(map_tensors(value, torch.Tensor.detach))
    except UnsupportedStateError:
        return None
    return sum(tensor.nbytes for tensor in tensors.values()) + len(json.dumps(tree))


def _size(value: Any) -> int | None:
    """In bytes, about, as far as `_MOST_BYTES`: what is larger is not walked through. None: it has something that no
    checkpoint can hold, or contains itself."""
    size, waiting, done = 0, [(value, 0)], 0
    while waiting and size <= _MOST_BYTES:
        each, depth = waiting.pop()
        kind, done = type(each), done + 1
        if depth > MAX_DEPTH:
            return None
        if kind in (torch.Tensor, np.ndarray):
            size += each.nbytes
        elif kind in _SCALARS or kind in _LEAVES or issubclass(kind, np.generic):
            size += len(each) if kind in (str, bytes) else _SIZE_OF_SCALAR
        elif kind in _CONTAINERS or is_plain_class(kind):
            parts = attributes_of(each) if kind not in _CONTAINERS else each
            if done + len(waiting) + len(parts) > _MOST_ITEMS:
                return _MOST_BYTES + 1
            waiting += [(one, depth + 1) for one in (parts.values() if isinstance(parts, dict) else parts)]
        else:
            return None
    return size


def _devices(value: Any) -> list[str]:
    """The kinds of devices that the tensors of `value` are on."""
    found: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.device.type)
        return tensor

    map_tensors(value, note)
    return found
