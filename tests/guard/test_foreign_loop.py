"""A trainer of a library that runs the loop and counts by itself is refused, unless it is named or asked."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mindx_elastic as mx
from mindx_elastic.errors import UnmanagedStateError

ENGINE = """
class Engine:
    def __init__(self, update, after):
        self.update, self.after, self.epoch = update, after, 0

    def run(self, loader, epochs):
        while self.epoch < epochs:
            for batch in loader:
                self.step(batch)
            self.epoch += 1

    def step(self, batch):
        self.update(batch)
        self.after()

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Any]:
    """A trainer as a package has it."""
    file = tmp_path / "site-packages" / "foreign_engine.py"
    file.parent.mkdir()
    file.write_text(ENGINE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("foreign_engine", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["foreign_engine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["foreign_engine"]


def train(library: Any, directory: Path, *, named: bool = False, asks: bool = False, asks_inside: bool = False) -> int:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=4)

    def update(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).sum().backward()
        optimizer.step()

    guard: mx.Guard

    def after() -> None:
        assert not asks_inside or guard.step < 6
        guard.step_end()

    engine = library.Engine(update, after)
    state = {"engine": engine} if named else {}
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, stateful=state, directory=directory)
    with guard:
        engine.run(loader, 2 - max(0, guard.position.epoch - 1) if asks else 2)
    return guard.step


def test_a_trainer_of_a_library_that_counts_by_itself_is_refused(library: Any, tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match=r'by foreign_engine \(run\): the Engine counts .*"trainer": trainer'):
        train(library, tmp_path / "ckpt")


@pytest.mark.parametrize("how", [{"named": True}, {"asks": True}])
def test_one_that_is_named_or_told_where_to_begin_is_not(library: Any, tmp_path: Path, how: dict[str, bool]) -> None:
    assert train(library, tmp_path / "ckpt", **how) == 6


def test_one_that_only_its_hooks_ask_for_is_told(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may end it by the step, but its own count begins anew."""
    assert train(library, tmp_path / "ckpt", asks_inside=True) == 6
    assert any("the Engine counts by itself, is not named" in record.message for record in caplog.records)
