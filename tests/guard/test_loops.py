"""The forms of a loop: each is stopped at every boundary by a real signal, and ends as if it had not been."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindx_elastic import Guard
from mindx_elastic.data import ReplayLoader, ResumableLoader
from mindx_elastic.errors import GracefulExit, UnmanagedStateError, UsageError
from tests.capture.round_trip import assert_same
from tests.guarded import Points, stop_and_wait

EPOCHS, BATCHES = 3, 5
LAST = EPOCHS * BATCHES


pytestmark = pytest.mark.usefixtures("clean")


def draw() -> torch.Tensor:
    """From all streams, as augmentation or sampling would."""
    return torch.randn(4) + random.random() + float(np.random.rand())


class Program:
    """A program in parts, whose loop is a function of it. `stop_at`: in the middle of this step a signal comes."""

    def __init__(self, directory: Path, *, seed: int = 0, stop_at: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(0)  # the weights are the same anyway; the streams of a resumed run are not
        self.network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        torch.manual_seed(seed)
        self.opt = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 100)
        parts: dict[str, Any] = {"model": self.network, "optimizer": self.opt, "lr_scheduler": self.scheduler}
        if "loader" not in options:
            options["loader"] = ResumableLoader(Points(), batch_size=4, shuffle=True, seed=3)
        self.loader: Any = options["loader"]
        self.guard = Guard(directory=directory, prefix="p", **{**parts, **options})
        self.stop_at = stop_at
        self.done = 0
        self.log: list[Any] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(self.network(x), y).backward()
        if self.guard._loops.step + 1 == self.stop_at:
            stop_and_wait(self)  # type: ignore[arg-type]
        self.opt.step()
        self.scheduler.step()
        self.opt.zero_grad()

    def full_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([draw() for _ in range(8)]), torch.arange(8) % 3

    def result(self) -> dict[str, Any]:
        return {"weights": self.network.state_dict(), "drawn": draw(), "rates": self.scheduler.state_dict()}


Loop = Callable[[Program], None]


def run(loop: Loop, directory: Path, **options: Any) -> tuple[Program, dict[str, Any]]:
    program = Program(directory, **options)
    with program.guard:
        loop(program)
        result = program.result()
    return program, result


def check_every_boundary(
    loop: Loop,
    directory: Path,
    *,
    steps: int = LAST,
    make_options: Callable[[], dict[str, Any]] = dict,
    log: Callable[[list[Any], list[Any]], list[Any]] = lambda first, second: first + second,
) -> Program:
    """Returns the uninterrupted program."""
    whole, expected = run(loop, directory / "whole", **make_options())
    assert whole.guard.step == steps
    for stop in range(1, steps + 1):
        place = directory / f"stop_{stop}"
        first = Program(place, stop_at=stop, **make_options())
        with pytest.raises(GracefulExit), first.guard:
            loop(first)
        second, result = run(loop, place, seed=99, **make_options())
        assert second.guard.resumed_from_step == stop
        try:
            assert_same(result, expected)
        except AssertionError as error:
            raise AssertionError(f"stopped at {stop}: {error}") from None
        assert second.guard.step == steps
        assert log(first.log, second.log) == whole.log, f"stopped at {stop}"
    return whole


def no_loader() -> dict[str, Any]:
    return {"loader": None}


# --- epochs ---


def in_epochs(p: Program) -> None:
    draw()
    for epoch in p.guard.epochs(EPOCHS, start=0):
        for number, (x, y) in p.guard.enumerate(p.loader):
            p.step(x, y)
            p.log.append((epoch, number, p.guard.step + 1))
            p.guard.step_end()
        draw()


def in_steps(p: Program) -> None:
    draw()
    batches = iter(p.loader)
    for step in p.guard.steps(LAST - 2):
        noise = draw().sum()
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(p.loader)
            x, y = next(batches)
        p.step(x + noise, y)
        p.log.append(step)
        p.guard.step_end()


def in_steps_without_loader(p: Program) -> None:
    draw()
    for step in p.guard.steps(6, start=0):
        p.step(*p.full_batch())
        p.log.append(step)
        p.guard.step_end()


def in_full_batches(p: Program) -> None:
    draw()
    for epoch in p.guard.epochs(6):
        p.step(*p.full_batch())
        p.log.append(epoch)
        p.guard.step_end()


def in_steps_of_epochs(p: Program) -> None:
    draw()
    for epoch in p.guard.epochs(3):
        shift = draw().sum()  # drawn once an epoch, used in all of it
        for step in p.guard.steps(4):
            x, y = p.full_batch()
            p.step(x + shift, y)
            p.log.append((epoch, step, shift.item()))
            p.guard.step_end()
        draw()


def in_epochs_with_a_begin(p: Program) -> None:
    draw()
    for epoch in p.guard.epochs(EPOCHS):
        shift = draw().sum()
        for x, y in p.loader:
            p.step(x + shift, y)
            p.log.append((epoch, shift.item()))
            p.guard.step_end()
        draw()


# --- several loops ---


def in_two_phases(p: Program) -> None:
    for epoch in p.guard.epochs(1):
        for x, y in p.loader:
            p.step(x, y)
            p.log.append(("first", epoch))
            p.guard.step_end()
    draw()
    for parameter in p.network[0].parameters():
        parameter.requires_grad_(False)
    for epoch in p.guard.epochs(3):
        for x, y in p.loader:
            p.step(x, y)
            p.log.append(("second", epoch))
            p.guard.step_end()


@pytest.mark.parametrize("start", [0, 1])
def test_a_finished_run_passes_through(tmp_path: Path, start: int) -> None:
    def steps(p: Program) -> None:
        for step in p.guard.steps(4, start=start):
            p.step(*p.full_batch())
            p.log.append(step)
            p.guard.step_end()

    def epochs(p: Program) -> None:
        for epoch in p.guard.epochs(1, start=start):
            p.step(*p.full_batch())
            p.log.append(epoch)
            p.guard.step_end()

    for number, loop in enumerate((steps, epochs)):
        first, expected = run(loop, tmp_path / str(number), loader=None)
        again, result = run(loop, tmp_path / str(number), loader=None, seed=99)
        assert len(first.log) and again.log == []
        assert_same(result, expected)


@pytest.mark.parametrize("what", ["steps", "epochs"])
@pytest.mark.parametrize("number", [-1, 2.0, True, "3", None])
def test_wrong_numbers_are_refused_at_once(tmp_path: Path, what: str, number: Any) -> None:
    guard = Program(tmp_path).guard
    with pytest.raises(UsageError, match="whole number from 0"):
        getattr(guard, what)(number)
    with pytest.raises(UsageError, match="usually 0 or 1"):
        getattr(guard, what)(3, start=number if number != -1 else "0")


def test_steps_without_boundaries_end(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard, pytest.raises(UsageError, match=r"have not called guard\.step_end\(\)"):
        list(p.guard.steps(3))


def test_the_same_epochs_twice_are_refused_in_words(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard:
        for _ in p.guard.epochs(1):
            for x, y in p.loader:
                p.step(x, y)
                p.guard.step_end()
        with pytest.raises(UsageError, match=r"for 1 more epochs write guard\.epochs\(2\)"):
            list(p.guard.epochs(1))


def test_nested_epochs_are_refused_in_words(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard:
        outer = p.guard.epochs(3)
        assert next(outer) == 1
        assert list(p.guard.epochs(2)) == [1, 2]
        with pytest.raises(UsageError, match="two loops over"):
            next(outer)


def in_phases_with_code_between(p: Program) -> None:
    for group in p.opt.param_groups:
        group["weight_decay"] = 0.1
    for _ in p.loader:  # an evaluation on the training's own loader
        draw()
    for epoch in p.guard.epochs(2):
        for x, y in p.loader:
            p.step(x, y)
            p.log.append(("first", epoch))
            p.guard.step_end()
        draw()
    draw()
    for group in p.opt.param_groups:
        group["lr"], group["betas"] = 0.5, (0.5, 0.9)
    norm = p.network[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.reset_running_stats()
    p.scheduler.base_lrs = [0.1]
    for epoch in p.guard.epochs(3):
        for x, y in p.loader:
            p.step(x, y)
            p.log.append(("second", epoch))
            p.guard.step_end()


def test_what_is_put_back_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Program(tmp_path, stop_at=12)
    with pytest.raises(GracefulExit), first.guard:
        in_phases_with_code_between(first)
    caplog.clear()
    run(in_phases_with_code_between, tmp_path, seed=99)
    (line,) = [r.getMessage() for r in caplog.records if "put back" in r.getMessage()]
    assert "optimizer" in line and "step 12" in line


def test_weights_changed_before_the_resumed_place_are_refused(tmp_path: Path) -> None:
    def again(p: Program) -> None:
        if p.stop_at == 0:
            nn.init.ones_(next(p.network.parameters()))
        for _ in p.guard.epochs(3):
            for x, y in p.loader:
                p.step(x, y)
                p.guard.step_end()

    first = Program(tmp_path, stop_at=7)
    with pytest.raises(GracefulExit), first.guard:
        again(first)
    second = Program(tmp_path)
    with pytest.raises(UnmanagedStateError, match="a resumed run does that again"), second.guard:
        again(second)


def in_a_loop_that_is_left(p: Program) -> None:
    for _ in p.guard.epochs(9):
        for x, y in p.loader:
            if p.guard.step >= 7:
                break
            p.step(x, y)
            p.log.append("first")
            p.guard.step_end()
        if p.guard.step >= 7:
            break
    for _ in p.guard.epochs(3):
        for x, y in p.loader:
            p.step(x, y)
            p.log.append("second")
            p.guard.step_end()


def in_steps_twice(p: Program) -> None:
    draw()
    for _ in p.guard.steps(3):
        p.step(*p.full_batch())
        p.guard.step_end()
    draw()
    for _ in p.guard.steps(6):
        p.step(*p.full_batch())
        p.guard.step_end()


def test_what_is_set_behind_a_loop_by_hand_is_not_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run that has made steps is past the resumed place."""

    def by_hand_and_then_in_steps(p: Program) -> None:
        while p.guard.step < 3:
            p.step(*p.full_batch())
            p.guard.step_end()
        for group in p.opt.param_groups:
            group["weight_decay"] = 0.5
        for _ in p.guard.steps(5):
            p.step(*p.full_batch())
            p.guard.step_end()

    _, expected = run(by_hand_and_then_in_steps, tmp_path / "whole", loader=None)
    first = Program(tmp_path / "stopped", stop_at=2, loader=None)
    with pytest.raises(GracefulExit), first.guard:
        by_hand_and_then_in_steps(first)
    second, result = run(by_hand_and_then_in_steps, tmp_path / "stopped", loader=None, seed=99)
    assert second.guard.resumed_from_step == 2
    assert_same(result, expected)
    assert "put back" not in caplog.text


def with_a_generator(p: Program) -> None:
    generator = p.guard._targets["generator"]
    for _ in p.guard.epochs(3):
        order = torch.randperm(8, generator=generator)
        for number in p.guard.steps(4, start=0):
            x = order[2 * number : 2 * number + 2].float()[:, None].expand(2, 4)
            p.step(x, torch.tensor([0, 1]))
            p.log.append(order.tolist())
            p.guard.step_end()


def test_code_that_fails_after_an_epoch_runs_again_with_what_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception behind the last batch saves the boundary in front of that code."""

    def mean_of_each_epoch(p: Program) -> None:
        for _ in p.guard.epochs(2):
            count = 0
            for x, y in p.loader:
                p.step(x, y)
                p.guard.step_end()
                count += 1
            p.log.append(1 / count)
            if fails:
                raise OSError("the disk is full")

    fails = True
    first = Program(tmp_path)
    with pytest.raises(OSError, match="disk"), first.guard:
        mean_of_each_epoch(first)
    assert not [r for r in caplog.records if "was resumed after its last step" in r.getMessage()]
    fails = False
    second, _ = run(mean_of_each_epoch, tmp_path)
    assert second.guard.resumed_from_step == BATCHES and second.log == [1 / BATCHES] * 2
    assert not [r for r in caplog.records if "was resumed after its last step" in r.getMessage()]


def test_numbered_batches_have_the_length_of_the_loader(tmp_path: Path) -> None:
    """Which a bar or torchvision's `MetricLogger` around them asks for."""
    p = Program(tmp_path)
    with p.guard:
        for _ in p.guard.epochs(1):
            for i, batch in p.guard.enumerate(p.loader):
                assert i == p.guard.step
                p.step(*batch)
                p.guard.step_end()
            assert p.guard.step == len(p.guard.enumerate(p.loader))  # type: ignore[arg-type]


# --- every form, stopped at every boundary ---


def replayed() -> dict[str, Any]:
    return {"loader": ReplayLoader(torch.utils.data.DataLoader(Points(), batch_size=4, shuffle=True))}


def a_generator() -> dict[str, Any]:
    return {"loader": None, "stateful": {"generator": torch.Generator().manual_seed(4)}}


FORMS: list[tuple[Loop, int, Callable[[], dict[str, Any]], list[Any]]] = [
    (in_full_batches, 6, no_loader, list(range(1, 7))),
    (in_epochs_with_a_begin, LAST, dict, []),
    (in_epochs_with_a_begin, LAST, replayed, []),
    (in_steps_twice, 6, no_loader, []),
    (in_epochs, LAST, dict, [(e, b, e * BATCHES + b + 1) for e in range(EPOCHS) for b in range(BATCHES)]),
    (in_steps, LAST - 2, dict, list(range(1, LAST - 1))),
    (in_steps_without_loader, 6, no_loader, list(range(6))),
    (in_steps_of_epochs, 12, no_loader, []),
    (in_two_phases, LAST, dict, [("first", 1)] * 5 + [("second", 2)] * 5 + [("second", 3)] * 5),
    (in_phases_with_code_between, LAST, dict, []),
    (in_a_loop_that_is_left, LAST, dict, ["first"] * 7 + ["second"] * 8),
    (with_a_generator, 12, a_generator, []),
]
_OFTEN = 4
"""The first ones, which every run of the tests goes through."""


@pytest.mark.parametrize(
    ("loop", "steps", "make", "log"),
    [pytest.param(*form, marks=[pytest.mark.drill] * (number >= _OFTEN)) for number, form in enumerate(FORMS)],
)
def test_a_run_that_is_stopped_anywhere_ends_as_one_that_is_not(
    tmp_path: Path, loop: Loop, steps: int, make: Callable[[], dict[str, Any]], log: list[Any]
) -> None:
    whole = check_every_boundary(loop, tmp_path, steps=steps, make_options=make)
    assert whole.log == log or not log
