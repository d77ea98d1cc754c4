"""Loops of Accelerate's own examples, in which nothing is to be warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file

from mindx_elastic.integrations import accelerate as elastic


def test_a_loop_that_clips_where_gradients_are_complete_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with elastic.guard(accelerator, directory=tmp_path) as guard:
        for _ in guard.epochs(2):
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                guard.step_end()
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == []


class Fault(Exception):
    pass


def saving_loop(directory: Path, fails_at: int | None = None) -> dict[str, torch.Tensor]:
    """Saves by accelerate's own means, too, behind each epoch. Returns the weights in its folders, by name."""
    torch.manual_seed(0)
    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with elastic.guard(accelerator, directory=directory / "elastic") as guard:
        for _ in guard.epochs(4):
            for (x,) in loader:
                accelerator.backward(model(x).square().mean())
                if guard.step + 1 == fails_at:
                    raise Fault
                optimizer.step()
                optimizer.zero_grad()
                guard.step_end()
            with guard.outside_step():
                accelerator.save_state()
    folders = sorted((directory / "checkpoints").iterdir())
    return {each.name: load_file(each / "model.safetensors")["weight"] for each in folders}


@pytest.mark.parametrize("fails_at", [9, 10, 13])
def test_folders_that_accelerate_numbers_are_never_written_over(tmp_path: Path, fails_at: int) -> None:
    """Also where a save is done again that was done behind the boundary that the run goes on from."""
    straight = saving_loop(tmp_path / "straight")
    assert [*straight] == ["checkpoint_2", "checkpoint_3"]
    with pytest.raises(Fault):
        saving_loop(tmp_path / "failed", fails_at)
    resumed = saving_loop(tmp_path / "failed")
    assert all(torch.equal(*pair) for pair in zip(straight.values(), resumed.values(), strict=True))
