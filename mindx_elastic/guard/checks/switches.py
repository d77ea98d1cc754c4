"""Finds what a program sets once for all that follows: ``if epoch == 270: model.use_aux = True``, ``phase = "tune"``,
``mixup.enabled = False``, ``config["noise"] = 0``, a hook that is registered in one epoch.

A resumed run that begins behind that line does not come by it, and has the first value. What is told is

- set in a loop of the block, in a function that is called there, or by a method of the object (``model.freeze()``);
  where a library has the loop, in methods of the program's classes that it calls (Lightning's hooks, callbacks),
- below a test that holds once (``epoch == 270``, ``step in (500, 900)``, not ``epoch >= 270``); a variable also below
  one of something that the loop works out (``if accuracy > 0.9:``),
- not kept: attributes of optimizers and of named objects are, and what the program sets on its data set,
- read again: a variable by the training in a later turn, an attribute or an entry somewhere in the program,
- and another at one look than at the look before.

All is a risk. Read from source, at the first boundary.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.checks.carried_names import is_carried, variable
from mindx_elastic.guard.checks.carried_variables import steers
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.running_source import Entry, Loop, loops_around, tree_of_file
from mindx_elastic.guard.checks.source_reads import Sources
from mindx_elastic.guard.checks.surroundings import is_library, place_of, program_files
from mindx_elastic.guard.checks.syntax import MOST_FILES, children, walk
from mindx_elastic.guard.checks.training_words import logs, name_of, names_a_log

__all__ = ["Switches", "holds_once"]

_UNKNOWN = object()
_HOOKS = re.compile(r"^register_.*hook$")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_IN_STATE_DICTS = ("training", "requires_grad", "grad", "data")
_HOSTS = ("pl_module", "model")  # arguments of callbacks, as Lightning and Transformers call them
_MODULES_OF = ("modules", "named_modules", "children", "named_children")
_DEPTH, _LONGEST = 2, 60


@dataclass
class _Switch:
    """Something that is set below a test."""

    place: str
    owner: ast.expr | None
    """An expression of the function at `place`; None: a variable of it."""
    name: str
    """Of the variable, the attribute or the entry; empty: the hooks of the owner."""
    is_entry: bool
    line: int
    test: str
    is_in_object: bool = False
    """`place` is a class: the owner is an expression of `_Objects`."""
    before: object = _UNKNOWN

    @property
    def shown(self) -> str:
        if self.owner is None:
            return self.name
        owner = ast.unparse(self.owner)
        if not self.name:
            return f"a hook of {owner}"
        if isinstance(self.owner, ast.Starred):
            return f"{self.name} of the modules of {owner[1:]}"
        return f'{owner}["{self.name}"]' if self.is_entry else f"{owner}.{self.name}"


class _Objects:
    """The objects of a program by its names for them, in place of a function's variables."""

    def __init__(self, objects: dict[str, object]) -> None:
        self.f_locals, self.f_globals = objects, dict[str, object]()


_Place: TypeAlias = FrameType | _Objects


class Switches:
    """One per guard. Training thread."""

    def __init__(self, risk: Callable[[str, str], None]) -> None:
        self._risk = risk
        self._found: list[_Switch] | None = None
        self._entry: Entry | None = None
        self._objects = _Objects({})
        self.is_due = False
        """An epoch has begun: what its head has set is told at its first boundary, whatever ends the process then."""

    def at_entry(self, entry: Entry | None, objects: Mapping[str, object]) -> None:
        """`objects`: what the program has given a library whose loop it is: a `LightningModule`, callbacks."""
        self._entry, self._found, self._objects = entry, None, _Objects(dict(objects))

    def look(self, frame: FrameType | None, kept: Kept) -> None:
        """At a boundary, which is passed in `frame`."""
        if self._found is None:
            around, sources = loops_around(frame, self._entry) or [], Sources(program_files(frame))
            if around or self._objects.f_locals:
                self._found = [*_find(around, kept, sources), *_find_in(self._objects, kept, sources)]
        self.look_again(frame)

    def look_again(self, frame: FrameType | None) -> None:
        """At a later boundary: only what is known to be set."""
        self.is_due = False
        if self._found:
            self._compare({place_of(place): place for _, place in loops_around(frame, self._entry) or ()})

    def _compare(self, places: Mapping[str, FrameType]) -> None:
        for one in list(self._found or ()):
            place = self._objects if one.is_in_object else places.get(one.place)
            now = _UNKNOWN if place is None else _in_short(_value(one, place))
            before, one.before = one.before, now if now is not _UNKNOWN else one.before
            if _UNKNOWN not in (before, now) and before != now and self._found is not None:
                self._found.remove(one)
                self._tell(one)

    def _tell(self, one: _Switch) -> None:
        what = f"{one.shown} ({one.place}) is set once, in line {one.line} when `{one.test}` holds, and is not kept: a "
        what += "run that is resumed behind it has it as at the start"
        if not one.name:
            self._risk(
                what, "Register it before the guard, and let it read what is kept: a buffer, guard.position.epoch"
            )
            return
        state = f'state = {{"{one.name}": ...}} before the guard, Guard(stateful={{"state": state}}, ...)'
        remedy = "Test so that it holds from there on (`epoch >= 10` in place of `epoch == 10`), or keep it in a dict"
        self._risk(what, f"{remedy}: {state}")


def holds_once(test: ast.expr) -> bool:
    """``epoch == 10``, ``epoch in (3, 6)``, ``step % 10 == 0``; not ``epoch >= 10`` nor ``args.mode == "strong"``."""
    compares = [node for node in walk(test) if isinstance(node, ast.Compare)]
    if any(isinstance(op, _ORDERS) for node in compares for op in node.ops):
        return False
    return any(
        isinstance(node.ops[0], (ast.Eq, ast.In))
        and isinstance(node.left, (ast.Name, ast.Attribute, ast.BinOp))  # no part of a tensor, no result of a call
        and not any(map(_is_text, (node.left, *node.comparators)))
        for node in compares
    )


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(_is_text, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bool, type(None)))


# --- what is set ---


def _find(around: Sequence[tuple[Loop, FrameType]], kept: Kept, sources: Sources) -> Iterator[_Switch]:
    outermost: dict[FrameType, Loop] = {place: loop for loop, place in around}
    told: set[tuple[str, str]] = set()
    reads: _Reads | None = None
    for place, loop in outermost.items():
        own = _set_in(loop)
        for one in _Scan(place, own, place_of(place)).statements(loop.body, None, {}, _DEPTH):
            key = one.place, one.shown
            if key in told or names_a_log(one.shown):
                continue
            told.add(key)
            if one.owner is None:
                if is_carried(loop, variable(one.name)) and steers(loop, one.name, place, kept):
                    yield one
            elif _is_lost(one, place, own, kept):
                reads = reads or _Reads(sources)
                if reads.has(one):
                    yield one


def _find_in(objects: _Objects, kept: Kept, sources: Sources) -> Iterator[_Switch]:
    """In the methods of classes of the program that a library calls."""
    modules = [name for name, value in objects.f_locals.items() if isinstance(value, nn.Module)]
    told: set[str] = set()
    reads: _Reads | None = None
    for key, value in objects.f_locals.items():
        own = {kind.__name__ for kind in type(value).__mro__ if not is_library(kind.__module__)}
        trees = (tree for tree, _ in sources.classes_of(type(value)) if own and getattr(tree, "name", "") in own)
        for method in (node for tree in trees for node in children(tree) if isinstance(node, ast.FunctionDef)):
            given: dict[str, ast.expr] = {"self": ast.Name(key, ast.Load())}
            if modules:
                given |= dict.fromkeys(_HOSTS, ast.Name(modules[0], ast.Load()))
            for one in _Scan(objects, set(), type(value).__name__).statements(method.body, None, given, _DEPTH - 1):
                if one.shown in told or names_a_log(one.shown):
                    continue
                told.add(one.shown)
                if _is_lost(one, objects, set(), kept):
                    reads = reads or _Reads(sources)
                    if reads.has(one):
                        yield one


class _Scan:
    """Goes through what a loop does."""

    def __init__(self, place: _Place, own: set[str], words: str) -> None:
        """`own`: the variables that the loop sets. `words`: where it is."""
        self._place, self._words, self._own = place, words, own

    def statements(
        self, body: Sequence[ast.stmt], test: ast.If | None, given: Mapping[str, ast.expr], depth: int
    ) -> Iterator[_Switch]:
        """`test`: that they are below. `given`: what the arguments of the function that has them stand for in the
        function with the loop, and ``module`` in ``for module in net.modules()``, a `Starred` there."""
        for statement in body:
            if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
                continue
            if isinstance(statement, ast.If):
                below = statement if self._counts(statement.test, depth) else test
                yield from self.statements(statement.body, below, given, depth)
                yield from self.statements(statement.orelse, test, given, depth)
                continue
            inner = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
            if any(inner):
                known = {**given, **self._modules_of(statement, given, depth)}
                for each in inner:
                    if isinstance(each, list):
                        yield from self.statements(each, test, known, depth)
                continue
            if test is not None:
                yield from self._sets(statement, test, given, depth)
            for call in (node for node in walk(statement) if isinstance(node, ast.Call)):
                yield from self._calls(call, test, given, depth)

    def _modules_of(self, loop: ast.stmt, given: Mapping[str, ast.expr], depth: int) -> dict[str, ast.expr]:
        call = loop.iter if isinstance(loop, ast.For) else None
        if not isinstance(loop, ast.For) or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return {}
        owner = _placed(call.func.value, given, depth, self._place)
        target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
        if call.func.attr not in _MODULES_OF or owner is None or not isinstance(target, ast.Name):
            return {}
        return {target.id: ast.Starred(owner, ast.Load())}

    def _counts(self, test: ast.expr, depth: int) -> bool:
        if holds_once(test):
            return True
        return depth == _DEPTH and bool(_names(test) & self._own) and not _is_of_none(test)

    def _sets(self, statement: ast.stmt, test: ast.If, given: Mapping[str, ast.expr], depth: int) -> Iterator[_Switch]:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
            targets = [statement.target]
        for target in (each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])):
            if isinstance(target, ast.Name):
                # What its own test reads, `if value < best: best = value`, goes on from its last value.
                if depth == _DEPTH and (holds_once(test.test) or target.id not in _names(test.test)):
                    yield self._switch(None, target.id, test)
            elif not holds_once(test.test):
                continue
            elif isinstance(target, ast.Attribute) and (owner := _placed(target.value, given, depth, self._place)):
                yield self._switch(owner, target.attr, test)
            elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                owner = _placed(target.value, given, depth, self._place)
                if owner is not None and isinstance(target.slice.value, str):
                    yield self._switch(owner, target.slice.value, test, is_entry=True)

    def _calls(
        self, call: ast.Call, test: ast.If | None, given: Mapping[str, ast.expr], depth: int
    ) -> Iterator[_Switch]:
        owner = _placed(call.func.value, given, depth, self._place) if isinstance(call.func, ast.Attribute) else None
        once = test is not None and holds_once(test.test)
        if test is not None and once and owner is not None and _HOOKS.match(name_of(call.func)):
            yield self._switch(owner, "", test)
            return
        if test is not None and once and name_of(call.func) == "setattr" and len(call.args) == 3:
            owner, name = _placed(call.args[0], given, depth, self._place), call.args[1]
            if owner is not None and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield self._switch(owner, name.value, test)
            return
        if depth == 0 or (called := _placed(call.func, given, depth, self._place)) is None:
            return
        function = _value_at(called, self._place)
        function = function.__func__ if isinstance(function, (MethodType, staticmethod)) else function
        if not isinstance(function, FunctionType) or is_library(function.__module__ or ""):
            return
        node = _definition(function)
        if node is None or logs(call):
            return
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        stands: dict[str, ast.expr] = {}
        if names and owner is not None and _is_method(_value_at(owner, self._place), name_of(call.func)):
            stands[names.pop(0)] = owner
        given_here = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg)]
        for argument, value in given_here:
            if (known := _placed(value, given, depth, self._place)) is not None:
                stands[argument] = known
        yield from self.statements(node.body, test if once else None, stands, depth - 1)

    def _switch(self, owner: ast.expr | None, name: str, test: ast.If, *, is_entry: bool = False) -> _Switch:
        words = ast.unparse(test.test)[:_LONGEST]
        is_in_object = isinstance(self._place, _Objects)
        return _Switch(self._words, owner, name, is_entry, test.lineno, words, is_in_object)


def _is_method(owner: Any, name: str) -> bool:
    """Whether a call of it gives the owner as the first argument."""
    return name not in attributes_of(owner) and isinstance(
        inspect.getattr_static(type(owner), name, None), FunctionType
    )


def _placed(node: ast.expr, given: Mapping[str, ast.expr], depth: int, place: _Place) -> ast.expr | None:
    """The expression in the function with the loop: arguments of a called one are what they stand for there."""
    if isinstance(node, ast.Name):
        known = given.get(node.id)
        is_its_own = depth == _DEPTH or (node.id in place.f_globals and node.id not in place.f_locals)
        return known if known is not None else node if is_its_own else None
    if isinstance(node, ast.Attribute):
        inner = _placed(node.value, given, depth, place)
        return None if inner is None else ast.Attribute(inner, node.attr, ast.Load())
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = _placed(node.value, given, depth, place)
        return None if inner is None else ast.Subscript(inner, node.slice, ast.Load())
    return None


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return None
    code = inner.__code__
    tree = tree_of_file(code.co_filename, inner.__globals__)
    return None if tree is None else _functions(tree).get((code.co_name, code.co_firstlineno))


@lru_cache(maxsize=MOST_FILES)
def _functions(tree: ast.Module) -> dict[tuple[str, int], ast.FunctionDef]:
    """By name and first line, decorators included."""
    found = (node for node in walk(tree) if isinstance(node, ast.FunctionDef))
    return {(n.name, min(n.lineno, *(d.lineno for d in n.decorator_list), n.lineno)): n for n in found}


def _set_in(loop: Loop) -> set[str]:
    """The variables that the loop works out: not its counters."""
    nodes = [node for statement in loop.body for node in walk(statement)]
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    flat = [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return {each.id for each in flat if isinstance(each, ast.Name)}


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in walk(node) if isinstance(one, ast.Name)}


def _is_of_none(test: ast.expr) -> bool:
    """``if scaler is not None:``, ``if batch:``"""
    return not any(isinstance(op, (*_ORDERS, ast.Eq)) for n in walk(test) if isinstance(n, ast.Compare) for op in n.ops)


def _is_lost(one: _Switch, place: _Place, own: set[str], kept: Kept) -> bool:
    """Whether the owner outlives the loop's turns, and no file has what is set."""
    assert one.owner is not None
    node: ast.expr = one.owner.value if isinstance(one.owner, ast.Starred) else one.owner
    while True:
        value = _value_at(node, place)
        if value is _UNKNOWN or isinstance(value, (torch.optim.Optimizer, LRScheduler, torch.Tensor)):
            return False
        if id(value) in kept.objects and not isinstance(value, nn.Module):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
            continue
        return isinstance(node, ast.Name) and node.id not in own and one.name not in _IN_STATE_DICTS


class _Reads:
    """What the program reads for more than a log: one pass through its source."""

    def __init__(self, sources: Sources) -> None:
        self._attributes: set[str] = set()
        self._entries: set[str] = set()
        self._own: set[str] = set()
        """Attributes that its classes set on themselves."""
        for tree, parents in sources.trees():
            for node in walk(tree):
                if isinstance(node, ast.Attribute):
                    if not isinstance(node.ctx, ast.Load):
                        if isinstance(node.value, ast.Name) and node.value.id == "self":
                            self._own.add(node.attr)
                    elif node.attr not in self._attributes and not _is_logged(node, parents):
                        self._attributes.add(node.attr)
                elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                    if isinstance(node.ctx, ast.Load) and not _is_logged(node, parents):
                        self._entries.add(str(node.slice.value))
                elif isinstance(node, ast.Call) and name_of(node.func) == "get":  # config.get("noise")
                    self._entries |= {str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}

    def has(self, one: _Switch) -> bool:
        """Also what is of a library, whose source is not looked at."""
        if not one.name:
            return True
        if one.is_entry:
            return one.name in self._entries
        return one.name in self._attributes or one.name not in self._own


def _is_logged(node: ast.AST, parents: Mapping[int, ast.AST]) -> bool:
    at: ast.AST | None = node
    while at is not None and not isinstance(at, ast.stmt):
        if isinstance(at, ast.Call) and (logs(at) or names_a_log(name_of(at.func))):
            return True
        at = parents.get(id(at))
    return False


# --- what it is now ---


def _value_at(node: ast.expr, frame: _Place) -> Any:
    """What a name, an attribute or an entry stands for, without running the program's code."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        return _attribute(_value_at(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _entry(_value_at(node.value, frame), node.slice.value)
    return _UNKNOWN


def _attribute(owner: Any, name: str) -> Any:
    if owner is _UNKNOWN:
        return _UNKNOWN
    held = attributes_of(owner)
    if name in held:
        return held[name]
    for table in ("_modules", "_parameters", "_buffers"):
        if isinstance(owner, nn.Module) and name in held.get(table, {}):
            return held[table][name]
    found = inspect.getattr_static(owner, name, _UNKNOWN)
    return _UNKNOWN if isinstance(found, property) else found


def _entry(owner: Any, key: Any) -> Any:
    if isinstance(owner, (nn.Sequential, nn.ModuleList)) and isinstance(key, int):
        owner = [*owner._modules.values()]
    if type(owner) is dict:
        return owner.get(key, _UNKNOWN)
    if type(owner) in (list, tuple) and isinstance(key, int) and -len(owner) <= key < len(owner):
        return owner[key]
    return _UNKNOWN


def _value(one: _Switch, place: _Place) -> Any:
    if one.owner is None:
        return _value_at(ast.Name(one.name, ast.Load()), place)
    if isinstance(one.owner, ast.Starred):
        root = _value_at(one.owner.value, place)
        modules = [*root.modules()] if isinstance(root, nn.Module) else []
        held = [attributes_of(each).get(one.name) for each in modules]
        return repr([value for value in held if value is None or isinstance(value, (bool, int, float, str))])
    owner = _value_at(one.owner, place)
    if owner is _UNKNOWN:
        return _UNKNOWN
    if not one.name:
        tables = (value for key, value in attributes_of(owner).items() if key.endswith("_hooks"))
        return sum(len(table) for table in tables if isinstance(table, dict))
    return _entry(owner, one.name) if one.is_entry else _attribute(owner, one.name)


def _in_short(value: Any) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)) and len(value) < 16:
        parts = [_in_short(one) for one in value]
        return _UNKNOWN if _UNKNOWN in parts else (type(value), tuple(parts))
    if value is _UNKNOWN or not callable(value) or isinstance(value, torch.Tensor):
        return _UNKNOWN  # tensors and what has them: other checks
    return type(value), id(value)
