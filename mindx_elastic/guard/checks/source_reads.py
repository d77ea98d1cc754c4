"""Tells from source whether a value steers a program, or is only printed and logged."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import islice
from pathlib import PurePath

from mindx_elastic.guard.checks.syntax import MOST_FILES, children, parsed, walk
from mindx_elastic.guard.checks.training_words import logs

__all__ = ["Sources", "Tree", "only_logs", "parents_of", "sets_from_itself", "steering_reads"]

Tree = tuple[ast.AST, dict[int, ast.AST]]
"""A file's syntax tree, and the parents of its nodes."""

_MOST_BYTES = 200_000  # about 5,000 lines


class Sources:
    """The source of the program, each file parsed once in a process, when it is asked for.

    Of a large program the first files only: a look must not take seconds. What the rest does is left to `prove`.
    """

    def __init__(self, files: Iterable[str]) -> None:
        """`files`: those of the running functions first."""
        self.files = tuple(_first(dict.fromkeys(files)))

    def read(self) -> None:
        """Parse all of it now: a look that comes later in this process finds it done."""
        for file in self.files:
            _parsed(file)

    def tree(self, file: str) -> Tree | None:
        """None where there is no source, or none that can be read."""
        return _parsed(file)[0]

    def trees(self) -> Iterator[Tree]:
        """Those of all files."""
        return filter(None, map(self.tree, self.files))

    def trees_with(self, name: str, place: str | None = None) -> list[Tree]:
        """Those in which a variable or an attribute has that name. `place`: see `Found`; only that file."""
        files = self.files if place is None else [f for f in self.files if PurePath(f).name == place.split()[-1]]
        found = [_parsed(file) for file in files if name in _words(file)]
        return [tree for tree, names in found if tree is not None and name in names]

    def classes_of(self, kind: type) -> Iterator[Tree]:
        """The definitions of a class and of those that it inherits from, each with the parents in its file."""
        for each in kind.__mro__:
            try:
                file = None if each.__module__ == "builtins" else inspect.getsourcefile(each)
            except (TypeError, OSError):
                # A class of a script that was run by another program.
                file = next(iter(self.files), None)
            found = None if file is None else self.tree(file)
            if found is not None:
                for node in walk(found[0]):
                    if isinstance(node, ast.ClassDef) and node.name == each.__name__:
                        yield node, found[1]


def _first(files: Iterable[str]) -> Iterator[str]:
    left = _MOST_BYTES
    for number, file in enumerate(islice(files, MOST_FILES)):
        left -= _size(file)
        if left < 0 and number:
            return
        yield file


@cache
def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:  # typed in, or generated
        return 0


@cache
def _words(file: str) -> frozenset[str]:
    """Found a hundred times faster than the names."""
    return frozenset(re.findall(r"\w+", "".join(linecache.getlines(file))))


@lru_cache(maxsize=MOST_FILES)
def _parsed(file: str) -> tuple[Tree | None, frozenset[str]]:
    """The tree, and the names of its variables and attributes."""
    tree = parsed("".join(linecache.getlines(file)))
    if tree is None:
        return None, frozenset()
    nodes = walk(tree)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return (tree, parents_of(tree)), frozenset(names | {n.attr for n in nodes if isinstance(n, ast.Attribute)})


def parents_of(tree: ast.AST) -> dict[int, ast.AST]:
    """The parent of each node, by the node's ``id``."""
    return {id(child): node for node in walk(tree) for child in children(node)}


def steering_reads(
    tree: ast.AST,
    is_it: Callable[[ast.AST], bool],
    parents: dict[int, ast.AST],
    is_off: Callable[[ast.expr], bool] = lambda test: False,
) -> Iterator[ast.expr]:
    """The places below `tree` that read what `is_it` accepts, other than those that print, log or keep it for that.

    A test that decides only whether something is logged is none of them. `is_off`: whether a test is known to fail
    (``if args.dry_run: break``), so that what stands below it does not count.
    """
    for node in walk(tree):
        if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load) or not is_it(node):
            continue
        if not _is_for_a_log(node, tree, parents, is_off):
            yield node


def _is_for_a_log(
    node: ast.AST, root: ast.AST, parents: dict[int, ast.AST], is_off: Callable[[ast.expr], bool]
) -> bool:
    child = node
    while child is not root and (parent := parents.get(id(child))) is not None:
        if isinstance(parent, (ast.JoinedStr, ast.FormattedValue)):
            return True
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mod) and _is_text(parent.left):
            return True
        if isinstance(parent, ast.Call) and child is not parent.func and logs(parent):
            return True
        if isinstance(parent, (ast.If, ast.IfExp)) and child is parent.test:
            return isinstance(parent, ast.If) and all(only_logs(s, is_off) for s in (*parent.body, *parent.orelse))
        child = parent
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def only_logs(statement: ast.stmt, is_off: Callable[[ast.expr], bool] = lambda test: False) -> bool:
    """Whether a statement prints, logs, evaluates or works out what is printed: it may not touch the training."""
    if isinstance(statement, ast.Expr):
        value = statement.value
        return isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and logs(value))
    if isinstance(statement, ast.If):
        body = () if is_off(statement.test) else statement.body
        return all(only_logs(inner, is_off) for inner in (*body, *statement.orelse))
    if isinstance(statement, ast.With):
        return all(only_logs(inner, is_off) for inner in statement.body)
    return isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass))


def sets_from_itself(node: ast.AST, is_it: Callable[[ast.AST], bool]) -> bool:
    """Whether a statement sets what `is_it` accepts from its last value: ``self.x += 1``, ``self.x = f(self.x)``."""
    if isinstance(node, ast.AugAssign):
        return is_it(node.target)
    if not isinstance(node, ast.Assign):
        return False
    targets = [inner for target in node.targets for inner in _targets(target)]
    return any(map(is_it, targets)) and any(map(is_it, walk(node.value)))


def _targets(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, (ast.Tuple, ast.List)):
        for element in node.elts:
            yield from _targets(element)
    else:
        yield node
