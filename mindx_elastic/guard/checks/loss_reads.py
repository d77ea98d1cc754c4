"""Tells from source whether the gradients depend on a value: whether it, or what is worked out from it, is in a
``loss.backward()``, in a ``torch.autograd.grad``, or set as a ``.grad``.

It follows assignments within a function, what a function of the same file is given and returns, and methods by their
names. What a value passes on by way of another object's attribute or of another file is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from mindx_elastic.guard.checks.syntax import children, walk
from mindx_elastic.guard.checks.training_words import name_of

__all__ = ["line_of_gradients", "takes_a_result"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Name = tuple[int, str]
"""A variable: the `id` of its function's node (of the file's), and its name."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CALLED_BY_THE_OBJECT = ("__call__", "forward")
_OF_NO_VALUE = ("shape", "size", "device", "dtype", "ndim", "dim", "numel")
_OF_NO_VALUE_TO = ("len", "isinstance", "print", "range", "type", "id")


def line_of_gradients(
    tree: ast.AST, is_source: Callable[[ast.AST], bool], but: Iterable[str] = ("__init__",)
) -> int | None:
    """The line of `tree`, a file, in which the gradients depend on what `is_source` accepts; None: nothing shows that.

    `but`: functions in which it does not count.
    """
    return min(_flow(tree).lines(is_source, frozenset(but)), default=None)


def takes_a_result(value: ast.expr) -> bool:
    """``loss.detach()``, ``float(loss)``: whether an expression takes what the weights have given, not a constant."""
    for node in walk(value):
        if isinstance(node, ast.Attribute) and node.attr in ("detach", "item"):
            return True
        if isinstance(node, (ast.Name, ast.Attribute)) and "loss" in name_of(node).lower():
            return True
    return False


class _Edge(NamedTuple):
    """A place in the source that passes a value on."""

    scope: str
    """The name of the function; empty: of the file."""
    targets: frozenset[_Name | str]
    """The variables that it sets, and the functions of which it is a result."""
    line: int
    """Where gradients are made of it; 0: they are not."""


class _Flow:
    """What follows from what in a file: variables by function and name, and functions by name."""

    def __init__(self, tree: ast.AST) -> None:
        self._parameters: dict[str, list[tuple[int, list[str]]]] = {}
        self._names_by_function: dict[int, set[str]] = {}
        self._classes: dict[str, list[str]] = {}
        functions = []
        for node in walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, _FUNCTIONS)]
                self._classes[node.name] = [each.name for each in methods if each.name in _CALLED_BY_THE_OBJECT]
                for method in methods:
                    self._note(method, f"{node.name}.{method.name}", first=1)
                    self._note(method, method.name, first=1)
            elif isinstance(node, _FUNCTIONS):
                functions.append(node)
                if node.name not in self._parameters:
                    self._note(node, node.name, first=0)
        self._kinds = dict(self._instances(tree))
        self._edges: list[_Edge] = []
        self._of_node: dict[ast.AST, list[int]] = {}
        """The edges whose value has a node in it that reads something; by number."""
        self._of_target: dict[_Name | str, list[int]] = {}
        """Those whose value has the variable in it, or a call of the function."""
        for scope in (tree, *functions):
            for node in _own_nodes(scope):
                self._add(scope, node)

    def lines(self, is_source: Callable[[ast.AST], bool], but: frozenset[str]) -> set[int]:
        """Where gradients are made of what follows from the nodes that `is_source` accepts."""
        reached = {each for node, edges in self._of_node.items() if is_source(node) for each in edges}
        reached = {each for each in reached if self._edges[each].scope not in but}
        todo = list(reached)
        while todo:
            for target in self._edges[todo.pop()].targets:
                for each in self._of_target.get(target, ()):
                    if each not in reached and self._edges[each].scope not in but:
                        reached.add(each)
                        todo.append(each)
        return {self._edges[each].line for each in reached} - {0}

    def _note(self, function: _Function, name: str, *, first: int) -> None:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][first:]
        self._parameters.setdefault(name, []).append((id(function), names))
        self._names_by_function.setdefault(id(function), set()).add(name)

    def _instances(self, tree: ast.AST) -> Iterator[tuple[str, str]]:
        """``criterion = Contrastive()``: which variables and attributes are of which class of the file."""
        for node in walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                kind = name_of(node.value.func)
                if kind in self._classes:
                    yield from ((name_of(target), kind) for target in node.targets)

    def _add(self, scope: ast.AST, node: ast.AST) -> None:
        """The edges of one statement or expression."""
        own = id(scope)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._pass_on(scope, node.value, {(own, name) for target in targets for name in _variables(target)})
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._pass_on(scope, node.iter, {(own, name) for name in _variables(node.target)})
        elif isinstance(node, ast.Return):
            self._pass_on(scope, node.value, self._names_by_function.get(own, set()))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                for given in node.args:
                    self._pass_on(scope, given, {(own, name) for name in _variables(node.func.value)})
            called = self._called(node)
            for place, given in enumerate(node.args):
                self._pass_on(scope, given, {(one, names[place]) for one, names in called if place < len(names)})
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._pass_on(scope, keyword.value, {(one, keyword.arg) for one, _ in called})
        for value in _differentiated(node):
            self._pass_on(scope, value, (), line=getattr(node, "lineno", 0))

    def _pass_on(self, scope: ast.AST, value: ast.AST | None, targets: Iterable[_Name | str], *, line: int = 0) -> None:
        if value is None or not (targets or line):
            return
        number = len(self._edges)
        self._edges.append(_Edge(scope.name if isinstance(scope, _FUNCTIONS) else "", frozenset(targets), line))
        todo: list[ast.AST] = [value]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Attribute) and node.attr in _OF_NO_VALUE:
                continue
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name) and node.func.id in _OF_NO_VALUE_TO:
                    continue
                for name in self._names_of(node):
                    self._of_target.setdefault(name, []).append(number)
            elif isinstance(node, ast.Name):
                self._of_target.setdefault((id(scope), node.id), []).append(number)
            if isinstance(getattr(node, "ctx", None), ast.Load):
                self._of_node.setdefault(node, []).append(number)
            todo += children(node)

    def _called(self, call: ast.Call) -> list[tuple[int, list[str]]]:
        return [each for name in self._names_of(call) for each in self._parameters.get(name, ())]

    def _names_of(self, call: ast.Call) -> Iterator[str]:
        """The names under which the function that is called may be known."""
        name = name_of(call.func)
        yield name
        kind = self._kinds.get(name)
        if kind is not None:
            yield from (f"{kind}.{method}" for method in self._classes[kind])


@lru_cache(maxsize=64)  # files; each value is asked for by itself
def _flow(tree: ast.AST) -> _Flow:
    return _Flow(tree)


def _differentiated(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement or call makes gradients of, or sets as some."""
    if isinstance(node, ast.Assign):
        if any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in node.targets):
            yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_backward = node.func.attr == "backward"
        if is_backward or ast.unparse(node.func) in ("torch.autograd.grad", "autograd.grad"):
            yield from (*node.args, *(keyword.value for keyword in node.keywords))
        if is_backward:
            yield node.func.value


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Those of a function or a file, without the functions and classes in it."""
    todo = children(scope)[::-1]
    while todo:
        node = todo.pop()
        if not isinstance(node, _FUNCTIONS):
            yield node
            todo += children(node)[::-1]


def _variables(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _variables(element)
    elif isinstance(target, (ast.Starred, ast.Subscript)):
        yield from _variables(target.value)
