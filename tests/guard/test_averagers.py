"""A `ModelAverager` that steps and is not named is refused, with the line to write."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from mindx_elastic.errors import UnmanagedStateError
from tests.guarded import Job, no_traces, plain_environment


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with no_traces():
        yield
    dist.destroy_process_group()


def train(directory: Path, averager: PeriodicModelAverager, **options: Any) -> None:
    def middle(job: Job, step: int) -> None:
        averager.average_parameters(job.network.parameters())

    Job(directory, **options).run(middle=middle)


def test_one_that_is_not_named(tmp_path: Path) -> None:
    own = PeriodicModelAverager(period=4, warmup_steps=2)
    with pytest.raises(UnmanagedStateError) as caught:
        train(tmp_path, own)
    assert 'averager "averager" (PeriodicModelAverager) counts its steps' in str(caught.value)
    assert 'Guard(stateful={"averager": averager}, ...)' in str(caught.value)


def test_one_that_is_named(tmp_path: Path) -> None:
    own = PeriodicModelAverager(period=4, warmup_steps=2)
    train(tmp_path, own, stateful={"averager": own})


def test_one_whose_count_the_program_sets(tmp_path: Path) -> None:
    counted = PeriodicModelAverager(period=4, warmup_steps=2)

    def middle(job: Job, step: int) -> None:
        counted.step = job.guard.step
        counted.average_parameters(job.network.parameters())

    Job(tmp_path).run(middle=middle)


def test_one_that_does_not_step_and_one_of_a_named_optimizer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, where this is imported
        from torch.distributed.optim import PostLocalSGDOptimizer
    idle = PeriodicModelAverager(period=4, warmup_steps=2)
    job = Job(tmp_path)
    wrapped = PostLocalSGDOptimizer(job.optimizer, PeriodicModelAverager(period=4, warmup_steps=2))
    again = Job(tmp_path, model=job.network, optimizer=wrapped, lr_scheduler=None)
    with again.guard as guard:
        for _ in guard.epochs(3):
            for x, _ in again.loader:
                job.network(x).square().mean().backward()
                wrapped.step()
                wrapped.zero_grad()
                guard.step_end()
    assert idle.step == 0 and wrapped.averager.step == 15
