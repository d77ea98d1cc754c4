"""Tells from source whether the gradients depend on a value: whether it, or what is worked out from it, is in a
``loss.backward()``, in a ``torch.autograd.grad``, or set as a ``.grad``.

It follows assignments within a function, what a function of the same file is given and returns, and methods by their
names. What a value passes on by way of another object's attribute or of another file is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

__all__ = ["line_of_gradients", "takes_a_result"]

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
    flow = _Flow(tree, is_source, frozenset(but))
    flow.follow()
    return min(flow.sinks(), default=None)


def takes_a_result(value: ast.expr) -> bool:
    """``loss.detach()``, ``float(loss)``: whether an expression takes what the weights have given, not a constant."""
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and node.attr in ("detach", "item"):
            return True
        if isinstance(node, (ast.Name, ast.Attribute)) and "loss" in _last_name(node).lower():
            return True
    return False


class _Flow:
    """What follows from a source: variables by function and name, and functions by name."""

    def __init__(self, tree: ast.AST, is_source: Callable[[ast.AST], bool], but: frozenset[str]) -> None:
        self._is_source = is_source
        self._names: set[tuple[int, str]] = set()
        self._functions: set[str] = set()
        self._scopes: list[tuple[ast.AST, list[ast.AST]]] = [
            (scope, list(_own_nodes(scope)))
            for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)))
            if not (isinstance(scope, _FUNCTIONS) and scope.name in but)
        ]
        self._parameters: dict[str, list[tuple[int, list[str]]]] = {}
        self._classes: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, _FUNCTIONS)]
                self._classes[node.name] = [name for name in methods if name in _CALLED_BY_THE_OBJECT]
                for method in node.body:
                    if isinstance(method, _FUNCTIONS):
                        self._note(method, f"{node.name}.{method.name}", first=1)
                        self._note(method, method.name, first=1)
            elif isinstance(node, _FUNCTIONS) and not any(node.name == known for known in self._parameters):
                self._note(node, node.name, first=0)
        self._kinds = dict(self._instances(tree))

    def _note(self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, first: int) -> None:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][first:]
        self._parameters.setdefault(name, []).append((id(function), names))

    def _instances(self, tree: ast.AST) -> Iterator[tuple[str, str]]:
        """``criterion = Contrastive()``: which variables and attributes are of which class of the file."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                kind = _last_name(node.value.func)
                if kind in self._classes:
                    yield from ((_last_name(target), kind) for target in node.targets)

    def follow(self) -> None:
        before = -1
        while before != (before := len(self._names) + len(self._functions)):
            for scope, nodes in self._scopes:
                for node in nodes:
                    self._follow(scope, node)

    def _follow(self, scope: ast.AST, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None and self._depends(node.value, scope):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._names |= {(id(scope), name) for target in targets for name in _variables(target)}
        elif isinstance(node, (ast.For, ast.comprehension)):
            if self._depends(node.iter, scope):
                self._names |= {(id(scope), name) for name in _variables(node.target)}
        elif isinstance(node, ast.Return):
            if node.value is not None and isinstance(scope, _FUNCTIONS) and self._depends(node.value, scope):
                self._functions |= {name for name, all_ in self._parameters.items() if id(scope) in dict(all_)}
        elif isinstance(node, ast.Call):
            adds_to = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "append" else None
            if adds_to is not None and any(self._depends(given, scope) for given in node.args):
                self._names |= {(id(scope), name) for name in _variables(adds_to)}
            for function, names in self._called(node):
                given = [*zip(names, node.args, strict=False), *((k.arg, k.value) for k in node.keywords)]
                self._names |= {(function, name) for name, value in given if name and self._depends(value, scope)}

    def _called(self, call: ast.Call) -> list[tuple[int, list[str]]]:
        return [each for name in self._names_of(call) for each in self._parameters.get(name, ())]

    def _names_of(self, call: ast.Call) -> Iterator[str]:
        """The names under which the function that is called may be known."""
        name = _last_name(call.func)
        yield name
        kind = self._kinds.get(name)
        if kind is not None:
            yield from (f"{kind}.{method}" for method in self._classes[kind])

    def _depends(self, node: ast.AST, scope: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in _OF_NO_VALUE:
            return False
        if self._is_source(node) and isinstance(getattr(node, "ctx", None), ast.Load):
            return True
        if isinstance(node, ast.Name):
            return (id(scope), node.id) in self._names
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in _OF_NO_VALUE_TO:
                return False
            if any(name in self._functions for name in self._names_of(node)):
                return True
        return any(self._depends(child, scope) for child in ast.iter_child_nodes(node))

    def sinks(self) -> Iterator[int]:
        for scope, nodes in self._scopes:
            for node in nodes:
                if any(self._depends(value, scope) for value in _differentiated(node)):
                    yield getattr(node, "lineno", 0)


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
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _own_nodes(child)


def _variables(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _variables(element)
    elif isinstance(target, (ast.Starred, ast.Subscript)):
        yield from _variables(target.value)


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
