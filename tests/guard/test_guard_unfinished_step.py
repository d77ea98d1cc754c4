"""An exception behind the last ``optimizer.step()`` of a step and before its `step_end`: nothing of it is kept."""

from __future__ import annotations

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
        self.network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.first = torch.optim.AdamW(self.network.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        self.meter = Meter()
        self.parts = parts.split()
        optimizers: list[torch.optim.Optimizer] = [self.first]
        if "inside" in self.parts:
            optimizers = [self.step_in_backward(parameter) for parameter in self.network.parameters()]
        self.optimizers = optimizers
        self.guard = Guard(
            model=self.network,
            optimizer=optimizers,
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
            "meter": lambda: self.meter.update(float(step)),
            "inside": lambda: None,
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
        return [p.detach().clone() for p in self.network.parameters()]


def saved(directory: Path) -> list[int]:
    return sorted(read_header(path).info.step for path in directory.glob("*.safetensors"))


def fails(job: Window, before: str, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        job.run(before=before, **options)


@pytest.mark.parametrize("parts", ["step log", "step meter log", "scaled update log", "inside log"])
def test_between_an_update_and_step_end_nothing_is_saved(
    tmp_path: Path, parts: str, caplog: pytest.LogCaptureFixture
) -> None:
    fails(Window(tmp_path, parts), "log")
    assert saved(tmp_path) == [] and "an optimizer had stepped and the boundary was not reached" in caplog.text
    assert f"up to {FAIL_AT - 1} steps are done again" in caplog.text


def test_a_scaler_that_skips_the_step_leaves_the_boundary_before(tmp_path: Path) -> None:
    """Its own update is not a step."""
    parts = "scaled update log"
    expected = Window(tmp_path / "whole", parts).run(inf_at=5)
    fails(Window(tmp_path / "job", parts), "log", fail_at=5, inf_at=5)
    assert saved(tmp_path / "job") == [4]
    assert all(map(torch.equal, Window(tmp_path / "job", parts).run(inf_at=5), expected))
