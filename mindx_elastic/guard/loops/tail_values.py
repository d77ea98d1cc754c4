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
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from mindx_elastic.capture.copying import copy_tree, map_tensors
from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.guard.checks.running_source import Entry, value_of
from mindx_elastic.guard.checks.surroundings import is_library, locals_of, program_frames
from mindx_elastic.guard.loops.tail_reads import function_of
from mindx_elastic.persist.flatten import MAX_DEPTH, flatten

__all__ = ["put_back_values", "stored_size", "values_of"]

_VALUE, _ATTRIBUTES = "value", "attributes"  # keys of what is kept of a name
_MOST_BYTES = 1 << 20
"""Of one rank: losses and sums have less, batches and outputs have more."""
_MOST_ITEMS = 20_000  # in all lists and dicts of a value: 10 ms, twice an epoch


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
            if kind == _VALUE:
                _set(target, value, at)
            elif hasattr(meter := value_of(target, at), "__dict__"):  # the program has made it anew
                vars(meter).update(value)
        locals_of(at)


def _plain(value: Any) -> tuple[str, Any]:
    """What a checkpoint can hold of `value`: of an object of the program's own (a meter) its attributes."""
    kind = type(value)
    is_own = hasattr(value, "__dict__") and not is_library(kind.__module__) and not callable(value)
    return (_ATTRIBUTES, dict(vars(value))) if is_own else (_VALUE, value)


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
