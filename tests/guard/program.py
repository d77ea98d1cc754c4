"""A training in parts whose loop a test writes, and what is the same however often it is stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindx_elastic.errors import GracefulExit
from tests.capture.round_trip import assert_same
from tests.guarded import Job, stop_and_wait

__all__ = ["BATCHES", "EPOCHS", "LAST", "Loop", "Make", "Program", "check", "draw", "no_loader", "run", "stopped"]

EPOCHS, BATCHES = 3, 5
LAST = EPOCHS * BATCHES


def draw() -> torch.Tensor:
    """From all streams, as augmentation or sampling would."""
    return torch.randn(4) + random.random() + float(np.random.rand())


class Program(Job):
    """A job whose loop is a function of it. `stop_at`: in the middle of this step a signal comes."""

    def __init__(self, directory: Path, *, seed: int = 0, stop_at: int = 0, **options: Any) -> None:
        super().__init__(directory, seed=seed, **options)
        self.loader: Any = options.get("loader", self.loader)
        self.opt = self.optimizer
        self.stop_at = stop_at
        self.log: list[Any] = []

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(self.network(x), y % 3).backward()

    def update(self) -> None:
        if self.guard._loops.step + 1 == self.stop_at:
            stop_and_wait(self)
        self.opt.step()
        self.scheduler.step()
        self.opt.zero_grad()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.backward(x, y)
        self.update()

    def train(self, batch: Any) -> None:
        """A step of this batch, and its boundary."""
        self.step(*batch)
        self.guard.step_end()

    def full_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([draw() for _ in range(8)]), torch.arange(8) % 3

    def result(self) -> dict[str, Any]:
        return {"weights": self.network.state_dict(), "drawn": draw(), "rates": self.scheduler.state_dict()}


Loop = Callable[[Program], None]
Make = Callable[[], dict[str, Any]]
"""The options of a program, made for each start."""


def no_loader() -> dict[str, Any]:
    return {"loader": None}


def run(loop: Loop, directory: Path, **options: Any) -> tuple[Program, dict[str, Any]]:
    program = Program(directory, **options)
    with program.guard:
        loop(program)
        result = program.result()
    return program, result


def stopped(loop: Loop, directory: Path, stop_at: int, **options: Any) -> Program:
    program = Program(directory, stop_at=stop_at, **options)
    with pytest.raises(GracefulExit), program.guard:
        loop(program)
    return program


def check(loop: Loop, directory: Path, stops: Iterable[int] = (), *, make: Make = dict) -> Program:
    """It ends the same when it is stopped at one of `stops`: by default in all places of an epoch. Returns the
    uninterrupted program."""
    whole, expected = run(loop, directory / "whole", **make())
    last = whole.guard._loops.step
    places = {1, BATCHES - 1, BATCHES, BATCHES + 1, 2 * BATCHES, last}
    for stop in stops or sorted(place for place in places if place <= last):
        place = directory / f"stop_{stop}"
        first = stopped(loop, place, stop, **make())
        second, result = run(loop, place, seed=99, **make())
        assert (second.guard.resumed_from_step or 0) >= stop
        try:
            assert_same(result, expected)
        except AssertionError as error:
            raise AssertionError(f"stopped at {stop}: {error}") from None
        assert second.guard._loops.step == last
        assert first.log + second.log == whole.log, f"stopped at {stop}"
    return whole
