"""An exception after the last ``optimizer.step()`` of a step and before its `step_end`: what is kept, and what is said.

Each job is run without the exception, with it, and again; exact means that the weights are the same in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.persist.format import read_header
from tests.guarded import no_traces, plain_environment

NUM_STEPS = 9
FAIL_AT = 7


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    plain_environment(monkeypatch)
    monkeypatch.setenv("MINDX_ARENA_DIR", "none")
    with no_traces():
        yield


class Meter:
    """A user's own object with state."""

    def __init__(self) -> None:
        self.total = 0.0
        self.seen: list[float] = []

    def update(self, loss: float) -> None:
        self.total += loss
        self.seen = [*self.seen, loss]

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Window:
    """A job whose steps end in a list of named things; the exception comes before the one named `before`."""

    def __init__(self, directory: Path, parts: str, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.average = nn.Linear(4, 6)
        self.first = torch.optim.AdamW(self.network.parameters(), lr=0.05)
        self.second = torch.optim.SGD(self.network[0].parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.first, lambda step: 1.0 if step > 3 else 0.3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        self.meter = Meter()
        self.parts = parts.split()
        optimizers: list[torch.optim.Optimizer] = [self.first, self.second] if "second" in self.parts else [self.first]
        if "inside" in self.parts:
            optimizers = [self.step_in_backward(parameter) for parameter in self.network.parameters()]
        self.optimizers = optimizers
        modules = [self.network, self.average] if "average" in self.parts or "rarely" in self.parts else [self.network]
        self.guard = Guard(
            model=modules,
            optimizer=optimizers,
            lr_scheduler=self.scheduler if "scheduler" in self.parts else None,
            scaler=self.scaler,
            stateful={"meter": self.meter},
            directory=directory,
            **options,
        )

    def do(self, part: str, step: int) -> None:
        actions: dict[str, Callable[[], object]] = {
            "step": self.first.step,
            "scaled": lambda: self.scaler.step(self.first),
            "update": self.scaler.update,
            "second": self.second.step,
            "scheduler": self.scheduler.step,
            "meter": lambda: self.meter.update(float(step)),
            "average": self.move_average,
            "rarely": lambda: self.move_average() if step % 3 == 0 else None,
            "draw": lambda: torch.rand(1),
            "draw-python": random.random,
            "inside": lambda: None,
            "zero": self.first.zero_grad,
            "log": lambda: None,
        }
        actions[part]()

    def step_in_backward(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)

        def update(_: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
        return optimizer

    def move_average(self) -> None:
        with torch.no_grad():
            for mine, other in zip(self.average.parameters(), self.network[0].parameters(), strict=True):
                mine.lerp_(other, 0.1)

    def run(self, *, before: str | None = None, fail_at: int = FAIL_AT, inf_at: int = 0) -> list[torch.Tensor]:
        with self.guard:
            while (step := self.guard.position.step + 1) <= NUM_STEPS:
                self.first.zero_grad()
                generator = torch.Generator().manual_seed(step)
                self.x = torch.randn(5, 4, generator=generator)
                loss = self.network(self.x).square().mean() * (float("inf") if step == inf_at else 1.0)
                self.scaler.scale(loss).backward() if "scaled" in self.parts else loss.backward()
                for part in self.parts:
                    if step == fail_at and part == before:
                        raise RuntimeError("injected")
                    self.do(part, step)
                self.guard.step_end()
        return [p.detach().clone() for m in (self.network, self.average) for p in m.parameters()]


def saved(directory: Path) -> list[int]:
    return sorted(read_header(path).info.step for path in directory.glob("*.safetensors"))


def fails(job: Window, before: str, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        job.run(before=before, **options)


@pytest.mark.parametrize(
    "parts",
    [
        "step log",
        "step scheduler log",
        "meter step log",
        "step meter log",
        "step second scheduler log",
        "scaled update log",
        "step average log",
        "step average scheduler meter log",
        "inside log",
    ],
)
def test_a_step_of_which_nothing_is_left_to_do_is_kept(
    tmp_path: Path, parts: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Window(tmp_path / "whole", parts).run()
    fails(Window(tmp_path / "job", parts), "log")
    assert saved(tmp_path / "job") == [FAIL_AT], caplog.text
    assert f"updates of step {FAIL_AT} and before its step_end()" in caplog.text
    again = Window(tmp_path / "job", parts)
    found = again.run()
    assert again.guard.resumed_from_step == FAIL_AT
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("parts", "before", "named"),
    [
        ("step scheduler log", "scheduler", "lr_scheduler has not moved yet"),
        ("step meter log", "meter", "meter has not moved yet"),
        ("step second log", "second", "optimizer_1 has stepped 0 times"),
        ("scaled update log", "update", "scaler has not moved yet"),
        ("step average log", "average", "parameters were not changed in place as often"),
        ("step rarely log", "rarely", "parameters are not changed in place equally often"),
        ("step draw log", "log", "random numbers are drawn between"),
        ("step draw-python log", "draw-python", "random numbers are drawn between"),
        ("meter step meter log", "log", "changes before and after the last optimizer.step()"),
    ],
)
def test_what_is_pending_is_named_and_nothing_inexact_is_saved(
    tmp_path: Path, parts: str, before: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    fails(Window(tmp_path, parts), before)
    assert saved(tmp_path) == []
    assert named in caplog.text
    assert f"up to {FAIL_AT - 1} steps are done again" in caplog.text


def test_too_few_steps_tell_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fails(Window(tmp_path, "step log"), "log", fail_at=2)
    assert saved(tmp_path) == [] and "only 0 steps before could tell" in caplog.text


@pytest.mark.parametrize(
    ("parts", "inf_at", "fail_at", "kept"),
    [
        ("scaled update log", 5, 5, 4),  # nothing has stepped: the scaler's update alone is not a step
        ("scaled update zero log", 7, 8, 8),  # the step after a skipped one
    ],
)
def test_what_is_kept_where_the_scaler_skips_a_step(
    tmp_path: Path, parts: str, inf_at: int, fail_at: int, kept: int
) -> None:
    expected = Window(tmp_path / "whole", parts).run(inf_at=inf_at)
    fails(Window(tmp_path / "job", parts), "log", fail_at=fail_at, inf_at=inf_at)
    assert saved(tmp_path / "job") == [kept]
    assert all(map(torch.equal, Window(tmp_path / "job", parts).run(inf_at=inf_at), expected))


def test_an_exception_that_comes_out_of_a_scheduler_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Window(tmp_path, "step scheduler log")

    def broken(step: int) -> float:
        if step == FAIL_AT:
            raise RuntimeError("injected")
        return 1.0

    job.scheduler.lr_lambdas[0] = broken
    with pytest.raises(RuntimeError, match="injected"):
        job.run()
    assert saved(tmp_path) == [] and "the exception comes out of lr_scheduler" in caplog.text
