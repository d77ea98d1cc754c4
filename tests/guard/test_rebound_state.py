"""A named object whose variable the loop binds again is told, and nothing else that is done to such variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.guarded import Job

pytestmark = pytest.mark.usefixtures("clean")


def steps(job: Job, number: int = 9) -> Iterator[torch.Tensor]:
    """The output of each step, before its boundary."""
    with job.guard as guard:
        for _ in guard.steps(number):
            out = job.network(torch.randn(5, 4))
            out.square().mean().backward()
            job.optimizer.step()
            job.scheduler.step()
            job.optimizer.zero_grad()
            yield out.detach()
            guard.step_end()


Told = Callable[[Callable[[], None], str], None]


def job_with(directory: Path, **stateful: Any) -> Job:
    return Job(directory, loader=None, stateful=stateful)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    def check(train: Callable[[], None], line: str) -> None:
        caplog.clear()
        train()
        (said,) = [r.getMessage() for r in caplog.records if "is bound to another object" in r.getMessage()]
        assert line in said

    return check


@pytest.fixture
def silent(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "is bound to another object" not in caplog.text


# --- told ---


def test_a_moving_average_that_is_made_anew(tmp_path: Path, told: Told) -> None:
    def train() -> None:
        centre = torch.zeros(3)
        job = job_with(tmp_path, centre=centre)
        for out in steps(job):
            centre = 0.9 * centre + 0.1 * out.mean(0)

    told(train, "centre.copy_((...).detach()) where the loop has centre = ...")


def test_what_a_model_gives_back_for_the_next_step(tmp_path: Path, told: Told) -> None:
    def train() -> None:
        memories = [torch.zeros(5, 3)]
        job = job_with(tmp_path, memories=memories)
        for out in steps(job):
            _, memories = out, [out + memories[0]]

    told(train, "memories[:] = ...")


def test_an_array(tmp_path: Path, told: Told) -> None:
    def train() -> None:
        hits = np.zeros(3)
        for out in steps(job_with(tmp_path, hits=hits)):
            hits = hits + out.mean(0).numpy()

    told(train, "hits[...] = ...")


def test_an_attribute_of_an_object(tmp_path: Path, told: Told) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.hidden = torch.zeros(3)

        def step(self, out: torch.Tensor) -> None:
            self.hidden = out.mean(0) + 0.5 * self.hidden

    def train() -> None:
        trainer = Trainer()
        for out in steps(job_with(tmp_path, hidden=trainer.hidden)):
            trainer.step(out)

    told(train, "trainer.hidden.copy_((...).detach()) where the loop has trainer.hidden = ...")


# --- exact ---


@pytest.mark.usefixtures("silent")
def test_what_changes_in_place(tmp_path: Path) -> None:
    centre, memories, best = torch.zeros(3), [torch.zeros(3)], {"loss": 0.0}
    for out in steps(job_with(tmp_path, centre=centre, memories=memories, best=best)):
        centre.mul_(0.9).add_(out.mean(0))
        centre += 1  # the same object
        memories[:] = [out[0]]
        best.update(loss=float(out.norm()))


@pytest.mark.usefixtures("silent")
def test_a_variable_that_each_step_sets_before_it_reads_it(tmp_path: Path) -> None:
    weights = torch.zeros(3)
    batch = weights
    for out in steps(job_with(tmp_path, weights=weights)):
        batch = out.mean(0)
        print(batch * weights)


@pytest.mark.usefixtures("silent")
def test_a_variable_of_another_function(tmp_path: Path) -> None:
    centre = torch.zeros(3)

    def smooth(out: torch.Tensor) -> torch.Tensor:
        centre = torch.zeros(3)
        for row in out:
            centre = 0.9 * centre + row
        return centre

    for out in steps(job_with(tmp_path, centre=centre)):
        smooth(out)


@pytest.mark.usefixtures("silent")
def test_one_that_is_bound_once_before_the_loop(tmp_path: Path) -> None:
    mask = torch.ones(3)
    job = job_with(tmp_path, mask=mask)
    mask = mask * torch.tensor([1.0, 0.0, 1.0])
    for out in steps(job):
        print(out * mask)


@pytest.mark.usefixtures("silent")
def test_an_object_that_changes_while_its_name_is_used_for_another(tmp_path: Path) -> None:
    class Owner:
        def __init__(self, recent: list[torch.Tensor]) -> None:
            self.recent = recent

    recent: list[torch.Tensor] = []
    owner = Owner(recent)
    for out in steps(job_with(tmp_path, recent=recent)):
        print(len(recent))
        owner.recent.append(out[0])
        recent = list(owner.recent)
