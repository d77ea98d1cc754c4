"""Every LR scheduler of torch goes through capture, format and load, and then continues to equal weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

from tests.capture.jobs import MakeScheduler, TinyJob, assert_resumes


class WarmUp:
    """A callable object: torch saves its attributes."""

    def __init__(self, steps: int) -> None:
        self.steps, self.calls = steps, [0]

    def __call__(self, epoch: int) -> float:
        self.calls[0] += 1
        return min(1.0, (epoch + 1) / self.steps) / (1 + 0.01 * self.calls[0])


def cosine(epoch: int) -> float:
    return 0.5 * (1 + math.cos(epoch / 10))


def one_cycle(optimizer: Any) -> Any:
    return lr.OneCycleLR(optimizer, 0.1, total_steps=40, three_phase=True)


def sequential(optimizer: Any) -> Any:
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=4), lr.CosineAnnealingLR(optimizer, 20), lr.StepLR(optimizer, 2)]
    return lr.SequentialLR(optimizer, parts, milestones=[4, 8])


def chained(optimizer: Any) -> Any:
    return lr.ChainedScheduler([lr.ConstantLR(optimizer, 0.5, 6), lr.ExponentialLR(optimizer, 0.9)], optimizer)


def nested(optimizer: Any) -> Any:
    return lr.ChainedScheduler([sequential(optimizer), lr.LambdaLR(optimizer, WarmUp(3))], optimizer)


SCHEDULERS: dict[str, MakeScheduler] = {
    "LambdaLR function": lambda optimizer: lr.LambdaLR(optimizer, cosine),
    "LambdaLR object": lambda optimizer: lr.LambdaLR(optimizer, WarmUp(7)),
    "MultiplicativeLR": lambda optimizer: lr.MultiplicativeLR(optimizer, lambda epoch: 0.9 + 0.01 * epoch),
    "StepLR": lambda optimizer: lr.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr.MultiStepLR(optimizer, [2, 6, 6, 9]),
    "ConstantLR": lambda optimizer: lr.ConstantLR(optimizer, 0.3, 7),
    "LinearLR": lambda optimizer: lr.LinearLR(optimizer, 0.1, total_iters=8),
    "ExponentialLR": lambda optimizer: lr.ExponentialLR(optimizer, 0.9),
    "SequentialLR": sequential,
    "ChainedScheduler nested": nested,
    "CosineAnnealingLR": lambda optimizer: lr.CosineAnnealingLR(optimizer, 10, 1e-4),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=0, cooldown=1, threshold=0.5),
    "CyclicLR": lambda optimizer: lr.CyclicLR(
        optimizer, 0.01, 0.1, 3, mode="exp_range", gamma=0.9, cycle_momentum=False
    ),
    "CyclicLR function": lambda optimizer: lr.CyclicLR(
        optimizer, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x, scale_mode="iterations", cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "OneCycleLR": one_cycle,
    "PolynomialLR": lambda optimizer: lr.PolynomialLR(optimizer, 12, 2.0),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=6),
    "SWALR linear": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=6, anneal_strategy="linear"),
}


def test_every_scheduler_of_torch_is_here() -> None:
    assert set(lr.__all__) - {"LRScheduler"} | {"SWALR"} == {name.split()[0] for name in SCHEDULERS}


def adam(network: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(network.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.01)


def sgd(network: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_resumes(name: str) -> None:
    for make_optimizer in (adam, sgd):
        assert_resumes(lambda seed: TinyJob(make_optimizer, SCHEDULERS[name], seed=seed))  # noqa: B023
