"""Tells from source whether a loop has used all the batches that it has fetched, where their number alone is ambiguous.

A first step with several batches may be one of a loop that fetches ahead, of one that leaves bad batches out
(``continue``), or of one whose steps take as many batches as they need. In the last two all fetched batches are used at
``step_end()``. It is so for certain where they were asked for inside the very loop that calls ``step_end()``, and that
loop hands none of them on to its next iteration::

    for x, y in loader:                              previous = None
        if bad(x):                                   for batch in loader:      # handed on: one is ahead
            continue                                     if previous is not None:
        ...                                                  ...; guard.step_end()
        guard.step_end()                                 previous = batch
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FrameType
from typing import TypeAlias

from mindx_elastic.guard.checks.running_source import spans, tree_of
from mindx_elastic.guard.checks.surroundings import is_library
from mindx_elastic.guard.checks.syntax import children, walk
from mindx_elastic.guard.checks.training_words import name_of

__all__ = ["Askers"]

_Asked: TypeAlias = "tuple[int, CodeType, int, bool]"  # the frame, its code, the line; it goes to a loop's next item
_OWN = "mindx_elastic"
_READ_AHEAD = ("mindx_elastic.data.prefetch", "mindx_elastic.integrations.read_ahead")
_PASSES_ON = {"tqdm", "rich", "alive_progress", "progressbar", "fastprogress"}
"""Libraries that show the progress of a loop, and fetch nothing ahead."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_TAKES = ("popleft", "pop", "get", "get_nowait")
_KEEPS = ("append", "appendleft", "put", "put_nowait", "insert", "add", "extend")
_READS_AHEAD = ("pairwise", "tee", "peekable")
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # functions of their own, up to Python 3.11
_NUMBERS = frozenset(("item", "size", "shape", "ndim", "numel", "dtype", "device"))  # ``x.float()`` is a tensor
_TO_NUMBERS = ("len", "float", "int", "bool")
_MOVES = ("to", "cuda", "cpu", "dict", "list", "tuple", "move_to_device", "to_device")


class Askers:
    """One per loader, until it is known how the loop fetches. Training thread."""

    def __init__(self) -> None:
        self._asked: list[_Asked] | None = []  # since the last boundary; None: somewhere that does not tell

    def see(self) -> None:
        """The loader is asked for a batch."""
        if self._asked is not None:
            place = _asking(sys._getframe(1))
            if place is None:
                self._asked = None
            elif place not in self._asked:
                self._asked.append(place)

    def have_used_all(self, frame: FrameType | None) -> bool:
        """A step has ended, below `frame`. Whether it is certain that all the batches that were asked for are used."""
        asked, self._asked = self._asked, None
        if not asked or len({key for key, *_ in asked}) > 1:
            return False
        key, code, *_ = asked[0]
        while frame is not None and (id(frame) != key or frame.f_code is not code):
            if not is_library(str(frame.f_globals.get("__name__", ""))):
                tree = tree_of(frame)
                if tree is None or _loop_at(tree, frame.f_lineno) is not None:
                    return False  # a batch may be for several steps
            frame = frame.f_back
        if frame is None or (tree := tree_of(frame)) is None:
            return False
        loop = _loop_at(tree, frame.f_lineno)
        lines = [line for *_, line, _ in asked]
        if loop is None or not all(spans(loop, line) for line in lines):
            return False
        in_head = [is_next for *_, line, is_next in asked if line < loop.body[0].lineno]
        return all(in_head) and not _hands_on(loop, lines)

    def begin_anew(self) -> None:
        """What was asked for so far is for no step."""
        self._asked = []


def _asking(frame: FrameType | None) -> _Asked | None:
    """Where the program asks, behind generators that give each batch as it comes; None: it cannot be told."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if root == _OWN or root in _PASSES_ON:
            if module in _READ_AHEAD:
                return None
        elif is_library(module):
            return None
        elif frame.f_code.co_name in _COMPREHENSIONS:
            pass
        elif not frame.f_code.co_flags & inspect.CO_GENERATOR:
            is_next = dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"
            return id(frame), frame.f_code, frame.f_lineno, is_next
        else:
            tree = tree_of(frame)
            loop = None if tree is None else _loop_at(tree, frame.f_lineno)
            if loop is None or _hands_on(loop, [frame.f_lineno]):
                return None
        frame = frame.f_back
    return None


def _loop_at(tree: ast.Module, line: int) -> ast.For | ast.AsyncFor | ast.While | None:
    """The innermost loop around `line`; None: there is none."""
    found = None
    node: ast.AST = tree
    while True:
        inner = next((n for n in children(node) if spans(n, line)), None)
        if inner is None:
            return found
        if isinstance(inner, (*_FUNCTIONS, ast.Lambda)):
            found = None
        elif isinstance(inner, _LOOPS):
            found = inner
        node = inner


def _hands_on(loop: ast.For | ast.AsyncFor | ast.While, asked: Collection[int]) -> bool:
    """Whether an iteration of `loop` may leave a batch to the next one. `asked`: the lines that ask for batches."""
    keys: dict[str, tuple[int, int]] = {}  # what holds a batch, and where it is set; the loop's own targets at its head
    by_next = any(isinstance(n, ast.Assign) and _asks(n, asked) and _has_next(n) for n in walk(loop))
    for node in walk(loop):
        if isinstance(node, (ast.For, ast.AsyncFor)) and (node is loop or _asks(node.iter, asked)):
            if any(name_of(n) in _READS_AHEAD for n in walk(node.iter)):
                return True
            keys |= {name: _place(node) for name in _set_by(node.target)}
        elif isinstance(node, ast.Assign) and _asks(node, asked) and (_has_next(node) or not by_next):
            for name in (name for target in node.targets for name in _set_by(target)):
                keys[name] = max(_end(node), keys.get(name, (0, 0)))
    for _round in range(3):  # copies of copies
        for node in walk(loop):
            if isinstance(node, ast.Assign) and _may_hold(node, keys):
                names = [name for target in node.targets for name in _set_by(target)]
                keys |= {name: _end(node) for name in names if name not in keys}
    heads = {_place(node) for node in walk(loop) if isinstance(node, _LOOPS)}
    for node in walk(loop):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            at = keys.get(ast.unparse(node))
            if at is not None and at not in heads and _place(node) < at:
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEPS:
            keeps = any(_is_made_of(a, keys) or (isinstance(a, ast.Call) and _asks(a, asked)) for a in node.args)
            if keeps and _is_taken(loop, ast.unparse(node.func.value)):
                return True
    return False


def _has_next(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and name_of(n.func) in ("next", "__next__") for n in walk(node))


def _asks(node: ast.AST, asked: Collection[int]) -> bool:
    return any(spans(node, line) for line in asked)


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _end(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0


def _set_by(target: ast.expr) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _set_by(each)
    elif isinstance(target, ast.Starred):
        yield from _set_by(target.value)
    elif isinstance(target, (ast.Name, ast.Attribute)):
        yield ast.unparse(target)


def _is_copy(value: ast.expr, keys: Collection[str]) -> bool:
    """Whether `value` is a batch, or is put together from such: ``x``, ``(x, y)``, ``x.to(device)``."""
    if isinstance(value, (ast.Name, ast.Attribute)) and ast.unparse(value) in keys:
        return True
    if isinstance(value, (ast.Tuple, ast.List)):
        return any(_is_copy(each, keys) for each in value.elts)
    if isinstance(value, ast.Subscript):
        return _is_copy(value.value, keys)
    if isinstance(value, ast.Call) and name_of(value.func) in _MOVES:
        owner = [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return any(_is_copy(each, keys) for each in (*owner, *value.args))
    return False


def _may_hold(node: ast.Assign, keys: Collection[str]) -> bool:
    """Whether what is set may be a batch, or what is made of one (``normalize(x)``): the program may hold that for the
    next step as well. Not what goes on from its own last value: ``h = cell(x, h)``, ``total = total + loss``."""
    if _is_copy(node.value, keys):
        return True
    own = {name for target in node.targets for name in _set_by(target)} - set(keys)
    parts = walk(node.value)
    return _is_made_of(node.value, keys) and not any(
        isinstance(part, (ast.Name, ast.Attribute)) and ast.unparse(part) in own for part in parts
    )


def _is_made_of(value: ast.expr, keys: Collection[str]) -> bool:
    """Whether `value` is a batch, or is worked out from one and may be as large; a number is not."""
    if _is_copy(value, keys):
        return True
    if isinstance(value, ast.Call):
        is_number = name_of(value.func) in (_NUMBERS if isinstance(value.func, ast.Attribute) else _TO_NUMBERS)
        if is_number:
            return False
        owner = [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return any(_is_made_of(each, keys) for each in (*owner, *value.args, *(k.value for k in value.keywords)))
    if isinstance(value, ast.Attribute):
        return value.attr not in _NUMBERS and _is_made_of(value.value, keys)
    if isinstance(value, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return any(_is_made_of(part.iter, keys) for part in value.generators)
    parts: list[ast.expr] = []
    if isinstance(value, ast.BinOp):
        parts = [value.left, value.right]
    elif isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        parts = value.elts
    elif isinstance(value, ast.Dict):
        parts = value.values
    elif isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif isinstance(value, (ast.Subscript, ast.Starred)):
        parts = [value.value]
    return any(_is_made_of(each, keys) for each in parts)


def _is_taken(loop: ast.AST, container: str) -> bool:
    """Whether single things are taken out of `container` in the loop."""
    for node in walk(loop):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == container:
            return True
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and method.attr in _TAKES and ast.unparse(method.value) == container:
            return True
    return False
