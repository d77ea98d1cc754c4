"""Tells from source whether the code behind an epoch's loop over its batches needs that loop to have had one.

::

    for epoch in guard.epochs(90):
        losses = []
        for x, y in loader:              # the inner loop
            ...
            losses.append(loss.item())
            guard.step_end()
        print(epoch, loss.item(), sum(losses) / len(losses))    # the tail

A run that is resumed behind the last boundary of an epoch comes to the tail with no batch: `loss` is not set, and
`losses` is empty. The loops and the tail may be spread over functions; those between the loop over the epochs and
``step_end()`` are looked at, and the functions of the same file that they call.
"""

from __future__ import annotations

import ast
import os
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from mindx_elastic.core.looks import has_attributes
from mindx_elastic.guard.checks.running_source import Entry, spans, tree_of, tree_of_file, value_of
from mindx_elastic.guard.checks.source_reads import parents_of
from mindx_elastic.guard.checks.surroundings import is_library, program_frames
from mindx_elastic.guard.checks.syntax import children, walk
from mindx_elastic.guard.checks.training_words import name_of

__all__ = ["Place", "TailReads", "attribute_read", "function_of", "places_of", "tail_reads"]


class TailReads(NamedTuple):
    """What the tail reads and the inner loop sets or fills."""

    first: str
    """One of the names, for messages; empty: the tail reads none."""
    names: dict[str, list[str]]
    """The variables and attributes (``losses``, ``self.losses``), by `function_of`."""
    behind: dict[str, list[str]]
    """Variables that an epoch sets and that are read when the loop over the epochs has ended."""


_UNSEEN = TailReads("what the loop has made", {}, {})  # where there is no source

Place: TypeAlias = "tuple[CodeType, int]"
"""Where the loop over the epochs is: a function's code, and a line of it."""
_Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CONTAINERS = (list, dict, set, deque)
_NEED_ONE = frozenset("max min mean fmean median average mode stdev std stack cat concat concatenate".split())  # noqa: SIM905
_OF_TENSORS = {"data", "grad", "requires_grad", "training"}  # an evaluation exchanges weights, too
_GATHERS = frozenset({"append", "appendleft", "extend", "add", "update", "insert", "setdefault"})
_LIBRARY_OBJECTS = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    Dataset,
    DataLoader,
)
_DEPTH = 3  # of calls that are followed


def places_of(frame: FrameType | None, entry: Entry | None) -> Iterator[Place]:
    """Of the frames of the program, up to the one in which the guard was entered."""
    for at in program_frames(frame):
        yield at.f_code, at.f_lineno
        if entry is not None and at.f_code is entry[0]:
            return


def function_of(frame: FrameType) -> str:
    """The name of its function, which no other function around it has; the same in the next start."""
    code = frame.f_code
    name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # new in Python 3.11
    return f"{name} in {os.path.basename(code.co_filename)}"


def tail_reads(
    frame: FrameType | None, entry: Entry | None, epochs: Place | None, kept: Collection[int]
) -> TailReads | None:
    """What the tail reads and the inner loop around the call in `frame` sets or fills, and what is read behind the
    epochs; None: nothing.

    `entry`: where the guard was entered. `epochs`: where the loop over the epochs is. `kept`: `id` of what the guard
    keeps: it is filled after a resume.
    """
    found = _Gathered(kept)
    reads: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    has_loop = False
    for at in program_frames(frame):
        tree = tree_of(at)
        if tree is None:
            return _UNSEEN
        path = _path(tree, at.f_code.co_name, at.f_lineno)
        is_outermost = epochs is not None and at.f_code is epochs[0]
        is_entered = entry is not None and at.f_code is entry[0]
        first = 0  # in `path`: what is behind it belongs to one epoch
        if is_outermost:
            first = _epoch_loop(path, epochs[1] if epochs is not None else 0)
        elif is_entered and entry is not None:
            inside = [n for n, node in enumerate(path) if isinstance(node, _LOOPS) and not spans(node, entry[1])]
            first = inside[0] + 1 if inside else 0
        inner = next((n for n in range(first, len(path)) if isinstance(path[n], _LOOPS)), None)
        functions = _functions_of(tree)
        if inner is not None:
            has_loop = True
            found.gather(path[inner], at, functions)
        elif not has_loop:
            found.gather_attributes(path[min(first, len(path) - 1)], at, functions)
        if has_loop:
            tail = list(_behind(path, first, inner))
            names = found.names if inner is not None else set()
            read = _names_read(tail, names, at, functions) + _attributes_read(tail, found.attributes, at, functions)
            if read:
                reads[function_of(at)] = read
            if is_outermost and first:
                names = set(_bound(path[first - 1]))
                if read := _names_read(list(_behind(path, 0, first - 1)), names, at, functions):
                    behind[function_of(at)] = read
        found.names = set()  # of another scope
        if is_outermost or is_entered:
            break
    needed = next(iter(reads.values()))[0] if reads else ""
    return TailReads(needed, reads, behind) if reads or behind else None


def attribute_read(at_end: FunctionType, in_steps: Iterable[FunctionType]) -> str | None:
    """The same of methods that a layer above calls at an epoch's end and at its steps: what the one reads of the object
    and the others set or fill. None: there is none, or no source."""
    found = _Gathered(())
    for method in in_steps:
        node, functions = _source_of(method)
        if node is not None:
            found.gather_attributes(node, None, functions)
    node, functions = _source_of(at_end)
    return None if node is None else next(iter(_attributes_read(node.body, found.attributes, None, functions)), None)


def _source_of(method: FunctionType) -> tuple[_Function | None, dict[str, list[_Function]]]:
    """The node of `method`, and the functions of its file."""
    code = method.__code__
    tree = tree_of_file(code.co_filename, method.__globals__)
    functions = {} if tree is None else _functions_of(tree)
    return next(iter(_defined(code, functions.get(code.co_name, []))), None), functions


# --- where ---


def _path(tree: ast.Module, function: str, line: int) -> list[ast.AST]:
    """The nodes around `line`, outermost first, from the running function (or the module) on."""
    found: list[ast.AST] = [tree]
    node: ast.AST = tree
    while True:
        inner = next((n for n in children(node) if spans(n, line)), None)
        if inner is None or isinstance(inner, ast.expr):
            return found
        if isinstance(inner, _FUNCTIONS) and inner.name == function:
            found = []
        found.append(inner)
        node = inner


def _epoch_loop(path: Sequence[ast.AST], line: int) -> int:
    """The place in `path` behind the loop whose head is at `line`; else behind the outermost loop."""
    for number, node in enumerate(path):
        if isinstance(node, (ast.For, ast.AsyncFor)) and node.lineno <= line <= (node.iter.end_lineno or node.lineno):
            return number + 1
    loops = [number for number, node in enumerate(path) if isinstance(node, _LOOPS)]
    return loops[0] + 1 if loops else 0


def _behind(path: Sequence[ast.AST], first: int, inner: int | None) -> Iterator[ast.stmt]:
    """The statements that run after ``path[inner]`` (None: after the innermost one), up to the end of an epoch."""
    last = len(path) - 1 if inner is None else inner
    if inner is not None:
        yield from getattr(path[inner], "orelse", ())
    for number in range(last, max(first, 1) - 1, -1):
        child, parent = path[number], path[number - 1]
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(parent, field, None)
            if isinstance(statements, list) and child in statements:
                yield from statements[statements.index(child) + 1 :]
                if isinstance(parent, ast.Try):
                    yield from [*(parent.orelse if field == "body" else ()), *parent.finalbody]


def _functions_of(tree: ast.Module) -> dict[str, list[_Function]]:
    found: dict[str, list[_Function]] = {}
    for node in walk(tree):
        if isinstance(node, _FUNCTIONS):
            found.setdefault(node.name, []).append(node)
    return found


def _called(
    nodes: Iterable[ast.AST], frame: FrameType | None, functions: dict[str, list[_Function]]
) -> list[_Function]:
    """The functions of the same file that are called in `nodes`, and by name those that they call.

    `frame`: where the nodes run; None: they do not.
    """
    found: dict[int, _Function] = {}
    todo = list(nodes)
    for depth in range(_DEPTH):
        calls = [node.func for one in todo for node in walk(one) if isinstance(node, ast.Call)]
        meant = [f for call in calls for f in _meant(call, None if depth else frame, functions)]
        todo = list({id(f): f for f in meant if id(f) not in found}.values())
        found |= {id(f): f for f in meant}
    return list(found.values())


def _meant(function: ast.expr, frame: FrameType | None, functions: dict[str, list[_Function]]) -> list[_Function]:
    """What is called by that expression: exactly, where `frame` tells, else by its name."""
    named = functions.get(name_of(function), [])
    if frame is None or not named:
        return named
    code = getattr(value_of(function, frame), "__code__", None)
    if code is not None and code.co_filename == frame.f_code.co_filename:
        return _defined(code, named)
    owner = value_of(function.value, frame) if isinstance(function, ast.Attribute) else None
    if owner is None or type(owner) is object:  # not known
        return named
    kind = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
    return [] if is_library(kind) else named  # ``scheduler.step``: not the program's own


def _defined(code: CodeType, named: Iterable[_Function]) -> list[_Function]:
    """The one of `named` with that code."""
    behind = (f for f in named if f.lineno >= code.co_firstlineno)  # decorators stand before the ``def``
    return sorted(behind, key=lambda f: f.lineno)[:1]


# --- what the inner loop sets ---


class _Gathered:
    """Names and attributes that only a loop with batches sets or fills."""

    def __init__(self, kept: Collection[int]) -> None:
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self._kept = kept

    def gather(self, loop: ast.AST, frame: FrameType, functions: dict[str, list[_Function]]) -> None:
        self.names |= set(_bound(loop))
        for node in walk(loop):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                self._add(node.value, frame)
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and node.func.attr in _GATHERS:
                    self._add(node.func.value, frame)
                for argument in node.args:
                    if isinstance(value_of(argument, frame), _CONTAINERS):
                        self._add(argument, frame)
        if frame.f_code.co_name == "<module>":
            for function in _called([loop], frame, functions):
                declared = [n for node in walk(function) if isinstance(node, ast.Global) for n in node.names]
                self.names |= set(declared) & set(_bound(function))
        self.gather_attributes(loop, frame, functions)

    def gather_attributes(self, node: ast.AST, frame: FrameType | None, functions: dict[str, list[_Function]]) -> None:
        """``self.total += ...`` and ``self.losses.append(...)`` in `node` and in what it calls."""
        for one in (node, *_called([node], frame, functions)):
            for inner in walk(one):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    self.attributes |= {inner.attr} - _OF_TENSORS
                elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
                    owner = inner.func.value
                    if inner.func.attr in _GATHERS and isinstance(owner, ast.Attribute) and _may_fill(owner, frame):
                        self.attributes.add(owner.attr)

    def _add(self, owner: ast.expr, frame: FrameType) -> None:
        """`owner` is filled, if it is a container or an object of the program's own."""
        while isinstance(owner, ast.Subscript):
            owner = owner.value
        if isinstance(owner, (ast.Name, ast.Attribute)) and self._is_filled(value_of(owner, frame)):
            if isinstance(owner, ast.Name) and _is_self(owner.id, frame):
                return  # of it the attributes count
            if isinstance(owner, ast.Name):
                self.names.add(owner.id)
            else:
                self.attributes.add(owner.attr)

    def _is_filled(self, value: Any) -> bool:
        if id(value) in self._kept or isinstance(value, (type, types.ModuleType, *_LIBRARY_OBJECTS)):
            return False
        if isinstance(value, _CONTAINERS):
            return True
        return not callable(value) and not is_library(type(value).__module__) and has_attributes(value)


def _may_fill(owner: ast.Attribute, frame: FrameType | None) -> bool:
    """Whether a call like ``self.x.update(...)`` may fill what is called `owner` in `frame`: not where that is a
    scaler. In a function that is called from there `self` is taken for the same object."""
    return frame is None or not isinstance(value_of(owner, frame), _LIBRARY_OBJECTS)


def _is_self(name: str, frame: FrameType) -> bool:
    code = frame.f_code
    is_first = code.co_argcount > 0 and name == code.co_varnames[0]
    return is_first and hasattr(type(frame.f_locals.get(name)), code.co_name)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that are set below `node`, in its own scope."""
    for child in children(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield child.name
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)):
            yield from (n.target.id for n in walk(child) if isinstance(n, ast.NamedExpr))
        else:
            yield from _bound(child)


# --- what the tail reads ---


def _names_read(
    tail: Sequence[ast.stmt], names: set[str], frame: FrameType, functions: dict[str, list[_Function]]
) -> list[str]:
    """Those of `names` that `tail` reads before it sets them."""
    if not names:
        return []
    reads = _Reads(names)
    reads.go(tail, set())
    if frame.f_code.co_name == "<module>":
        for function in _called(tail, frame, functions):
            reads.go([function], set())
    return list(reads.found)


class _Reads:
    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.found: dict[str, None] = {}

    def go(self, statements: Iterable[ast.AST], bound: set[str]) -> set[str]:
        """Returns what is set for certain after `statements`, in whose front `bound` is."""
        for statement in statements:
            bound = self._one(statement, bound)
        return bound

    def _one(self, node: ast.AST, bound: set[str]) -> set[str]:
        if isinstance(node, ast.If):
            bound = self._one(node.test, bound)
            return self.go(node.body, bound) & self.go(node.orelse, bound)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            inside = self._one(node.iter, bound) | set(_bound(node.target)) | _names_of(node.target)
            return self.go(node.orelse, self.go(node.body, inside))
        if isinstance(node, ast.While):
            return self.go(node.orelse, self.go(node.body, self._one(node.test, bound)))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                bound = self._one(item.context_expr, bound)
                bound = bound | (_names_of(item.optional_vars) if item.optional_vars is not None else set())
            return self.go(node.body, bound)
        if isinstance(node, ast.Try):
            after = self.go(node.orelse, self.go(node.body, bound))
            for handler in node.handlers:
                self.go(handler.body, bound | ({handler.name} if handler.name else set()))
            return self.go(node.finalbody, after)
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            arguments = node.args
            own = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
            own |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
            body = [node.body] if isinstance(node, ast.Lambda) else node.body
            shared = {n for one in walk(node) if isinstance(one, ast.Global) for n in one.names}
            self.go(body, bound | own | (set(_bound(node)) - shared))
            return bound if isinstance(node, ast.Lambda) else bound | {node.name}
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            inside = bound
            for part in node.generators:
                inside = self._one(part.iter, inside) | _names_of(part.target)
                for test in part.ifs:
                    inside = self._one(test, inside)
            for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._one(value, inside)
            return bound
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id in self._names and node.id not in bound:
                self.found[node.id] = None
            return bound
        if isinstance(node, ast.Call) and isinstance(_filled_by(node), ast.Name):
            return self.go([*node.args, *node.keywords], bound)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._one(ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target), bound)
        for child in children(node):
            bound = self._one(child, bound)
        return bound | set(_bound(node)) if isinstance(node, ast.stmt) else bound


def _names_of(target: ast.AST) -> set[str]:
    return {node.id for node in walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _attributes_read(
    tail: Sequence[ast.stmt], attributes: set[str], frame: FrameType | None, functions: dict[str, list[_Function]]
) -> list[str]:
    """Those of `attributes` that `tail` reads, where an object's first value (zero, None, an empty list) may fail."""
    found: dict[str, None] = {}
    for one in (*tail, *_called(tail, frame, functions)):
        nodes = list(walk(one))
        filled = {id(owner) for owner in map(_filled_by, nodes) if owner is not None}
        parents = parents_of(one)
        for node in nodes:
            is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in filled
            if is_read and node.attr in attributes and _may_fail(node, parents):  # type: ignore[attr-defined]
                found[ast.unparse(node)] = None
    return list(found)


def _may_fail(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """Whether a value is divided by, or is taken to have an element or an attribute."""
    child = node
    while (parent := parents.get(id(child))) is not None and not isinstance(child, ast.stmt):
        divides = isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Div, ast.FloorDiv, ast.Mod))
        if divides and child is parent.right:  # type: ignore[attr-defined]
            return True
        if isinstance(parent, ast.Call) and child is not parent.func and name_of(parent.func) in _NEED_ONE:
            return True
        if child is node and isinstance(parent, (ast.Attribute, ast.Subscript)) and child is parent.value:
            return True
        child = parent
    return False


def _filled_by(node: ast.AST) -> ast.expr | None:
    """What ``x.append(...)`` and the like fill: that needs nothing of it."""
    method = node.func if isinstance(node, ast.Call) else None
    return method.value if isinstance(method, ast.Attribute) and method.attr in _GATHERS else None
