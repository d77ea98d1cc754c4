"""Evaluations in a user's own loop: whatever they draw, and wherever a stop meets them, the training is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.capture.round_trip import assert_same
from tests.guarded import STEPS_PER_EPOCH, Job, no_traces, plain_environment

EVERY = 2
EPOCHS = 3


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


class Log(list[tuple[str, float]]):
    """What this process has done; of another class than list, no checkpoint has it."""


class EvaluatedJob(Job):
    """Evaluates every second step (`where` it is placed in the loop: head or tail) and after each epoch, with a stock
    loader that draws its base seed from torch's stream. `evaluations`: (name, value), noted after the block.
    """

    def __init__(self, directory: Path, where: str, moment: Callable[[EvaluatedJob, str, str], None], **options: Any):
        super().__init__(directory, **options)
        self.where, self.moment = where, moment
        self.evaluations = Log()

    def evaluate(self, name: str) -> None:
        self.moment(self, name, "before")
        with self.guard.outside_step():
            self.network.eval()
            data = TensorDataset(torch.arange(32.0).reshape(8, 4))
            total = random.random() + float(np.random.rand())  # as augmentation would
            with torch.no_grad():
                for number, (x,) in enumerate(DataLoader(data, batch_size=2, shuffle=True)):
                    if number == 2:
                        self.moment(self, name, "in")
                    self.guard.poll()
                    total += self.network(x + torch.randn(4)).sum().item() * (number + 1)
            self.network.train()
        self.evaluations.append((name, total))
        self.moment(self, name, "after")

    def train(self) -> dict[str, torch.Tensor]:
        with self.guard as guard:
            for epoch in guard.epochs(EPOCHS):
                for x, y in self.loader:
                    step = guard.position.step
                    if self.where == "head" and step and step % EVERY == 0:
                        self.evaluate(f"step {step}")
                    torch.nn.functional.cross_entropy(self.network(x), y).backward()
                    self.moment(self, f"step {step + 1}", "in the step")
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                    guard.step_end()
                    if self.where == "tail" and guard.position.step % EVERY == 0:
                        self.evaluate(f"step {guard.position.step}")
                self.evaluate(f"epoch {epoch}")
        return self.weights()


def never(job: EvaluatedJob, name: str, moment: str) -> None:
    pass


# 4: in mid-epoch, 10: the last step of an epoch.
MOMENTS = [(f"step {step}", moment) for step in (4, 2 * STEPS_PER_EPOCH) for moment in ("in the step", "in", "after")]
MOMENTS += [("epoch 2", moment) for moment in ("before", "in", "after")]


def test_an_evaluation_leaves_no_trace_in_the_streams(tmp_path: Path) -> None:
    """With and without evaluations the same training, also when one fails."""
    expected = Job(tmp_path / "plain").run(EPOCHS)
    job = EvaluatedJob(tmp_path / "evaluated", "head", never)
    assert_same(job.train(), expected)

    def fail(job: Job, step: int) -> None:
        try:
            with job.guard.outside_step(), job.guard.outside_step():
                torch.rand(1), random.random(), np.random.rand()
                raise ValueError("injected")
        except ValueError:
            job.epochs.append(-step)

    failing = Job(tmp_path / "failing")
    assert_same(failing.run(EPOCHS, after=fail), expected)
    assert -1 in failing.epochs, "the evaluation has failed"


def test_an_evaluation_in_training_mode_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It changes BatchNorm's buffers: a stop after it resumes from the boundary, which does not have that."""

    def evaluate(job: Job, step: int) -> None:
        with job.guard.outside_step(), torch.no_grad():
            job.network(torch.randn(8, 4))

    Job(tmp_path).run(1, after=evaluate)
    (line,) = [r.getMessage() for r in caplog.records if "outside_step" in r.getMessage()]
    assert "num_batches_tracked" in line and "eval()" in line


def test_a_periodic_save_does_not_copy_the_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindx_elastic.guard.loops import evaluations

    monkeypatch.setattr(evaluations, "kept_rng", lambda: pytest.fail("the streams were copied"))

    class EachStep:
        directory, asynchronous, keep_max, keep_per_n_minutes, append_info = tmp_path, False, 2, None, ()

        def due(self, position: Any) -> bool:
            return True

        def name(self, position: Any) -> str:
            return f"each-{position.epoch}_{position.step_in_epoch}.safetensors"

    Job(tmp_path, periodic=[EachStep()]).run(1)
    assert list(tmp_path.glob("each-1_5.safetensors"))
