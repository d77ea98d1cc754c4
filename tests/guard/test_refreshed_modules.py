"""A module that each step sets from a named one before it uses it is left alone; one that is set at another place is
refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.errors import UnmanagedStateError
from tests.guarded import Job, stop_and_wait

pytestmark = pytest.mark.usefixtures("clean")


def network(job: Job) -> nn.Module:
    return copy.deepcopy(job.network).requires_grad_(False).eval()


def train(directory: Path, place: str, *, every: int = 1, stop: int = 0, with_steps: bool = False) -> dict[str, Any]:
    """Train against the weights of the step before. `place`: where they are copied."""
    options: dict[str, Any] = {"loader": None} if with_steps else {}
    job = Job(directory, **options)
    old = network(job)

    def copy_at(here: str) -> None:
        if place == here and job.guard.step % every == 0:
            old.load_state_dict(job.network.state_dict())

    def step(x: torch.Tensor) -> None:
        copy_at("head")
        loss = (job.network(x) - old(x)).square().mean() + job.network(x).square().mean()
        loss.backward()
        copy_at("before the update")
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
        copy_at("end")
        if job.guard.step + 1 == stop:
            stop_and_wait(job)
        job.guard.step_end()

    with job.guard as guard:
        if with_steps:
            for _ in guard.steps(18):
                step(torch.randn(5, 4))
        else:
            for _ in guard.epochs(4):
                for x, _ in job.loader:
                    step(x)
    assert not old._forward_pre_hooks
    return job.weights()


@pytest.mark.parametrize("stop", [2, 7])
def test_one_that_is_set_at_the_head_of_each_step(tmp_path: Path, stop: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(tmp_path / "whole", "head")
    assert "not named" not in caplog.text
    with pytest.raises(SystemExit):
        train(tmp_path / "stopped", "head", stop=stop)
    found = train(tmp_path / "stopped", "head")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "not named" not in caplog.text


@pytest.mark.parametrize("place", ["before the update", "end"])
def test_one_that_is_set_later(tmp_path: Path, place: str) -> None:
    with pytest.raises(UnmanagedStateError, match=r'module "old" .* changes in the training and is not named'):
        train(tmp_path, place)


@pytest.mark.parametrize("every", [2, 3])
def test_one_that_is_set_in_every_nth_step(tmp_path: Path, every: int) -> None:
    with pytest.raises(UnmanagedStateError, match=r'module "old" .* changes in the training and is not named'):
        train(tmp_path, "head", every=every)
