"""Finds a loop that counts by itself: after a resume it begins anew, however far the training was.

It reads the source of the functions that are running, once, at the second boundary of a process.

==============================================================  ========================================================
the loop around ``step_end()``                                  after a resume
==============================================================  ========================================================
one pass over a named loader, nothing around it                 goes on by itself
``for epoch in range(90):`` around such a pass,                 begins anew
``for step in range(1000):``
``while step < 1000:`` with ``step += 1`` in it                 begins anew
a loop whose bounds, or a condition that ends it, ask the       its own affair
guard or an object that the guard keeps
any other ``while``                                             unknown
==============================================================  ========================================================
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mindx_elastic.guard.checks.running_source import (
    Entry,
    Loop,
    loop_in_words,
    loops_around,
    spans,
    tree_of,
    value_of,
)
from mindx_elastic.guard.checks.syntax import children, walk

__all__ = ["OwnCounter", "find_counter_in_epoch", "find_inner_counter", "find_own_counter"]

_COUNTS = {"range", "count", "trange"}
_PLAIN = {*_COUNTS, "len", "int", "min", "max", "tqdm", "enumerate"}


@dataclass(frozen=True)
class OwnCounter:
    """A loop that begins anew, in words."""

    what: str
    remedy: str


def find_own_counter(
    frame: FrameType | None,
    entry: Entry | None,
    kept: Collection[int],
    *,
    follows_loader: bool,
    asked_first: bool,
    asked_later: bool,
) -> OwnCounter | None:
    """The loop around the call in `frame` that begins anew after a resume; None: there is none, or it is not certain.

    `kept`: `id` of the guard and of what it keeps. `follows_loader`: a named loader is iterated. `asked_first`,
    `asked_later`: the program has asked the guard where it is, before or after its first boundary.
    """
    loops = loops_around(frame, entry)
    if not loops:
        return None
    outer, place = loops[-1]
    if len(loops) == 1 and follows_loader and isinstance(outer, ast.For) and not _counts(outer.iter):
        return None
    if any(_asks(loop, where, kept, strictly=asked_first or asked_later) for loop, where in loops):
        return None
    if asked_first and not (isinstance(outer, ast.For) and _is_fixed(outer, place)):
        return None
    if isinstance(outer, ast.While):
        name = _own_count(outer)
        if name is None:
            return None
        remedy = f"Write for {name} in guard.steps(number, start=0):, or begin with {name} = guard.step"
    else:
        name, inner = ast.unparse(outer.target), len(loops) > 1
        form = "epochs" if inner else "steps"
        remedy = f"Write for {name} in guard.{form}({_bounds(outer.iter)}):"
    return OwnCounter(
        f"the loop at {loop_in_words(outer, place)} begins anew after a resume, for it counts by itself",
        f"{remedy}. A program that keeps its count in an object of stateful= reads guard.step once before the loop",
    )


def find_inner_counter(
    frame: FrameType | None, entry: Entry | None, kept: Collection[int], *, may_follow: bool
) -> OwnCounter | None:
    """The innermost of several loops around the call in `frame`, where it begins anew for certain: over numbers or
    batches at hand, or with a count. Other arguments as for `find_own_counter`.

    `may_follow`: the program has asked the guard where it is, or keeps counts of its own: only a loop counts that
    begins at a fixed number, and does not compare its count with what is kept.
    """
    loops = loops_around(frame, entry)
    if loops is None or len(loops) < 2:
        return None
    loop, place = loops[0]
    if _asks(loop, place, kept, strictly=False) or (may_follow and not _begins_anew(loop, place, kept)):
        return None
    if isinstance(loop, ast.While) and _own_count(loop) is None:
        return None
    return OwnCounter(
        f"the loop at {loop_in_words(loop, place)} begins anew when its epoch is resumed in the middle, for it counts "
        "by itself",
        _inner_remedy(loop),
    )


def _begins_anew(loop: Loop, frame: FrameType, kept: Collection[int]) -> bool:
    counts = _bound_names(loop.target) if isinstance(loop, ast.For) else {_own_count(loop) or ""}
    tests = [node.test for node in walk(loop) if isinstance(node, (ast.If, ast.IfExp))]
    compared = [test for test in tests if any(_has_name(test, name) for name in counts)]
    if any(id(value) in kept for test in compared for value in _asked(test, frame)):
        return False
    ends = (node for end in _ends(loop) if not isinstance(loop, ast.For) or end is not loop.iter for node in walk(end))
    if isinstance(loop, ast.While):
        tree, name = tree_of(frame), _own_count(loop)
        begins = [] if tree is None or name is None else list(_values_set(tree, frame, name))
        return bool(begins) and all(isinstance(value, ast.Constant) for value in begins)
    if any(isinstance(node, ast.Call) and not _is_plain(node) for node in ends):
        return False
    found = _only_range(loop)
    if found is None or len(found.args) == 1:
        return _is_fixed(loop, frame)
    takes = (node.right for node in walk(found.args[1]) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub))
    return (
        isinstance(found.args[0], ast.Constant)
        and all(isinstance(value, ast.Constant) for value in takes)  # n - done are those that are left
        and not any(isinstance(node, ast.Continue) for node in walk(loop))
    )


def _inner_remedy(loop: Loop) -> str:
    once = "inside the loop over guard.epochs(), or call guard.step_end() once an epoch"
    if isinstance(loop, ast.While):
        name = _own_count(loop)
        return (
            f"Write for step in guard.steps(number, start=0): there, {once}. Where the number is not known, keep the "
            f'count: state["{name}"] in its place with Guard(stateful={{"state": state}}), and set it in front of the '
            "loop only if guard.position.step_in_epoch == 0:"
        )
    found = _only_range(loop)
    if found is None or len(found.args) < 2 or found.keywords:
        name = ast.unparse(loop.target) if isinstance(loop.target, ast.Name) else "step"
        bounds = "number, start=0" if found is None else _bounds(found)
        return f"Write for {name} in guard.steps({bounds}): there, {once}"
    numbers = ast.unparse(found)
    is_pair = isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2
    target = loop.target.elts[1] if is_pair else loop.target  # type: ignore[attr-defined]
    return (
        f"Write for step in guard.steps(len({numbers}), start=0): there, inside the loop over guard.epochs(), and "
        f"{ast.unparse(target)} = {numbers}[step] as its first line"
    )


def _bound_names(target: ast.expr) -> set[str]:
    return {node.id for node in walk(target) if isinstance(node, ast.Name)}


def _only_range(loop: ast.For) -> ast.Call | None:
    found = [node for node in walk(loop.iter) if isinstance(node, ast.Call) and _counts(node.func)]
    return found[0] if len(found) == 1 and found[0].args else None


def find_counter_in_epoch(
    frame: FrameType | None, entry: Entry | None, kept: Collection[int], *, wraps: bool, may_follow: bool
) -> OwnCounter | None:
    """A loop inside of the one over ``guard.epochs()`` that begins anew when its epoch is resumed in the middle, though
    the named loader goes on. Other arguments as for `find_own_counter`.

    `wraps`: the loader has begun anew within the epoch, for it is gone through several times, or a number of its
    batches makes an epoch. Otherwise the loop takes them by itself: ``for i in range(len(loader)): next(batches)``.
    `may_follow`: the program has asked the guard where it is, or keeps counts of its own: only fixed numbers count.
    """
    for number, (loop, place) in enumerate(loops_around(frame, entry) or []):
        if _is_over_epochs(loop) or (number and not wraps):
            break
        if isinstance(loop, ast.For):
            counts = _counts(loop.iter) or (wraps and _is_literal(loop.iter))
            bounds = _bounds(loop.iter)
        else:
            counts = _own_count(loop) is not None and (wraps or _is_as_long(loop, place, kept))
            bounds = "number, start=0"
        ends = [loop.test] if isinstance(loop, ast.While) else [loop.iter]
        if not counts or any(id(value) in kept for end in ends for value in _asked(end, place)):
            continue
        if (not wraps and _expects_an_end(loop)) or (may_follow and not _takes_all(loop, place, kept)):
            continue
        name = ast.unparse(loop.target) if isinstance(loop, ast.For) else "step"
        return OwnCounter(
            f"the loop at {loop_in_words(loop, place)} begins anew when its epoch is resumed in the middle, for "
            "it counts by itself",
            f"Write for {name} in guard.steps({bounds}): there"
            if not number
            else "Loop over guard.epochs(epochs * passes), with one pass over the loader in each, and work out from "
            "the epoch which pass it is",
        )
    return None


def _is_as_long(loop: ast.While, frame: FrameType, kept: Collection[int]) -> bool:
    """``while i < len(loader):`` with a count that the function begins at a number, and a loader that the guard keeps:
    in a resumed epoch the loader has fewer batches left than the count."""
    lengths = [
        node.args[0]
        for node in walk(loop.test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args
    ]
    if not any(id(value_of(node, frame)) in kept for node in lengths):
        return False
    tree, name = tree_of(frame), _own_count(loop)
    if tree is None or name is None:
        return False
    begins = list(_values_set(tree, frame, name))
    return bool(begins) and all(isinstance(value, ast.Constant) for value in begins)


def _values_set(tree: ast.Module, frame: FrameType, name: str) -> Iterator[ast.expr]:
    """What the running function sets the variable to; not what it adds to it."""
    own = [n for n in walk(tree) if isinstance(n, ast.FunctionDef) and n.name == frame.f_code.co_name]
    own = [function for function in own if spans(function, frame.f_lineno)]
    for node in walk(own[-1] if own else tree):
        for target, value in _assigned(node):
            if _has_name(target, name) and not _has_name(value, name):
                yield value


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment sets, each with its value: ``i, j = i + 1, 0`` are two."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        assert isinstance(node, ast.Assign)
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _has_name(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in walk(node))


def _takes_all(loop: Loop, frame: FrameType, kept: Collection[int]) -> bool:
    """Whether it goes through fixed numbers, or as many as something is long, and skips none."""
    if isinstance(loop, ast.While):
        return _is_as_long(loop, frame, kept)
    if not isinstance(loop, ast.For) or any(isinstance(node, ast.Continue) for node in walk(loop)):
        return False
    ranges = [node for node in walk(loop.iter) if isinstance(node, ast.Call) and _counts(node.func)]
    is_long = len(ranges) == 1 and len(ranges[0].args) == 1 and ast.unparse(ranges[0].args[0]).startswith("len(")
    return is_long or _is_literal(loop.iter) or _is_fixed(loop, frame)


def _asked(node: ast.AST, frame: FrameType) -> Iterator[Any]:
    """What an expression reads, without what is only asked for its length."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield value_of(node, frame)
    for child in children(node):
        yield from _asked(child, frame)


def _expects_an_end(loop: Loop) -> bool:
    """Whether it does something of its own when no batch is left: ``except StopIteration``, ``next(batches, None)``."""
    for node in walk(loop):
        if isinstance(node, ast.Name) and node.id == "StopIteration":
            return True
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "next" and len(node.args) > 1:
            return True
    return False


def _is_over_epochs(loop: Loop) -> bool:
    calls = walk(loop.iter) if isinstance(loop, ast.For) else ()
    return any(isinstance(node, ast.Attribute) and node.attr == "epochs" for node in calls)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, (ast.Tuple, ast.List)) and all(isinstance(each, ast.Constant) for each in node.elts)


def _counts(node: ast.AST) -> bool:
    """Whether an iterable is made of numbers: ``range(n)``, ``tqdm(range(n))``, ``itertools.count()``."""
    names = (getattr(n, "id", None) or getattr(n, "attr", None) for n in walk(node))
    return any(name in _COUNTS for name in names)


def _ends(loop: Loop) -> Iterator[ast.expr]:
    """The expressions that decide how long the loop runs; not the loader that it goes through."""
    if isinstance(loop, ast.While):
        yield loop.test
    elif _counts(loop.iter):
        yield loop.iter
    for node in walk(loop):
        if isinstance(node, ast.If) and any(
            isinstance(inner, (ast.Break, ast.Return, ast.Continue, ast.Raise)) for inner in walk(node)
        ):
            yield node.test


def _asks(loop: Loop, frame: FrameType, kept: Collection[int], *, strictly: bool) -> bool:
    """Whether one of those expressions looks at something that the guard keeps, or at the guard.

    `strictly`: a function that is called there counts as looking, because the program has asked the guard somewhere.
    """
    if isinstance(loop, ast.For) and isinstance(items := value_of(loop.iter, frame), (list, tuple)):
        return any(id(item) in kept for item in items)  # loaders in turn: those before the resumed one have no batch
    nodes = [node for end in _ends(loop) for node in walk(end)]
    if strictly and any(isinstance(node, ast.Call) and not _is_plain(node) for node in nodes):
        return True
    return any(isinstance(node, (ast.Name, ast.Attribute)) and id(value_of(node, frame)) in kept for node in nodes)


def _is_fixed(loop: ast.For, frame: FrameType) -> bool:
    """Whether the loop goes over ``range(90)``, or a name or setting for such a number, and skips nothing."""
    if any(isinstance(node, ast.Continue) for node in walk(loop)):
        return False
    found = _only_range(loop)
    if found is None or len(found.args) != 1:
        return False
    number = found.args[0]
    if isinstance(number, ast.Name):
        tree = tree_of(frame)
        targets = [
            (target, node.value)
            for node in (() if tree is None else walk(tree))
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        values = [v for t, v in targets if any(isinstance(n, ast.Name) and n.id == number.id for n in walk(t))]
        return len(values) == 1 and isinstance(values[0], ast.Constant)
    return isinstance(number, (ast.Constant, ast.Attribute))


def _is_plain(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in _PLAIN


def _own_count(loop: ast.While) -> str | None:
    """A variable that the loop counts up (or down) and that decides how long it runs."""
    counted = {
        node.target.id for node in walk(loop) if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    } | {
        target.id
        for node in walk(loop)
        for target, value in _assigned(node)
        if isinstance(target, ast.Name) and isinstance(value, ast.BinOp) and _has_name(value, target.id)
    }
    read = [node.id for end in _ends(loop) for node in walk(end) if isinstance(node, ast.Name)]
    return next((name for name in read if name in counted), None)


def _bounds(node: ast.expr) -> str:
    """The arguments of our loop in the place of a ``range(...)``."""
    ranges = [n for n in walk(node) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("range", "trange")]
    if not ranges:
        return "number"
    first, *others = ranges[0].args or [ast.Constant("number")]
    if not others:
        return f"{ast.unparse(first)}, start=0"
    last = others[0]
    from_1 = isinstance(first, ast.Constant) and first.value == 1
    if from_1 and isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add) and ast.unparse(last.right) == "1":
        return ast.unparse(last.left)
    return "number"
