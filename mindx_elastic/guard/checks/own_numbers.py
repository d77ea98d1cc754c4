"""Finds numbers that an object of the program's own carries from step to step and that steer the training:
``agent.epsilon *= 0.99``, the patience of a trainer, the difficulty of a data set.

Most numbers that change are statistics for a log. What is told also goes on from its own last value, as the source
shows, and

- belongs to a data set, a sampler or what hangs on one, is not set where samples are made, and is not among what a
  loader's state has of those (`guard.loops.data_settings`), or
- is read in a test above a ``return``, a break or a step (other than against nothing: ``if self.count == 0``), in a
  comparison that is returned, in a learning rate, in an argument of ``step(...)`` or of a function named like
  ``adjust_lr`` or ``clip_grad_norm_``, in a change of a gradient, or as a factor of a loss or of random numbers; or a
  local variable or an attribute that is worked out from it is.

So are lists of numbers that are appended to, such as AutoClip's history of gradient norms. All is a risk.
"""

from __future__ import annotations

import ast
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.checks.remedies import attributes_line, can_be_named
from mindx_elastic.guard.checks.source_reads import Sources, only_logs, sets_from_itself, steering_reads
from mindx_elastic.guard.checks.surroundings import Found
from mindx_elastic.guard.checks.syntax import children, walk
from mindx_elastic.guard.checks.training_words import (
    STEPS,
    changes_a_gradient,
    name_of,
    names_a_log,
    names_a_setting,
    sets_a_rate,
    trains,
)

__all__ = ["OwnNumbers"]

_MOST = 256
_BEGINS = ("__init__", "__new__", "__post_init__", "__setstate__", "state_dict", "load_state_dict", "reset")
_MAKES_SAMPLES = ("__iter__", "__next__", "__getitem__", "__getitems__", "__call__", "__len__")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_Test = Callable[[ast.AST], bool]
_Parents = Mapping[int, ast.AST]


class OwnNumbers:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[weakref.ref[Any], object]] = {}
        self._done: set[tuple[type, str]] = set()

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def begin(self, found: Iterable[Found]) -> None:
        """The training begins: what its first step changes counts, too."""
        for one in found:
            deque(self._follow(one.value, {}), maxlen=0)

    def look(
        self,
        found: Iterable[Found],
        is_kept: Callable[[object], bool],
        is_of_data: Callable[[object], bool],
        keeps_setting: Callable[[object, str], bool],
        files: Callable[[], Collection[str]],
        line_of: Callable[[list[str]], str],
    ) -> Iterator[tuple[str, str]]:
        """What is known against those of `found` that no named object keeps, and what to write. `is_of_data`: whether a
        named loader has it. `keeps_setting`: whether that attribute of it is kept by itself."""
        before, self._before = self._before, {}
        sources: Sources | None = None
        for one in found:
            moved = [name for name in self._follow(one.value, before) if (type(one.value), name) not in self._done]
            held = attributes_of(one.value)
            moved = [name for name in moved if type(held[name]) in (int, float) or not is_kept(held[name])]
            if not moved or is_kept(one.value):
                continue
            self._done.update((type(one.value), name) for name in moved)
            sources, data = sources or Sources(files()), is_of_data(one.value)
            moved = [name for name in moved if not keeps_setting(one.value, name)]
            lines = {name: _line_of(one.value, name, sources, data=data) for name in moved}
            for name in (name for name in moved if lines[name] is not None):
                yield _words(one, name, lines[name] or 0, line_of, data=data)

    def _follow(self, value: Any, before: Mapping[tuple[int, str], tuple[weakref.ref[Any], object]]) -> Iterator[str]:
        """The attributes that are others than at the look before."""
        for name, held in attributes_of(value).items():
            is_list = type(held) in (list, deque) and bool(held)
            last = held[-1] if is_list else held
            number = (len(held), last) if is_list else held
            if type(last) not in (int, float) or name.startswith("__") or len(self._before) >= _MOST:
                continue
            try:
                owner = weakref.ref(value)
            except TypeError:
                return
            key = id(value), name
            self._before[key] = owner, number
            old = before.get(key)
            if old is not None and old[0]() is value and repr(old[1]) != repr(number):
                yield name


def _line_of(value: object, name: str, sources: Sources, *, data: bool) -> int | None:
    """The line that shows that the training depends on it; None: nothing does."""

    names = {name}
    methods: set[int] = set()  # x.mean() has nothing to do with a number that is called mean

    def of_self(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in names and _is_self(node.value)

    def of_another(node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr not in names or id(node) in methods:
            return False
        return not _is_self(node.value)

    places: list[tuple[ast.AST, _Parents, _Test]] = []
    for tree, parents in sources.classes_of(type(value)):
        own = [node for node in children(tree) if isinstance(node, ast.FunctionDef)]
        places += [(method, parents, of_self) for method in own if method.name not in _BEGINS]
    outside = [(tree, parents, of_another) for tree, parents in sources.trees()]
    updates = [
        node
        for tree, _, is_it in [*places, *outside]
        if not (data and isinstance(tree, ast.FunctionDef) and tree.name in _MAKES_SAMPLES)
        for node in walk(tree)
        if isinstance(node, ast.stmt) and (sets_from_itself(node, is_it) or _adds_to(node, is_it))
    ]
    if data:
        return min((node.lineno for node in updates), default=None)
    best = [part for tree, _, is_it in places for node in walk(tree) for part in _keeps_the_best(node, is_it)]
    if not updates and not best:
        return None
    inside = {id(part) for node in (*updates, *best) for part in walk(node)}
    methods = {id(node.func) for tree, _, _ in outside for node in walk(tree) if isinstance(node, ast.Call)}
    before = 0
    while len(names) != before:
        before = len(names)
        names.update(one for tree, _, is_it in [*places, *outside] for one in _set_by(tree, is_it))
    lines = [
        line
        for tree, parents, is_it in [*places, *outside]
        for read in steering_reads(tree, is_it, dict(parents))
        if id(read) not in inside and (line := _steers(read, parents) or _steers_by_a_local(read, parents, is_it))
    ]
    return min(lines, default=None)


def _set_by(tree: ast.AST, is_it: _Test) -> Iterator[str]:
    """The attributes that are worked out from it, or that change by a test of it:
    ``if self.n % 9 == 0: self.k *= 0.9``."""
    for node in walk(tree):
        if isinstance(node, ast.Assign) and any(map(is_it, _read_in(node.value))):
            yield from (target.attr for target in node.targets if isinstance(target, ast.Attribute))
        elif isinstance(node, ast.If) and any(map(is_it, walk(node.test))):
            if any(_keeps_the_best(node, is_it)):
                sets = (each for each in node.body if isinstance(each, ast.Assign))
                yield from (
                    target.attr for each in sets for target in each.targets if isinstance(target, ast.Attribute)
                )
            changes = (each for each in node.body if isinstance(each, ast.AugAssign))
            for each in changes:
                if isinstance(each.target, ast.Attribute) and not isinstance(each.op, (ast.Add, ast.Sub)):
                    yield each.target.attr


def _steers_by_a_local(read: ast.AST, parents: _Parents, is_it: _Test) -> int:
    """The line in which a variable of the same function steers that is worked out from it:
    ``rate = base * self.steps / warmup`` and then ``group["lr"] = rate``. 0: none."""
    function = read
    while (parent := parents.get(id(function))) is not None and not isinstance(function, _FUNCTIONS):
        function = parent
    if not isinstance(function, _FUNCTIONS):
        return 0
    nodes = [node for node in walk(function) if isinstance(node, (ast.Assign, ast.AnnAssign))]
    names: set[str] = set()
    before = -1
    while len(names) != before:
        before = len(names)
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = {target.id for target in targets if isinstance(target, ast.Name)}
            if own and node.value is not None and any(is_it(n) or _is_of(n, names) for n in _read_in(node.value)):
                names |= own
    local = steering_reads(function, lambda node: _is_of(node, names), dict(parents)) if names else ()
    return min((line for one in local if (line := _steers(one, parents))), default=0)


def _is_of(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _read_in(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression, without what it hands to a log."""
    yield node
    for child in children(node):
        if not (isinstance(node, ast.Call) and names_a_log(name_of(node.func))):
            yield from _read_in(child)


def _adds_to(node: ast.AST, is_it: _Test) -> bool:
    """``self.norms.append(norm)``."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr in ("append", "appendleft", "extend") and is_it(call.func.value)


def _keeps_the_best(node: ast.AST, is_it: _Test) -> list[ast.AST]:
    """The test and the change of ``if fitness >= self.best: self.best = fitness``; empty: it is something else."""
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return []
    is_order = all(isinstance(each, _ORDERS) for each in node.test.ops)
    sets = [each for each in node.body if isinstance(each, ast.Assign) and any(map(is_it, each.targets))]
    return [node.test, *sets] if is_order and sets and any(map(is_it, walk(node.test))) else []


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _steers(read: ast.expr, parents: _Parents) -> int:
    """The line of it where it does; else 0."""
    return read.lineno if _does_steer(read, parents) else 0


def _does_steer(read: ast.AST, parents: _Parents) -> bool:
    node, scales, compares = read, False, False
    while (parent := parents.get(id(node))) is not None:
        if isinstance(parent, ast.Compare) and any(map(_is_nothing, (parent.left, *parent.comparators))):
            return False
        compares = compares or (isinstance(parent, ast.Compare) and all(isinstance(o, _ORDERS) for o in parent.ops))
        if isinstance(parent, ast.Return):
            return compares
        if isinstance(parent, (ast.If, ast.While)):
            if node is not parent.test or isinstance(node, ast.Attribute) or _only_leaves_a_log(parent, parents):
                return False
            return any(map(trains, parent.body))
        if isinstance(parent, ast.Call) and node is not parent.func:
            called = name_of(parent.func)
            if names_a_log(called):
                return False
            if called in STEPS or names_a_setting(called) or changes_a_gradient(parent):
                return True
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult):
            scales = True
            other = parent.right if node is parent.left else parent.left
            if any(isinstance(n, ast.Call) and "rand" in name_of(n.func) for n in walk(other)):
                return True
        if isinstance(parent, (ast.Assign, ast.AugAssign)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return (
                sets_a_rate(parent)
                or changes_a_gradient(parent)
                or (scales and any("loss" in name_of(t) for t in targets))
            )
        if isinstance(parent, ast.stmt):
            return False
        node = parent
    return False


def _only_leaves_a_log(test: ast.If | ast.While, parents: _Parents) -> bool:
    """``if self.calls % self.every: return`` in front of what only prints."""
    function = parents.get(id(test))
    if not isinstance(function, _FUNCTIONS) or test not in function.body:
        return False
    if test.orelse or not all(isinstance(one, ast.Return) and one.value is None for one in test.body):
        return False
    return all(map(only_logs, function.body[function.body.index(test) + 1 :]))


def _is_nothing(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or node.value == 0)


def _words(found: Found, name: str, line: int, line_of: Callable[[list[str]], str], *, data: bool) -> tuple[str, str]:
    whose = f"{type(found.value).__name__}{', ' * bool(found.place)}{found.place}"
    how = f"goes on from its own last value in line {line}" if data else f"steers the training in line {line}"
    what = f'"{found.name}.{name}" ({whose}) is carried from one step into another, {how}, and is not kept'
    if data:
        return what, "Work it out from the epoch, at the head of each epoch"
    return what, f"Write {line_of([found.name])}" if can_be_named(found.value) else attributes_line(found, [name])
