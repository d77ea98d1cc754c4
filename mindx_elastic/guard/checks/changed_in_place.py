"""Finds tensors, arrays, dicts and lists of numbers in plain variables that the training changes in place and that its
gradients depend on: a memory bank, the centres of a loss, averaged predictions, the losses of earlier epochs.

Each must go on from what it was, as the source shows, and be made outside of the loop around ``step_end()``:

=====================================================  =================================================================
``bank[i] = 0.5 * bank[i] + f``, ``centres[c] += d``   the same place is read and set, or the value as a whole
``bank[i].mul_(m).add_(f)``                            other than by ``copy_``, ``zero_`` and the like
``history.append(loss.item())``                        a list of numbers
``counts.update(labels)``                              a `collections.Counter`
``queue[at : at + n] = keys``, ``losses[i] = value``   a part, by another key each time, behind a line that reads it: a
                                                       buffer is filled first and then read
=====================================================  =================================================================

and be in a ``backward`` (see `loss_reads`). All is a risk.
"""

from __future__ import annotations

import ast
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from mindx_elastic.guard.checks.carried_names import variable
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.loss_reads import line_of_gradients
from mindx_elastic.guard.checks.rebound import content_of
from mindx_elastic.guard.checks.running_source import tree_of, value_of
from mindx_elastic.guard.checks.surroundings import place_of
from mindx_elastic.guard.checks.syntax import walk
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["ChangedInPlace"]

_MOST_ITEMS = 8
_OVERWRITES = ("zero_", "copy_", "fill_", "normal_", "uniform_", "random_", "set_", "requires_grad_", "detach_")
_OF_NO_VALUE = ("shape", "size", "device", "dtype", "ndim", "numel", "keys")
_ADDS = ("append", "appendleft", "extend", "insert")


_COUNTS = ("update", "subtract")  # of a Counter; those of a dict overwrite
_DICTS = (dict, Counter, defaultdict, OrderedDict)


@dataclass
class _Variable:
    name: str
    frame_place: str
    line: int
    before: object = None


class ChangedInPlace:
    """One per guard. Training thread."""

    def __init__(self, unmanaged: Unmanaged) -> None:
        self._unmanaged = unmanaged
        self._variables: list[_Variable] | None = None

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        for one in self._variables or ():
            one.before = None

    def look(self, places: Mapping[FrameType, list[ast.For | ast.While]], kept: Kept) -> None:
        """At a boundary. `places`: the functions that run, with the loops around it, the innermost first."""
        if self._variables is None:
            self._variables = [each for frame, around in places.items() for each in _find(frame, around)]
        frames = {place_of(frame): frame for frame in places}
        for one in list(self._variables):
            frame = frames.get(one.frame_place)
            value = None if frame is None else value_of(ast.Name(one.name, ast.Load()), frame)
            now = None if _is_kept(value, kept) else _content(value)
            before, one.before = one.before, now
            if None not in (before, now) and before != now:
                self._variables.remove(one)
                self._unmanaged.risk(*_words(one))


def _find(frame: FrameType, loops: list[ast.For | ast.While]) -> Iterator[_Variable]:
    tree = tree_of(frame)
    if tree is None:
        return
    inside = {id(node) for node in walk(loops[-1])}
    found = dict.fromkeys(
        name
        for node in walk(tree)
        for name in _goes_on(node)
        if not _is_update(node) or isinstance(value_of(ast.Name(name, ast.Load()), frame), Counter)
    )
    functions = (node for node in walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    found |= dict.fromkeys(name for part in (loops[-1], *functions) for name in _overwritten_behind_a_read(part))
    for name in found:
        binds = [node for node in walk(tree) if _is_set(node, name)]
        if not binds or any(id(node) in inside for node in binds):
            continue
        line = line_of_gradients(tree, variable(name))
        if line is not None:
            yield _Variable(name, place_of(frame), line)


def _is_update(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _COUNTS


def _is_set(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _goes_on(node: ast.AST) -> Iterator[str]:
    """The variables that a statement changes in place, from what they were."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            base = _base(target)
            if base is None or not isinstance(target, ast.Subscript):
                continue
            shown = ast.unparse(target)
            parts = (ast.unparse(each) for each in walk(node.value) if isinstance(each, ast.Subscript))
            if isinstance(node, ast.AugAssign) or shown in parts:
                yield base
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        first, value = "", node.value.func
        while isinstance(value, ast.Attribute):  # the first method of bank[i].mul_(m).add_(f)
            first, value = value.attr, value.value.func if isinstance(value.value, ast.Call) else value.value
        goes_on = first.endswith("_") and first[:1] != "_" and first not in _OVERWRITES
        if (goes_on or first in _ADDS or first in _COUNTS) and (base := _base(value)) is not None:
            yield base


def _overwritten_behind_a_read(part: ast.AST) -> Iterator[str]:
    """The variables of which a loop, or a function, reads the whole or a part before it overwrites a part."""
    nodes = list(walk(part))
    written: dict[str, int] = {}
    passed_by: set[int] = set()  # names that are no reads of what is in them
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            base = _base(target)
            if base is not None and isinstance(target, ast.Subscript):
                inner = (each for each in walk(target) if isinstance(each, ast.Name))
                passed_by |= {id(each) for each in inner if each.id == base}
                if not isinstance(target.slice, ast.Constant):
                    written[base] = max(target.lineno, written.get(base, 0))
        if isinstance(node, ast.Attribute) and node.attr in (*_OVERWRITES, *_OF_NO_VALUE):
            passed_by.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            passed_by |= set(map(id, node.args))
    names = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    reads = (node for node in names if id(node) not in passed_by)
    yield from {node.id for node in reads if node.lineno < written.get(node.id, 0)}


def _base(node: ast.expr) -> str | None:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_kept(value: Any, kept: Kept) -> bool:
    if id(value) in kept.objects or isinstance(value, (nn.Parameter, nn.Module)):
        return True
    some = list(islice(value.values(), _MOST_ITEMS)) if type(value) in _DICTS else [value]
    return any(isinstance(one, torch.Tensor) and (one.requires_grad or kept.has(one)) for one in some)


def _content(value: Any) -> object:
    """What can be compared with a later look; None: it is of another kind."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return content_of(value)
    if type(value) in _DICTS and value and all(map(_is_number_or_array, islice(value.values(), _MOST_ITEMS))):
        return len(value), content_of(value)
    return content_of(value) if type(value) is list and value and _is_of_numbers(value[-1]) else None


def _is_number_or_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) or (_is_of_numbers(value) and not isinstance(value, bool))


def _is_of_numbers(value: Any) -> bool:
    if type(value) in (list, tuple):
        return 0 < len(value) <= _MOST_ITEMS and all(map(_is_of_numbers, value))
    return type(value) in (int, float) or isinstance(value, np.number)


def _words(one: _Variable) -> tuple[str, str]:
    file = one.frame_place.rpartition(" in ")[2]
    what = f"the variable {one.name} ({one.frame_place}) is changed in place from step to step, the gradients in line "
    what += f"{one.line} of {file} depend on it, and it is not kept"
    return what, f'Write Guard(stateful={{"{one.name}": {one.name}}}, ...)'
