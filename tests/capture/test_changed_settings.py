"""Settings that are others than in the checkpoint are told, and the checkpoint's go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from mindx_elastic import Guard
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


def train(directory: Path, steps: int, make: Callable[[Any], Any], **settings: Any) -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    scheduler = make(optimizer)
    with Guard(model=model, optimizer=optimizer, lr_scheduler=scheduler, directory=directory) as guard:
        for _ in guard.steps(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            guard.step_end()
    return optimizer


def cosine(steps: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def milestones(*at: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.MultiStepLR(optimizer, list(at))


def test_another_rate_and_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, cosine(9), lr=0.1)
    optimizer = train(tmp_path, 4, cosine(20), lr=0.5)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    assert "optimizer goes on with the settings of the checkpoint: initial_lr is 0.5 in the program and 0.1 in it" in (
        caplog.text
    )
    assert "T_max is 20 in the program and 9 in it" in caplog.text and "base_lrs is [0.5]" in caplog.text


def test_other_milestones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 2, milestones(3, 5), lr=0.1)
    train(tmp_path, 4, milestones(3, 6), lr=0.1)
    assert "lr_scheduler goes on with the settings of the checkpoint: milestones is" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        cosine(9),
        milestones(1, 3),
        lambda optimizer: None,
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, T_mult=2),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    ],
)
def test_the_same_settings(make: Callable[[Any], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 3, make, lr=0.1)
    train(tmp_path, 5, make, lr=0.1)
    train(tmp_path, 7, make, lr=0.1)
    assert "goes on with the settings" not in caplog.text
