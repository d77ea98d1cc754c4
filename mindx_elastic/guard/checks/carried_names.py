"""Tells from source whether a variable or an attribute carries a value from one turn of a loop into the next.

It does where a turn can read it before that turn has set it: ``x = 0.9 * x + y``, ``if y < x: x = y``, or a read above
the assignment. Loops inside are taken to run at least once, so ``total = 0`` above an inner loop begins a turn anew.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from mindx_elastic.guard.checks.syntax import children, walk

__all__ = ["attribute", "is_carried", "is_read", "variable"]

_Test: TypeAlias = "Callable[[ast.AST], bool]"
_Flow: TypeAlias = "tuple[bool, bool]"  # whether it can be read first, whether it is always set
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def variable(name: str) -> Callable[[ast.AST], bool]:
    """Accepts the nodes of the variable `name`."""
    return partial(_is_variable, name)


def attribute(name: str) -> Callable[[ast.AST], bool]:
    """Accepts the nodes of the attribute `name`, of any object."""
    return partial(_is_attribute, name)


def _is_variable(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_attribute(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def is_carried(loop: ast.For | ast.While, it: _Test) -> bool:
    """Whether a turn of `loop` can read `it` as an earlier turn has left it."""
    if isinstance(loop, ast.While):
        reads, _ = _in_turn([ast.Expr(loop.test), *loop.body], it)
    else:
        if _sets(loop.target, it):
            return False
        reads, _ = _in_turn(loop.body, it)
    return reads and any(_sets(node, it) for statement in loop.body for node in walk(statement))


def is_read(nodes: Sequence[ast.stmt], it: _Test) -> bool:
    """Whether running `nodes` can read `it` as it was before."""
    return _in_turn(nodes, it)[0]


def _in_turn(statements: Sequence[ast.stmt], it: _Test) -> _Flow:
    for statement in statements:
        reads, sets = _flow(statement, it)
        if reads or sets:
            return reads, sets
    return False, False


def _flow(node: ast.stmt, it: _Test) -> _Flow:
    if isinstance(node, ast.If):
        if _reads(node.test, it):
            return True, False
        (reads, sets), (others, sets_too) = _in_turn(node.body, it), _in_turn(node.orelse, it)
        return reads or others, (sets or _leaves(node.body)) and (sets_too or _leaves(node.orelse))
    if isinstance(node, (ast.For, ast.AsyncFor)):
        if _reads(node.iter, it):
            return True, False
        return (False, True) if _sets(node.target, it) else _in_turn(node.body, it)
    if isinstance(node, ast.While):
        return _in_turn([ast.Expr(node.test), *node.body], it)
    if isinstance(node, (ast.With, ast.AsyncWith)):
        if any(_reads(item.context_expr, it) for item in node.items):
            return True, False
        if any(item.optional_vars is not None and _sets(item.optional_vars, it) for item in node.items):
            return False, True
        return _in_turn(node.body, it)
    if isinstance(node, ast.Try):
        reads, sets = _in_turn([*node.body, *node.orelse], it)
        handled = [_in_turn(handler.body, it) for handler in node.handlers]
        last, sets_last = _in_turn(node.finalbody, it)
        return reads or last or any(r for r, _ in handled), sets or sets_last
    if isinstance(node, ast.AugAssign):
        return _reads(node.value, it) or _sets(node.target, it) or _reads(node.target, it), False
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        value = None if isinstance(node, ast.Delete) else node.value
        if (value is not None and _reads(value, it)) or any(_reads(target, it) for target in targets):
            return True, False
        return False, any(_sets(target, it) for target in targets)
    if isinstance(node, _SCOPES):
        return False, False
    return _reads(node, it), any(_sets(inner, it) for inner in walk(node))


def _leaves(statements: Sequence[ast.stmt]) -> bool:
    """Whether the turn ends there."""
    return bool(statements) and isinstance(statements[-1], (ast.Continue, ast.Return, ast.Raise))


def _reads(node: ast.AST, it: _Test) -> bool:
    if it(node):
        return isinstance(getattr(node, "ctx", None), ast.Load)
    if isinstance(node, _COMPREHENSIONS):
        if _reads(node.generators[0].iter, it):
            return True
        if any(_sets(each.target, it) for each in node.generators):
            return False  # a variable of its own
    if isinstance(node, _SCOPES):
        return False
    return any(_reads(child, it) for child in children(node))


def _sets(node: ast.AST, it: _Test) -> bool:
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_sets(element, it) for element in node.elts)
    if isinstance(node, ast.Starred):
        return _sets(node.value, it)
    return it(node) and isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
