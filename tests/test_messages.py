"""Thing, cause and likeliest remedy fit into two lines; the rest is for a page of the docs."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mindx_elastic"
_MOST = 320
_VALUE = 12
"""Characters that stand for a value."""


def length(node: ast.expr) -> int:
    """Of the text that an expression makes."""
    if isinstance(node, ast.Constant):
        return len(node.value) if isinstance(node.value, str) else _VALUE
    if isinstance(node, ast.JoinedStr):
        return sum(length(each) for each in node.values)
    if isinstance(node, ast.BinOp):
        return length(node.left) + length(node.right)
    if isinstance(node, ast.IfExp):
        return max(length(node.body), length(node.orelse))
    return _VALUE


def test_messages_are_short() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            texts = node.args if isinstance(node, ast.Call) else [node.value] if isinstance(node, ast.Return) else []
            found += [f"{path}:{each.lineno}: {size}" for each in texts if each and (size := length(each)) > _MOST]
    known = ("cli/", "report/page.py")  # help texts, the page itself
    assert [each for each in found if not any(name in each for name in known)] == []
