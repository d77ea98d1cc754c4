"""Finds ``for i, batch in enumerate(loader)`` whose index steers the training: after a resume it begins anew at 0.

It reads the source of the functions that are running, once. What the index decides only for a log, an evaluation or a
file is left alone, and so is an index whose windows (``(i + 1) % n``) end where the boundaries are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch

from mindx_elastic.core.looks import has_method
from mindx_elastic.data.position import num_batches
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.checks.running_source import Entry, Loop, loop_in_words, loops_around, spans, value_of
from mindx_elastic.guard.checks.source_reads import parents_of, steering_reads
from mindx_elastic.guard.checks.syntax import walk
from mindx_elastic.guard.checks.training_words import (
    counts_on,
    name_of,
    names_a_log,
    names_a_setting,
    sets_a_rate,
    trains,
)

__all__ = ["Numbered", "find_own_index"]

_OPTIMIZERS = (torch.optim.Optimizer, torch.amp.GradScaler)

_WRAPS = {"tqdm", "trange", "track"}
_ARITHMETIC = (
    ast.Name,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
    ast.Attribute,
)


def find_own_index(frame: FrameType | None, entry: Entry | None, kept: Collection[int]) -> tuple[str, str] | None:
    """What is known against the index of a loop around the call in `frame`, and what to write.

    `kept`: `id` of what the guard keeps, the named loaders among it.
    """
    for loop, place in loops_around(frame, entry) or ():
        found = _enumerated(loop)
        if found is None:
            continue
        index, batches, start = found
        if start is not None and counts_on(start):
            continue
        wanted = [node for node in walk(batches) if isinstance(node, (ast.Name, ast.Attribute))]
        named = next((node for node in wanted if id(value_of(node, place)) in kept), None)
        if named is None:
            continue
        size = num_batches(value_of(named, place))

        def divides(node: ast.AST, place: FrameType = place, size: int = size) -> bool:
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
                return False
            by = node.right.value if isinstance(node.right, ast.Constant) else value_of(node.right, place)
            return isinstance(by, int) and by > 0 and size > 0 and size % by == 0

        first = 0 if start is None else start.value if isinstance(start, ast.Constant) else None
        is_off = partial(_is_off, loop, place)
        line = _steering_line(loop, index, place, divides, is_off, first=first)
        if line is None:
            continue
        what = f"the index {index} of the loop at {loop_in_words(loop, place)} begins anew when its epoch is resumed "
        what += f"in the middle, and steers the training in line {line}"
        begins = "" if start is None else f", start={ast.unparse(start)}"
        is_pair = isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple)
        target = ", ".join(map(ast.unparse, loop.target.elts)) if is_pair else index  # type: ignore[union-attr]
        own = f"guard.enumerate({ast.unparse(named)}{begins})"
        if isinstance(batches, ast.Call):  # metric_logger.log_every(loader, 10)
            own = ast.unparse(batches).replace(ast.unparse(named), own, 1)
        return what, f"Write for {target} in {own}:"
    return None


def _is_off(loop: ast.AST, place: FrameType, test: ast.expr) -> bool:
    """Whether a test is a setting that is switched off (``args.dry_run``), and nothing in the loop sets it."""
    if not isinstance(test, (ast.Name, ast.Attribute)):
        return False
    value = value_of(test, place)
    if not (value is None or value is False or (type(value) is int and value == 0)):
        return False
    own = name_of(test)
    return not any(
        isinstance(node, (ast.Name, ast.Attribute)) and name_of(node) == own and not isinstance(node.ctx, ast.Load)
        for node in walk(loop)
    )


def _enumerated(loop: Loop) -> tuple[str, ast.expr, ast.expr | None] | None:
    """Index, batches and start of ``for i, batch in enumerate(batches, start)``, also inside of ``tqdm``. The batches
    may be a call that passes those of a loader on."""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple) or len(loop.target.elts) != 2:
        return None
    index, call = loop.target.elts[0], loop.iter
    if isinstance(call, ast.Call) and name_of(call.func) in _WRAPS and call.args:
        call = call.args[0]
    if not isinstance(index, ast.Name) or not isinstance(call, ast.Call) or not call.args:
        return None
    if not isinstance(call.func, ast.Name) or call.func.id != "enumerate":
        return None
    batches = call.args[0]
    if isinstance(batches, ast.Call) and name_of(batches.func) in _WRAPS and batches.args:
        batches = batches.args[0]
    start = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "start"), None)
    return index.id, batches, start


def _steering_line(
    loop: ast.AST,
    index: str,
    place: FrameType,
    divides: Callable[[ast.AST], bool],
    is_off: Callable[[ast.expr], bool],
    *,
    first: object,
) -> int | None:
    """A line of the loop in which the index steers the training. `place`: the frame of ``step_end()``. `divides`:
    whether an expression is a modulo whose divisor the length of the epoch is a multiple of. `is_off`: see
    `steering_reads`. `first`: the index of the first batch, if it is known."""
    names = {index}
    for node in walk(loop):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            inner = list(walk(node.value))
            if any(isinstance(n, ast.Name) and n.id in names for n in inner) and all(map(_is_arithmetic, inner)):
                names.add(node.targets[0].id)

    def is_it(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    parents = parents_of(loop)
    inside: set[int] = set()  # of tests whose windows end where the boundaries are
    for node in walk(loop):
        if isinstance(node, ast.If) and any(map(is_it, walk(node.test))):
            holds = any(spans(statement, place.f_lineno) for statement in node.body)
            if holds or (_ends_window(node.test, index, first) and _has_all_updates(node, loop, place)):
                fits = any(map(divides, walk(node.test)))
                reads = [n for n in walk(node.test) if is_it(n)]
                inside |= {id(n) for n in reads if fits or _in_modulo(n, parents)}
    rest = [n for n in steering_reads(loop, is_it, parents, is_off) if id(n) not in inside]
    return min((read.lineno for read in rest if _steers(read, parents)), default=None)


def _ends_window(test: ast.expr, index: str, first: object) -> bool:
    """``(i + 1) % n == 0`` or ``i % n == n - 1`` of an accumulation, where the batches count from 0, and ``i % n == 0``
    where they count from 1. The job stops at the ends of such windows only."""
    if first not in (0, 1):
        return False
    count = f"{index} + 1" if first == 0 else index
    modulos = (node for node in walk(test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))
    if any(ast.unparse(node.left) in (count, f"({count})") for node in modulos):
        return True
    return first == 0 and any(isinstance(n, ast.Compare) and _is_last_of_window(n, index) for n in _operands(test))


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """What is true where `test` is, or may be."""
    yield test
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)


def _is_last_of_window(node: ast.Compare, index: str) -> bool:
    """``i % n == n - 1``, or the same with numbers."""
    left, right = node.left, node.comparators[0]
    if not (isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and isinstance(node.ops[0], ast.Eq)):
        return False
    if ast.unparse(left.left) != index:
        return False
    divisor, last = ast.unparse(left.right), ast.unparse(right)
    return last == f"{divisor} - 1" or (divisor.isdigit() and last == str(int(divisor) - 1))


def _has_all_updates(window: ast.If, loop: ast.AST, place: FrameType) -> bool:
    """Whether what the loop updates is updated in the body of `window`, and nowhere else. Else each batch ends with a
    boundary, and what the window has (a scheduler, the second optimizer of a GAN) goes by the index alone."""
    inside = [node for statement in window.body for node in walk(statement)]
    calls = [node for node in inside if isinstance(node, ast.Call)]
    if any(name_of(call.func) == "backward" for call in calls) or not any(_may_update(call, place) for call in calls):
        return False
    ids = set(map(id, calls))
    outside = (node for node in walk(loop) if isinstance(node, ast.Call) and id(node) not in ids)
    return not any(isinstance(_stepped(call, place), _OPTIMIZERS) for call in outside)


def _may_update(call: ast.Call, place: FrameType) -> bool:
    """``x.step()`` of anything that is no scheduler."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    return not has_method(_stepped(call, place), "get_last_lr") and "sched" not in name_of(call.func.value).lower()


def _stepped(call: ast.Call, place: FrameType) -> Any:
    """The object whose ``step`` is called, if it is known; else None."""
    is_step = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    return value_of(call.func.value, place) if is_step else None  # type: ignore[attr-defined]


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return name_of(node.func) in ("len", "int", "float", "min", "max")
    return isinstance(node, _ARITHMETIC)


def _up(node: ast.AST, parents: dict[int, ast.AST]) -> Iterator[tuple[ast.AST, ast.AST]]:
    while (parent := parents.get(id(node))) is not None:
        yield node, parent
        node = parent


def _in_modulo(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    for _, parent in _up(node, parents):
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mod):
            return True
        if isinstance(parent, ast.stmt):
            return False
    return False


def _steers(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    for child, parent in _up(node, parents):
        if isinstance(parent, ast.Call) and child is not parent.func:
            name = name_of(parent.func)
            if names_a_log(name):
                return False
            if name == "step" or names_a_setting(name):
                return True
        if isinstance(parent, ast.If) and child is parent.test:
            return any(map(trains, (*parent.body, *parent.orelse)))
        if isinstance(parent, ast.stmt):
            return sets_a_rate(parent)
    return False


# --- the index to write in its place ---


class Numbered(Iterator[tuple[int, Any]]):
    """The batches of a loader with their numbers in the epoch. It has the loader's length, which what is around it asks
    for: a bar, torchvision's `MetricLogger`."""

    def __init__(self, loader: Iterable[Any], start: int) -> None:
        self._loader, self._start = loader, start
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __next__(self) -> tuple[int, Any]:
        if self._batches is None:
            self._batches = iter(self._loader)
            self._number = _batches_done(self._loader) + self._start - 1
        batch = next(self._batches)
        self._number += 1
        return self._number, batch


def _batches_done(loader: Any) -> int:
    """Batches of its epoch that an iteration of `loader` that has just begun leaves out. Raises UsageError."""
    state = loader.state_dict() if has_method(loader, "state_dict") else None
    if not isinstance(state, Mapping) or not isinstance(state.get("batch"), int):
        raise UsageError(
            f"guard.enumerate({type(loader).__name__}): it cannot tell where it stands in its epoch; name the loader "
            "in Guard(loader=...) and give it to guard.enumerate() itself, tqdm and the like around that"
        )
    return int(state["batch"])
