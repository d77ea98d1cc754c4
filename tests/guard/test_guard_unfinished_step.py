"""An exception behind the last ``optimizer.step()`` of a step and before its `step_end`: nothing of it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.persist.format import read_header

NUM_STEPS = 9

pytestmark = pytest.mark.usefixtures("clean")


def train(directory: Path, how: str, *, fail_at: int = 0, inf_at: int = 0) -> list[torch.Tensor]:
    """`fail_at`: raises between the update of this step and its `step_end`. `inf_at`: the scaler skips this step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(network.parameters(), lr=0.05)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=how == "scaled")
    if how == "in backward":
        own: dict[Any, torch.optim.Optimizer] = {
            p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in network.parameters()
        }
        optimizers = list(own.values())

        def update(p: torch.Tensor) -> None:
            own[p].step()
            own[p].zero_grad()

        for p in own:
            p.register_post_accumulate_grad_hook(update)
    with Guard(model=network, optimizer=optimizers, scaler=scaler, directory=directory) as guard:
        while (step := guard.step + 1) <= NUM_STEPS:
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            loss = network(x).square().mean() * (float("inf") if step == inf_at else 1.0)
            scaler.scale(loss).backward()
            if how != "in backward":
                scaler.step(optimizers[0])
                scaler.update()
                optimizers[0].zero_grad()
            if step == fail_at:
                raise RuntimeError("injected")
            guard.step_end()
    return [p.detach().clone() for p in network.parameters()]


def saved(directory: Path) -> list[int]:
    return sorted(read_header(path).info.step for path in directory.glob("*.safetensors"))


@pytest.mark.parametrize("how", ["step", "scaled", "in backward"])
def test_between_an_update_and_step_end_nothing_is_saved(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        train(tmp_path, how, fail_at=7)
    assert saved(tmp_path) == [] and "an optimizer had stepped and the boundary was not reached" in caplog.text
    assert "up to 6 steps are done again" in caplog.text


def test_a_scaler_that_skips_the_step_leaves_the_boundary_before(tmp_path: Path) -> None:
    """Its own update is not a step."""
    expected = train(tmp_path / "whole", "scaled", inf_at=5)
    with pytest.raises(RuntimeError, match="injected"):
        train(tmp_path / "job", "scaled", fail_at=5, inf_at=5)
    assert saved(tmp_path / "job") == [4]
    assert all(map(torch.equal, train(tmp_path / "job", "scaled", inf_at=5), expected))
