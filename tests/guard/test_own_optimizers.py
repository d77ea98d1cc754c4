"""What an optimizer of the program's own keeps is told where it makes new tensors in each step; gradients are not."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guard.programs import run
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


MOMENTS = {
    "moments": """
        moments = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        def apply(name, p):
            moments[name] = 0.9 * moments[name] + 0.1 * p.grad; p -= 0.1 * moments[name]
        """,
    "own.m": """
        class Momentum:
            def __init__(self): self.m = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
            def apply(self, name, p):
                m = 0.9 * self.m[name] + 0.1 * p.grad
                self.m[name] = m
                p -= 0.1 * m
        own = Momentum()
        apply = own.apply
        """,
}

_STEP = """
PARTS = dict(model=net)
@torch.no_grad()
def update_all():
    for name, p in net.named_parameters(): apply(name, p)
def step(): net.zero_grad(); net(x).square().mean().backward(); update_all()
"""


def train(source: str, tmp_path: Path) -> tuple[str, ...]:
    return run("own", textwrap.dedent(source) + _STEP, tmp_path / "ckpt", file=tmp_path / "train.py")


@pytest.mark.parametrize("name", MOMENTS)
def test_tensors_that_follow_from_those_before(name: str, tmp_path: Path) -> None:
    (note,) = train(MOMENTS[name], tmp_path)
    assert f'"{name}" (dict, train.py) changes with them and is not kept' in note


def test_tensors_that_are_filled_anew(tmp_path: Path) -> None:
    source = """
        last = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        def apply(name, p):
            last[name] = p.grad.clone(); p -= 0.1 * p.grad
        def report(): return sum(g.norm() for g in last.values())
        """
    assert train(source, tmp_path) == ()
