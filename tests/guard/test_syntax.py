"""Trees of source: the walks are those of `ast`, kept, and no garbage collection runs beside a parse."""

from __future__ import annotations

import ast
import gc
import inspect

import pytest

from mindx_elastic.guard.checks import syntax
from mindx_elastic.guard.checks.syntax import children, parsed, walk

SOURCES = [inspect.getsource(syntax), inspect.getsource(inspect), "", "x = 1", "match x:\n case [1, *_]: pass"]


def without_contexts(nodes: list[ast.AST]) -> list[ast.AST]:
    return [node for node in nodes if not isinstance(node, ast.expr_context)]


@pytest.mark.parametrize("text", SOURCES, ids=range(len(SOURCES)))
def test_the_nodes_and_their_order_are_those_of_ast(text: str) -> None:
    tree = parsed(text)
    assert tree is not None
    for node in without_contexts(list(ast.walk(tree))):
        for _ in range(2):  # as it is kept
            assert list(walk(node)) == without_contexts(list(ast.walk(node)))
        assert children(node) == without_contexts(list(ast.iter_child_nodes(node)))


def test_a_text_has_one_tree_and_one_walk() -> None:
    text = "def f():\n    for a in b:\n        pass\n"
    tree = parsed(text)
    assert tree is not None and tree is parsed("".join([text]))
    assert walk(tree) is walk(tree) and walk(tree.body[0]) is walk(tree.body[0])


@pytest.mark.parametrize("text", ["x = (", "{{ template }} x", "x = \0"])
def test_what_is_not_python_has_no_tree(text: str) -> None:
    assert parsed(text) is None


@pytest.mark.parametrize("is_on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    seen = []
    monkeypatch.setattr(ast, "parse", lambda text: seen.append(gc.isenabled()))
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        syntax.parsed.__wrapped__("x = 1")
        assert gc.isenabled() is is_on and seen == [False]
    finally:
        (gc.enable if before else gc.disable)()
