"""Loops of Accelerate's own examples, in which nothing is to be warned of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")

from accelerate import Accelerator

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
