"""Finds what the steps of an epoch fill and what steers the training behind them: ``losses.append(loss.item())``, then
``scheduler.step(mean(losses))``; a meter of the program's, whose average decides whether to stop.

An epoch that is resumed in the middle begins with an empty one. Variables that are numbers are found by
`carried_variables`; these here are lists, dicts and objects, which a step changes in place:

- a method named like `append` or `update` is called, or an element or attribute is set, in the innermost loop around
  ``step_end()``, in which the variable itself is not set,
- it is not kept, and
- there or behind that loop it, or what is worked out from it, is given to a ``step(...)``, sets a learning rate, or
  decides about a break or a step; also where it is what the function returns, and its caller does that.

So is a value in a dict that is only ever set from its own last one (``settings["lr"] *= 0.9``) and steers it.

All is a risk. Read from source, at the first boundary.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from mindx_elastic.core.looks import has_attributes, has_method
from mindx_elastic.guard.checks.kept import Kept
from mindx_elastic.guard.checks.running_source import Entry, Loop, loops_around, spans, tree_of, value_of
from mindx_elastic.guard.checks.surroundings import place_of
from mindx_elastic.guard.checks.syntax import children, walk, without_index
from mindx_elastic.guard.checks.training_words import (
    STEPS,
    logs,
    name_of,
    names_a_log,
    names_a_setting,
    sets_a_rate,
    trains,
)

__all__ = ["filled_by_steps", "find_epoch_sums", "find_steering"]

_FILLS = ("append", "appendleft", "extend", "add", "update", "push", "put", "insert", "accumulate")
_OF_NO_VALUE = ("len", "time", "isinstance", "reset", "clear")
_WITHOUT_SUMS = ("torch", "logging", "accelerate")
"""Packages whose objects sum nothing up: ``accelerator.accumulate(model)``, then ``if accelerator.sync_gradients:``."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Body: TypeAlias = Sequence[ast.stmt]


def find_epoch_sums(frame: FrameType | None, entry: Entry | None, kept: Kept) -> Iterator[tuple[str, str]]:
    """What is known against each, and what to write. At a boundary, which is passed in `frame`."""
    loops = loops_around(frame, entry) or []
    if not loops:
        return
    steps, place = loops[0]
    told: set[str] = set()
    for key, node in filled_by_steps(steps, place, kept).items():
        steering = find_steering(loops, key)
        if steering is None:
            continue
        line = steering[0]
        told.add(key)
        name = name_of(node)
        what = f"{key} ({place_of(place)}) is filled by the steps of an epoch, steers the training in line {line}, and "
        what += "is not kept: an epoch that is resumed in the middle begins with an empty one"
        keep = f'Guard(stateful={{"{name}": {name}}}, ...)'
        yield what, f"Make it before the guard, write {keep}, and empty it in place at the epoch's beginning"
    outer, place = loops[-1]
    for key, owner in _own_values(outer, place, kept):
        if owner not in told and (at := _sink(outer.body, {key})[0]) is not None:
            what = f"{key} ({place_of(place)}) goes on from its own last value, steers the training in line {at}, and "
            yield f"{what}is not kept", f'Write Guard(stateful={{"{owner}": {owner}}}, ...)'


def _own_values(outer: Loop, place: FrameType, kept: Kept) -> Iterator[tuple[str, str]]:
    """What is only ever set from its own last value, ``settings["lr"] *= 0.9``: its text, and that of the dict."""
    goes_on: dict[str, ast.expr] = {}
    anew: set[str] = set()
    for node in _inside(outer.body):
        if not isinstance(node, (ast.Assign, ast.AugAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                key = ast.unparse(target)
                if isinstance(node, ast.AugAssign) or _reads(node.value, {key}):
                    goes_on.setdefault(key, target.value)
                else:
                    anew.add(key)
    for key, owner in goes_on.items():
        value = value_of(owner, place)
        if key not in anew and type(value) is dict and id(value) not in kept.objects:
            yield key, ast.unparse(owner)


def filled_by_steps(steps: Loop, place: FrameType, kept: Kept) -> dict[str, ast.expr]:
    """The variables and attributes that the loop fills, by their text."""
    found: dict[str, ast.expr] = {}
    nodes = list(_inside(steps.body))
    own = {text for node in nodes if isinstance(node, ast.Assign) for t in node.targets for text in _set_by(t)}
    own |= {text for loop in (steps, *nodes) if isinstance(loop, ast.For) for text in _set_by(loop.target)}
    behind = list(_inside(list(_behind(steps, place, None))))
    for node in nodes:
        for held in _filled_by(node):
            key, value = ast.unparse(held), value_of(held, place)
            if names_a_log(name_of(held)) and not _is_read(key, behind):
                continue
            owner = value_of(held.value, place) if isinstance(held, ast.Attribute) else None
            if isinstance(owner, torch.optim.Optimizer):
                continue  # its groups
            if key not in own and key.partition(".")[0] not in own and _may_be_one(value, kept):
                found.setdefault(key, held)
    return found


def _filled_by(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or call changes in place: names and attributes of names."""
    held: list[ast.expr] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLS:
        held = [node.func.value] if node.args or node.keywords else []
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        held = [t.value for t in targets if isinstance(t, (ast.Subscript, ast.Attribute))]
    for one in held:
        whole = without_index(one)
        is_plain = isinstance(whole, ast.Name) or (
            isinstance(whole, ast.Attribute) and isinstance(whole.value, ast.Name)
        )
        if is_plain and ast.unparse(whole) != "self":
            yield whole


def _is_read(key: str, behind: Sequence[ast.AST]) -> bool:
    """Whether `key`, which is named like a log, is more than one: the nodes behind its loop read what it has
    (``metric_logger.meters``), or print it. A log is only written to (``log_writer.flush()``)."""
    calls = [node for node in behind if isinstance(node, ast.Call)]
    methods = {id(call.func) for call in calls}
    printed = {id(part) for call in calls if logs(call) for given in call.args for part in walk(given)}
    for node in behind:
        is_attribute = isinstance(node, ast.Attribute) and id(node) not in methods and ast.unparse(node.value) == key
        if is_attribute or (id(node) in printed and isinstance(node, ast.expr) and ast.unparse(node) == key):
            return True
    return False


def _may_be_one(value: Any, kept: Kept) -> bool:
    """Not what is kept, nor what other checks look at."""
    if id(value) in kept.objects or isinstance(
        value, (nn.Module, torch.Tensor, torch.optim.Optimizer, ModuleType, type)
    ):
        return False
    if isinstance(value, (list, dict)) or has_method(value, "append"):
        return True
    return has_attributes(value) and type(value).__module__.partition(".")[0] not in _WITHOUT_SUMS


def _set_by(target: ast.expr) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _set_by(each)
    elif isinstance(target, (ast.Name, ast.Attribute)):
        yield ast.unparse(target)


def _inside(statements: _Body) -> Iterator[ast.AST]:
    """All nodes, without functions that are defined there."""
    for statement in statements:
        if not isinstance(statement, _SCOPES):
            yield statement
            for child in children(statement):
                yield from _inside_node(child)


def _inside_node(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, _SCOPES):
        yield node
        for child in children(node):
            yield from _inside_node(child)


# --- behind the loop ---


def find_steering(loops: Sequence[tuple[Loop, FrameType]], key: str) -> tuple[int, FrameType] | None:
    """Where `key` steers the training, in the first of `loops`, the innermost, or behind it: the line and the function
    that it is in. None: nowhere."""
    steps, place = loops[0]
    if (line := _sink(steps.body, {key})[0]) is not None:  # a window of the last losses
        return line, place
    outer = next((loop for loop, where in loops[1:] if where is place), None)
    tainted, behind = {key}, list(_behind(steps, place, outer))
    while True:
        line, is_returned = _sink(behind, tainted)
        if line is not None:
            return line, place
        if not is_returned or outer is not None:
            return None
        # The function with the loop is called in one around it: go on with what it returns.
        callers = [(loop, where) for loop, where in loops if where is not place]
        if not callers or callers[0][1] is not _caller_of(place, loops):
            return None
        outer, caller = callers[0]
        called, statement = place.f_code.co_name, _statement_at(outer.body, caller.f_lineno)
        if statement is None or not any(isinstance(n, ast.Call) and name_of(n.func) == called for n in walk(statement)):
            return None
        tainted = {f"{called}()"}
        behind, place = [statement, *_behind(statement, caller, outer)], caller


def _caller_of(place: FrameType, loops: Sequence[tuple[Loop, FrameType]]) -> FrameType | None:
    """The frame that has called `place`, if a loop of `loops` runs in it."""
    frame, known = place.f_back, {id(where) for _, where in loops}
    return frame if frame is not None and id(frame) in known else None


def _statement_at(body: _Body, line: int) -> ast.stmt | None:
    """The innermost statement that spans the line."""
    for statement in body:
        if spans(statement, line):
            inner = [getattr(statement, name, ()) for name in ("body", "orelse", "finalbody")]
            found = (_statement_at(each, line) for each in inner if isinstance(each, list))
            return next((each for each in found if each is not None), statement)
    return None


def _behind(node: ast.stmt, place: FrameType, outer: Loop | None) -> Iterator[ast.stmt]:
    """The statements that come behind `node`, up to the end of `outer`, or of the function."""
    tree = tree_of(place)
    root: ast.AST | None = outer if outer is not None else _function_at(tree, place)
    yield from () if root is None else _following(root, node)


def _function_at(tree: ast.Module | None, place: FrameType) -> ast.AST | None:
    nodes = () if tree is None else walk(tree)
    name, line = place.f_code.co_name, place.f_lineno
    own = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name]
    return next((n for n in own if spans(n, line)), None)


def _following(root: ast.AST, node: ast.stmt) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(root, name, None)
        if not isinstance(statements, list):
            continue
        for number, statement in enumerate(statements):
            if isinstance(statement, ast.stmt) and (statement is node or spans(statement, node.lineno)):
                if statement is not node:
                    yield from _following(statement, node)
                yield from statements[number + 1 :]
                return


def _sink(behind: _Body, tainted: set[str]) -> tuple[int | None, bool]:
    """The first line that steers the training, and whether what is tainted is returned. Adds to `tainted`."""
    nodes, before = list(_inside(behind)), 0
    while len(tainted) != before:
        before = len(tainted)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _reads(node.value, tainted):
                    tainted |= {text for target in targets for text in _set_by(target)}
    lines = [n.lineno for n in nodes if isinstance(n, (ast.stmt, ast.expr)) and _is_sink(n, tainted)]
    returned = any(isinstance(n, ast.Return) and n.value is not None and _reads(n.value, tainted) for n in nodes)
    return min(lines, default=None), returned


def _is_sink(node: ast.AST, tainted: set[str]) -> bool:
    if isinstance(node, (ast.If, ast.While)):
        return _reads(node.test, tainted) and any(map(trains, node.body))
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        return sets_a_rate(node) and _reads(node.value, tainted)
    if not isinstance(node, ast.Call):
        return False
    called = name_of(node.func)
    if names_a_log(called) or not any(
        _reads(part, tainted) for part in (*node.args, *(k.value for k in node.keywords))
    ):
        return False
    return called in STEPS or names_a_setting(called)


def _reads(node: ast.AST, tainted: set[str]) -> bool:
    """Whether an expression reads something of `tainted`, without what it only logs and the length of things."""
    if isinstance(node, ast.Call):
        called = name_of(node.func)
        if f"{called}()" in tainted:
            return True
        if names_a_log(called) or called in _OF_NO_VALUE:
            return False
    is_one = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Load)
    if is_one and ast.unparse(node) in tainted:
        return True
    return any(_reads(child, tainted) for child in children(node))
