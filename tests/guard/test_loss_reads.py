"""Whether the source shows that the gradients depend on a variable."""

from __future__ import annotations

import ast
import textwrap

import pytest

from mindx_elastic.guard.checks.carried_names import variable
from mindx_elastic.guard.checks.loss_reads import line_of_gradients, takes_a_result

DEPENDS = {
    "directly": "(net(x) * it).sum().backward()",
    "by way of variables": """
        scale = it / 2
        loss, other = net(x) * scale, 1
        total = loss + other
        total.backward()
        """,
    "through a list": """
        parts = []
        parts.append(net(x) * it)
        sum(parts).backward()
        """,
    "as an argument": """
        def loss_of(y, target): return (y - target).sum()
        loss_of(net(x), it).backward()
        """,
    "in a function": """
        def loss_of(y): return (y - it).sum()
        def step():
            loss = loss_of(net(x))
            loss.backward()
        """,
    "in an object that is called": """
        class Loss:
            def __call__(self, y): return (y - it).sum()
        criterion = Loss()
        criterion(net(x)).backward()
        """,
    "in a method": """
        class Loss:
            def away(self, y): return (y - it).sum()
        parts = Loss()
        parts.away(net(x)).backward()
        """,
    "in gradients by hand": "w.grad = torch.autograd.grad((net(x) * it).sum(), w)[0]",
    "as a gradient": "w.grad = it * 2",
}

DOES_NOT = {
    "for a log": "print(it); loss = net(x).sum(); loss.backward()",
    "only its size": "loss = net(x).sum() / it.shape[0] / len(it); loss.backward()",
    "another variable of that name": """
        def report(it): return it.sum()
        def step(x): net(x).sum().backward()
        """,
    "after the gradients": "loss = net(x).sum(); loss.backward(); share = it / it.sum()",
    "where it is begun": """
        class Loss:
            def __init__(self): self.scale = it
            def __call__(self, y): return y.sum()
        loss = Loss()(net(x)); loss.backward()
        """,
}


@pytest.mark.parametrize("name", DEPENDS)
def test_gradients_depend_on_it(name: str) -> None:
    assert line_of_gradients(ast.parse(textwrap.dedent(DEPENDS[name])), variable("it")) is not None


@pytest.mark.parametrize("name", DOES_NOT)
def test_gradients_do_not_depend_on_it(name: str) -> None:
    assert line_of_gradients(ast.parse(textwrap.dedent(DOES_NOT[name])), variable("it")) is None


@pytest.mark.parametrize(
    ("text", "takes"), [("x.detach()", True), ("float(loss)", True), ("torch.ones(3)", False), ("make(x.shape)", False)]
)
def test_what_the_weights_have_given(text: str, takes: bool) -> None:
    assert takes_a_result(ast.parse(text, mode="eval").body) is takes
