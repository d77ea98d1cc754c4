"""A DataLoader with a state of its own whose class makes no iterator of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindx_elastic import Guard
from mindx_elastic.errors import GracefulExit


class Hand(DataLoader[Any]):
    """Gives the rows of its data set itself, four a batch."""

    def __init__(self) -> None:
        super().__init__(TensorDataset(torch.arange(40.0)), 4)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while self.given < 10:
            self.given += 1
            yield self.dataset[4 * self.given - 4 : 4 * self.given][0]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def trained(directory: Path, *, fail_before: int) -> list[float]:
    """The first row of each batch, up to an exception in a step."""
    model, loader, rows = nn.Linear(4, 1), Hand(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model=model, optimizer=optimizer, loader=loader, directory=directory, prefix="x", unmanaged="warn")
    with guard:
        for _ in guard.epochs(2):
            for batch in loader:
                if guard.step + 1 == fail_before:
                    raise ValueError("as the test wants")
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                rows.append(float(batch[0]))
                guard.step_end()
    return rows


@pytest.mark.parametrize("fails", [(3, 5), (8, 11, 13), (11, 12)])
def test_each_resume_goes_on_at_its_own_batch(fails: tuple[int, ...], tmp_path: Path) -> None:
    """A second one as well: what the first one had loaded does not count any more once a batch was given."""
    whole = trained(tmp_path / "whole", fail_before=0)
    assert len(whole) == 20
    for fail in fails:
        with pytest.raises((ValueError, GracefulExit)):
            trained(tmp_path / "cut", fail_before=fail)
    assert trained(tmp_path / "cut", fail_before=0) == whole[fails[-1] - 1 :]
