"""The syntax trees of the program's files, and walks through them: those of `ast`, several times as fast and kept.

Dozens of looks walk through the same files and functions, at a first step and again behind each recovery in place. With
`ast.walk`, and a tree for each look, a program of 2,300 lines waited for them for 0.8 s.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

__all__ = ["MOST_FILES", "children", "parsed", "walk", "without_index"]

MOST_FILES = 64
"""Trees that are kept. A tree has twenty objects a line, and the garbage collector goes through them."""
_KEPT = (
    ast.Module,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.For,
    ast.AsyncFor,
    ast.While,
)
"""Nodes whose walk is kept with them; those of expressions are short, and there are many."""


@lru_cache(maxsize=MOST_FILES)
def parsed(text: str) -> ast.Module | None:
    """The tree of a file's text, the same one each time; None where that is not Python."""
    is_on = gc.isenabled()
    gc.disable()  # so many new objects make it look through all of the program's, which takes several times as long
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # a template, or not Python
        return None
    finally:
        if is_on:
            gc.enable()


def walk(node: ast.AST) -> Sequence[ast.AST]:
    """The node and all below it, in the order of `ast.walk`, but for the contexts (``ast.Load``), which every name has.

    The same list each time: do not change it, nor the tree. Any thread.
    """
    known: dict[str, Any] = node.__dict__
    found: list[ast.AST] | None = known.get("walked")
    if found is None:
        found = [node]
        for each in found:  # grows meanwhile
            found += children(each)
        if isinstance(node, _KEPT):
            known["walked"] = found
    return found


def children(node: ast.AST) -> list[ast.AST]:
    """As `ast.iter_child_nodes`, without the contexts."""
    found: list[ast.AST] = []
    known = node.__dict__
    for name in node._fields:
        value = known.get(name)
        if isinstance(value, list):
            found += [each for each in value if isinstance(each, ast.AST)]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


def without_index(node: ast.expr) -> ast.expr:
    """``history`` of ``history["loss"]``."""
    return without_index(node.value) if isinstance(node, ast.Subscript) else node
