"""The source of the functions that are running: its syntax tree, the loops in it that run, what its names stand for.

It runs no code of the program.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from mindx_elastic.guard.checks.surroundings import program_frames
from mindx_elastic.guard.checks.syntax import children, parsed

__all__ = [
    "Entry",
    "Loop",
    "entry_of",
    "has_source",
    "loop_in_words",
    "loops_around",
    "spans",
    "tree_of",
    "tree_of_file",
    "value_of",
]

Entry: TypeAlias = "tuple[CodeType, int]"
"""Where the guard was entered: a function's code, and a line of it."""
Loop: TypeAlias = "ast.For | ast.While"
"""A loop that may be the training's."""
_UNKNOWN = object()


def entry_of(frame: FrameType | None) -> Entry | None:
    """Where the program is, as seen from `frame`."""
    found = next(program_frames(frame), None)
    return None if found is None else (found.f_code, found.f_lineno)


def has_source(frame: FrameType | None, entry: Entry | None) -> bool:
    """Whether the source of the code in the guard's block is there; not for what comes from stdin or `exec`."""
    return loops_around(frame, entry) is not None


def loops_around(frame: FrameType | None, entry: Entry | None) -> list[tuple[Loop, FrameType]] | None:
    """The loops inside of the guard's block that run, innermost first; None where some source is missing."""
    found: list[tuple[Loop, FrameType]] = []
    for place in program_frames(frame):
        tree = tree_of(place)
        if tree is None:
            return None
        entered = entry[1] if entry is not None and place.f_code is entry[0] else None
        inside = [
            loop
            for loop in _loops_at(tree, place.f_code.co_name, place.f_lineno)
            if entered is None or not spans(loop, entered)
        ]
        found += [(loop, place) for loop in reversed(inside)]
        if entered is not None:
            break
    return found


def tree_of(frame: FrameType) -> ast.Module | None:
    """The syntax tree of the file of a running function; None where there is no source."""
    return tree_of_file(frame.f_code.co_filename, frame.f_globals)


def tree_of_file(file: str, variables: dict[str, Any]) -> ast.Module | None:
    """The same of a file. `variables`: the module's; without a file they may know their source."""
    lines = linecache.getlines(file, variables)
    return parsed("".join(lines)) if lines else None


def _loops_at(tree: ast.Module, function: str, line: int) -> list[Loop]:
    """The loops of the running function whose bodies span `line`, outermost first."""
    found: list[Loop] = []
    node: ast.AST = tree
    while True:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
            found = []  # loops around the definition do not run
        if isinstance(node, (ast.For, ast.While)) and any(spans(statement, line) for statement in node.body):
            found.append(node)
        inner = next((n for n in children(node) if spans(n, line)), None)
        if inner is None or isinstance(inner, ast.Lambda):
            return found
        node = inner


def spans(node: ast.AST, line: int) -> bool:
    """Whether `line` is one of the node's."""
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def loop_in_words(loop: Loop, frame: FrameType) -> str:
    """Where a loop is, and its head: ``train.py:12 (for epoch in range(90))``."""
    if isinstance(loop, ast.For):
        head = f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
    else:
        head = f"while {ast.unparse(loop.test)}"
    return f"{Path(frame.f_code.co_filename).name}:{loop.lineno} ({head})"


def value_of(node: ast.expr, frame: FrameType) -> Any:
    """What a name or an attribute of one stands for, without running the program's code."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(value_of(node.value, frame), node.attr, _UNKNOWN)
    return _UNKNOWN
