"""Evaluations in all places of a loop, on any loader, with whatever they do to model and loaders: the training is the
same, wherever a stop meets them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mindx_elastic import Guard
from mindx_elastic.errors import GracefulExit, UsageError
from tests.capture.round_trip import assert_same
from tests.guard import program
from tests.guard.program import EPOCHS, Make, Program, draw
from tests.guarded import Job
from tests.harness import wait_until

pytestmark = pytest.mark.usefixtures("clean")


class Evaluated(Program):
    """`kind` says what an evaluation does. `moment`: the name of the evaluation in which a signal comes."""

    def __init__(self, directory: Path, kind: str, moment: str = "", **options: Any) -> None:
        super().__init__(directory, **options)
        self.kind, self.moment = kind, moment
        self.stopped = False
        data = TensorDataset(torch.arange(32.0).reshape(8, 4), torch.arange(8) % 3)
        workers = 2 if kind == "workers" else 0
        self.others: Any = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)

    def batches(self) -> Iterator[Any]:
        if self.kind == "same loader":
            yield from self.loader
        elif self.kind == "part of the same loader":
            for number, batch in enumerate(self.loader):
                yield batch
                if number == 1:
                    return
        elif self.kind == "generator":
            for _ in range(3):
                yield draw().expand(4, 4), torch.arange(4) % 3
        else:
            yield from self.others

    def evaluate(self, name: str) -> None:
        with self.guard.outside_step():
            self.network.eval()
            before = [p.detach().clone() for p in self.network.parameters()]
            self.exchange([torch.zeros_like(p) for p in before])
            total = draw().sum()
            with torch.no_grad():
                for number, (x, y) in enumerate(self.batches()):
                    if number == 0 and name == self.moment and not self.stopped:
                        self.stopped = True
                        os.kill(os.getpid(), signal.SIGTERM)
                        wait_until(lambda: self.guard.stopper.alarm is not None, "the alarm")
                        wait_until(self.guard.stopper.step_gate.at_limit, "the limit")
                    total = total + nn.functional.cross_entropy(self.network(x), y)
                    self.guard.poll()
            self.exchange(before)
            if self.kind != "left in eval mode":
                self.network.train()
        self.log.append((name, total.item()))

    def exchange(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self.network.parameters(), weights, strict=True):
            if self.kind == "other weights":
                parameter.data = weight
            elif self.kind == "other weights in place":
                with torch.no_grad():
                    parameter.copy_(weight)
            elif self.kind == "other weights unseen":
                parameter.data.copy_(weight)


def loop(p: Program) -> None:
    for epoch in p.guard.epochs(EPOCHS):
        for batch in p.loader:
            if isinstance(p, Evaluated) and p.guard.step and p.guard.step % 2 == 0:
                p.evaluate(f"head {p.guard.step}")
            p.train(batch)
            if isinstance(p, Evaluated) and p.guard.step % 3 == 0:
                p.evaluate(f"tail {p.guard.step}")
        if isinstance(p, Evaluated):
            p.evaluate(f"epoch {epoch}")


def train(p: Evaluated) -> None:
    p.evaluate("before")
    loop(p)
    p.evaluate("end")


KINDS = [
    *("same loader", "part of the same loader", "generator", "stock", "workers", "left in eval mode"),
    *("other weights", "other weights in place", "other weights unseen"),
]
MOMENTS = [5, "head 4", "tail 9", "epoch 2", "end"]


def run(directory: Path, kind: str, make: Make = dict, **options: Any) -> tuple[Evaluated, Any]:
    p = Evaluated(directory, kind, **options, **make())
    with p.guard:
        train(p)
        result = p.result()
    return p, result


def check(tmp_path: Path, kind: str, moments: list[Any], make: Make = dict) -> None:
    whole, expected = run(tmp_path / "whole", kind, make)
    _, plain = program.run(loop, tmp_path / "plain", **make())
    assert_same(plain["weights"], expected["weights"])  # evaluations change nothing
    for number, moment in enumerate(moments):
        place = tmp_path / str(number)
        stop = {"stop_at": moment} if isinstance(moment, int) else {"moment": moment}
        first = Evaluated(place, kind, **stop, **make())
        with pytest.raises(GracefulExit) as left, first.guard:
            train(first)
        assert left.value.step is not None, f"{moment}: nothing was saved"
        second, result = run(place, kind, make, seed=99)
        assert second.guard.resumed_from_step == left.value.step
        assert_same(result["weights"], expected["weights"])
        assert_same(result["drawn"], expected["drawn"])
        told = dict(whole.log)
        assert all(told[name] == value for name, value in [*first.log, *second.log] if name != "before"), moment


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_before_in_and_after_any_evaluation(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, MOMENTS if kind != "workers" else ["head 4", "epoch 2"])


class Fault(Exception):
    pass


class Failing(Evaluated):
    """Raises in the evaluation `moment`, where its weights are exchanged, and never puts them back."""

    def batches(self) -> Iterator[Any]:
        if self.name == self.moment:
            raise Fault
        yield from super().batches()

    def evaluate(self, name: str) -> None:
        self.name = name
        super().evaluate(name)


@pytest.mark.parametrize("kind", KINDS[-3:])
def test_weights_that_an_exception_in_an_evaluation_leaves_exchanged_are_not_saved(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = run(tmp_path / "whole", kind)
    place = tmp_path / "failed"
    with pytest.raises(GracefulExit) as left:
        run(place, kind, stop_at=3)
    failing = Failing(place, kind, moment="head 8", seed=99)
    with pytest.raises(Fault), failing.guard:
        train(failing)
    assert "the boundary after step 8 cannot be saved" in caplog.text
    last, result = run(place, kind, seed=99)
    assert last.guard.resumed_from_step == left.value.step
    assert_same(result["weights"], expected["weights"])


def test_a_step_inside_is_refused(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard, p.guard.outside_step(), pytest.raises(UsageError, match="outside_step"):
        p.guard.step_end()


def test_an_evaluation_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    def fail(job: Job, step: int) -> None:
        try:
            with job.guard.outside_step(), job.guard.outside_step():
                torch.rand(1), random.random(), np.random.rand()
                raise ValueError("injected")
        except ValueError:
            job.epochs.append(-step)

    failing = Job(tmp_path / "failing")
    assert_same(failing.run(2, after=fail), Job(tmp_path / "plain").run(2))
    assert -1 in failing.epochs, "the evaluation has failed"


def test_an_evaluation_in_training_mode_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It changes BatchNorm's buffers: a stop after it resumes from the boundary, which does not have that."""

    def evaluate(job: Job, step: int) -> None:
        with job.guard.outside_step(), torch.no_grad():
            job.network(torch.randn(8, 4))

    Job(tmp_path).run(1, after=evaluate)
    (line,) = [r.getMessage() for r in caplog.records if "outside_step" in r.getMessage()]
    assert "num_batches_tracked" in line and "eval()" in line


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_buffer_that_is_too_large_to_copy_is_told_of_once_it_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    network = nn.Linear(2, 2)
    network.register_buffer("table", torch.zeros(5 << 20))  # 20 MiB
    guard = Guard(model=network, directory=tmp_path)
    with guard:
        for _ in guard.steps(1):
            guard.step_end()
        with guard.outside_step():
            pass
        assert "changed inside guard.outside_step()" not in caplog.text
        with guard.outside_step():
            if is_replaced:
                network.register_buffer("table", network.get_buffer("table") + 1.0)  # of the same version
            else:
                network.get_buffer("table").add_(1.0)
    assert "table changed inside guard.outside_step()" in caplog.text
