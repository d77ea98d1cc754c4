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


def steps(directory: Path, **stateful: Any) -> Iterator[torch.Tensor]:
    """The output of each step, before its boundary."""
    job = Job(directory, loader=None, stateful=stateful)
    with job.guard as guard:
        for _ in guard.steps(9):
            out = job.network(torch.randn(5, 4))
            out.square().mean().backward()
            job.optimizer.step()
            job.scheduler.step()
            job.optimizer.zero_grad()
            yield out.detach()
            guard.step_end()


def a_moving_average(directory: Path) -> None:
    centre = torch.zeros(3)
    for out in steps(directory, centre=centre):
        centre = 0.9 * centre + 0.1 * out.mean(0)


def what_a_model_gives_back_for_the_next_step(directory: Path) -> None:
    memories = [torch.zeros(5, 3)]
    for out in steps(directory, memories=memories):
        _, memories = out, [out + memories[0]]


def an_array(directory: Path) -> None:
    hits = np.zeros(3)
    for out in steps(directory, hits=hits):
        hits = hits + out.mean(0).numpy()


class Trainer:
    def __init__(self) -> None:
        self.hidden = torch.zeros(3)

    def step(self, out: torch.Tensor) -> None:
        self.hidden = out.mean(0) + 0.5 * self.hidden


def an_attribute(directory: Path) -> None:
    trainer = Trainer()
    for out in steps(directory, hidden=trainer.hidden):
        trainer.step(out)


@pytest.mark.parametrize(
    ("train", "line"),
    [
        (a_moving_average, "centre.copy_((...).detach()) where the loop has centre = ..."),
        (what_a_model_gives_back_for_the_next_step, "memories[:] = ..."),
        (an_array, "hits[...] = ..."),
        (an_attribute, "trainer.hidden.copy_((...).detach()) where the loop has trainer.hidden = ..."),
    ],
)
def test_an_object_that_is_made_again_in_each_step_is_told(
    train: Callable[[Path], None], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    (said,) = [r.getMessage() for r in caplog.records if "is bound to another object" in r.getMessage()]
    assert line in said


class Owner:
    def __init__(self, recent: list[torch.Tensor]) -> None:
        self.recent = recent


def test_nothing_is_said_of_other_uses_of_such_a_variable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Changed in place, set before it is read, bound once before the loop, of another function, or while the object
    itself changes under another name."""
    centre, memories, best, weights, mask = (
        torch.zeros(3),
        [torch.zeros(3)],
        {"loss": 0.0},
        torch.zeros(3),
        torch.ones(3),
    )
    recent: list[torch.Tensor] = []
    owner, batch = Owner(recent), weights

    def smooth(out: torch.Tensor) -> torch.Tensor:
        centre = torch.zeros(3)
        for row in out:
            centre = 0.9 * centre + row
        return centre

    kept = {"centre": centre, "memories": memories, "best": best, "weights": weights, "mask": mask, "recent": recent}
    mask = mask * torch.tensor([1.0, 0.0, 1.0])
    for out in steps(tmp_path, **kept):
        centre.mul_(0.9).add_(out.mean(0))
        centre += 1  # the same object
        memories[:] = [out[0]]
        best.update(loss=float(out.norm()))
        batch = out.mean(0)
        print(batch * weights, out * mask, smooth(out), len(recent))
        owner.recent.append(out[0])
        recent = list(owner.recent)
    assert "is bound to another object" not in caplog.text
