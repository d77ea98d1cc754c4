"""A job in one object, small enough to be trained, captured, loaded and trained on in a millisecond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.position import Position
from tests.capture.round_trip import assert_same, through_format

__all__ = ["MakeOptimizer", "MakeScheduler", "TinyJob", "assert_resumes"]

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


class Network(nn.Module):
    """BatchNorm for buffers, matrices only where Muon wants them, an embedding for sparse gradients."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, sparse=sparse)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.hidden(self.embedding(x)))
        return out.sum(-1).tanh()


class TinyJob:
    """Trains on data that is a function of the step."""

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        sparse: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.network = Network(sparse=sparse).to(dtype)
        self.optimizer = make_optimizer(self.network)
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.targets: dict[str, Any] = {"model": self.network, "optimizer": self.optimizer}
        if self.scheduler is not None:
            self.targets["lr_scheduler"] = self.scheduler
        self.collector = Collector(self.targets)
        self.steps = 0

    def forward_backward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 8, (6,), generator=generator)
        y = torch.randn(6, generator=generator)
        self.optimizer.zero_grad()
        loss: torch.Tensor = (self.network(x).float() - y).square().mean()
        loss.backward()
        return loss.detach()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step = self.steps
            loss = self.optimizer.step(lambda: self.forward_backward(step))  # type: ignore[arg-type, return-value]  # noqa: B023
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(float(loss))
            elif self.scheduler is not None:
                self.scheduler.step()
            self.steps += 1
            self.collector.copy(Position(step=self.steps, epoch=1, step_in_epoch=self.steps))

    def live(self) -> dict[str, Any]:
        return {name: target.state_dict() for name, target in self.targets.items()}

    def learning_rates(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def assert_resumes(make: Callable[[int], TinyJob], *, before: int = 5, after: int = 9) -> None:
    """Stop after `before` steps, load into a job that began differently, and go on `after` steps: all equal."""
    job, resumed = make(1), make(2)
    job.train(before)
    saved = through_format(job.collector.state())
    notes = resumed.collector.load(through_format(saved))
    assert [note for note in notes if "torch's seed" not in note] == []  # the seed is another one on purpose
    assert_same(through_format(resumed.collector.state()) | {"rng": None}, saved | {"rng": None})
    assert_same(resumed.live(), job.live())
    resumed.steps = resumed.collector.position.step
    for _ in range(after):
        job.train(1)
        resumed.train(1)
        assert resumed.learning_rates() == job.learning_rates()
    assert_same(resumed.live(), job.live())
    assert_same(
        through_format(resumed.collector.state()) | {"rng": 0}, through_format(job.collector.state()) | {"rng": 0}
    )
