"""What the head of the loop does a second time in a resumed epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import mindx_elastic as mx

pytestmark = pytest.mark.usefixtures("clean")


class Trainer:
    """An object of the program that has a loader."""

    def __init__(self, loader: object) -> None:
        self.loader, self.scale = loader, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def scale_after_two_epochs(directory: Path, fails_at: int = 0) -> float:
    """It is halved at the head of each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = mx.data.ResumableLoader(TensorDataset(torch.randn(12, 2)), batch_size=2, seed=0)
    trainer = Trainer(loader)
    stateful = {"trainer": trainer}
    with mx.Guard(model=model, optimizer=optimizer, loader=loader, stateful=stateful, directory=directory) as guard:
        for _ in guard.epochs(2):
            trainer.scale *= 0.5
            for (x,) in loader:
                optimizer.zero_grad()
                (trainer.scale * model(x)).square().mean().backward()
                optimizer.step()
                guard.step_end()
                if guard.position.step == fails_at:
                    raise RuntimeError("planned")
    return trainer.scale


def test_what_it_sets_on_an_object_with_a_loader_is_undone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planned"):
        scale_after_two_epochs(tmp_path / "ckpt", fails_at=8)
    assert scale_after_two_epochs(tmp_path / "ckpt") == 0.25
