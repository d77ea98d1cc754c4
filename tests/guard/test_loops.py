"""The forms of a loop: each is stopped at all kinds of boundaries by a real signal, and ends as if it had not been."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.data import ReplayLoader, ResumableLoader
from mindx_elastic.errors import UnmanagedStateError, UsageError
from tests.capture.round_trip import assert_same
from tests.guard.program import BATCHES, EPOCHS, LAST, Loop, Make, Program, check, draw, no_loader, run, stopped
from tests.guarded import Points

pytestmark = pytest.mark.usefixtures("clean")


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


# --- refused, or nothing to do ---


def test_wrong_numbers_are_refused_at_once(tmp_path: Path) -> None:
    guard = Program(tmp_path).guard
    for loop, number in itertools.product((guard.steps, guard.epochs), (-1, 2.0, True, "3", None)):
        wrong: Any = number
        no_start: Any = "0" if number == -1 else number
        with pytest.raises(UsageError, match=r"num_\w+=.*whole number of at least 0"):
            loop(wrong)
        with pytest.raises(UsageError, match=r"start=.*whole number"):
            loop(3, start=no_start)


def test_loops_that_cannot_go_on_are_refused_in_words(tmp_path: Path) -> None:
    with Program(tmp_path / "one").guard as guard, pytest.raises(UsageError, match=r"have not called guard\.step_end"):
        list(guard.steps(3))
    p = Program(tmp_path / "two", loader=None)
    with p.guard:
        for _ in p.guard.epochs(1):
            p.train(p.full_batch())
        with pytest.raises(UsageError, match=r"for 1 more epochs write guard\.epochs\(2\)"):
            list(p.guard.epochs(1))
    with Program(tmp_path / "three").guard as guard:
        outer = guard.epochs(3)
        assert next(outer) == 1
        assert list(guard.epochs(2)) == [1, 2]
        with pytest.raises(UsageError, match="two loops over"):
            next(outer)


def epochs_up_to(*numbers: int) -> Loop:
    def loop(p: Program) -> None:
        for number in numbers:
            for _ in p.guard.epochs(number):
                for batch in p.loader:
                    p.train(batch)

    return loop


def test_a_smaller_number_than_what_is_done_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopped(epochs_up_to(3), tmp_path / "job", 2 * BATCHES + 1)
    run(epochs_up_to(2), tmp_path / "job", final_save=False)
    assert "guard.epochs(2): the resumed run is at epoch 3 already, so this loop makes no step" in caplog.text
    caplog.clear()
    run(epochs_up_to(3), tmp_path / "job")
    stopped(epochs_up_to(1, 3), tmp_path / "phases", 2 * BATCHES)
    assert run(epochs_up_to(1, 3), tmp_path / "phases")[0].guard.step == LAST
    assert "makes no step" not in caplog.text, "a phase that is over is no smaller number"


# --- several loops ---


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
    stopped(in_phases_with_code_between, tmp_path, 12)
    caplog.clear()
    run(in_phases_with_code_between, tmp_path, seed=99)
    (line,) = [r.getMessage() for r in caplog.records if "put back" in r.getMessage()]
    assert "optimizer" in line and "step 12" in line


def test_weights_changed_before_the_resumed_place_are_refused(tmp_path: Path) -> None:
    def again(p: Program) -> None:
        if p.stop_at == 0:
            nn.init.ones_(next(p.network.parameters()))
        for _ in p.guard.epochs(3):
            for batch in p.loader:
                p.train(batch)

    stopped(again, tmp_path, 7)
    second = Program(tmp_path)
    with pytest.raises(UnmanagedStateError, match="a resumed run does that again"), second.guard:
        again(second)


def in_steps_twice(p: Program) -> None:
    draw()
    for _ in p.guard.steps(3):
        p.train(p.full_batch())
    draw()
    for _ in p.guard.steps(6):
        p.train(p.full_batch())


def test_what_is_set_behind_a_loop_by_hand_is_not_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run that has made steps is past the resumed place."""

    def by_hand_and_then_in_steps(p: Program) -> None:
        while p.guard.step < 3:
            p.train(p.full_batch())
        for group in p.opt.param_groups:
            group["weight_decay"] = 0.5
        for _ in p.guard.steps(5):
            p.train(p.full_batch())

    _, expected = run(by_hand_and_then_in_steps, tmp_path / "whole", loader=None)
    stopped(by_hand_and_then_in_steps, tmp_path / "stopped", 2, loader=None)
    second, result = run(by_hand_and_then_in_steps, tmp_path / "stopped", loader=None, seed=99)
    assert second.guard.resumed_from_step == 2
    assert_same(result, expected)
    assert "put back" not in caplog.text


def test_numbered_batches_have_the_length_of_the_loader(tmp_path: Path) -> None:
    """Which a bar or torchvision's `MetricLogger` around them asks for."""
    p = Program(tmp_path)
    with p.guard:
        for _ in p.guard.epochs(1):
            for i, batch in p.guard.enumerate(p.loader):
                assert i == p.guard.step
                p.train(batch)
            assert p.guard.step == len(p.guard.enumerate(p.loader))  # type: ignore[arg-type]


# --- the head of the loop comes a second time in a resumed epoch ---


class Trainer:
    """An object of the program that has a loader."""

    def __init__(self, loader: object) -> None:
        self.loader, self.scale = loader, 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def test_what_a_head_sets_on_an_object_with_a_loader_is_undone(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        loader = ResumableLoader(Points(), 4, seed=0)
        return {"loader": loader, "stateful": {"trainer": Trainer(loader)}}

    def loop(p: Program) -> None:
        trainer = p.guard._targets["trainer"]
        for _ in p.guard.epochs(2):
            trainer.scale *= 0.5
            for x, y in p.loader:
                p.log.append(trainer.scale)
                p.train((trainer.scale * x, y))

    assert check(loop, tmp_path, (BATCHES + 3,), make=options).log[-1] == 0.25


# --- every form, stopped at every boundary ---


def replayed() -> dict[str, Any]:
    return {"loader": ReplayLoader(torch.utils.data.DataLoader(Points(), batch_size=4, shuffle=True))}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("loop", "make"),
    [
        (in_full_batches, no_loader),
        (in_epochs_with_a_begin, dict),
        (in_epochs_with_a_begin, replayed),
        (in_steps_twice, no_loader),
        (in_steps_of_epochs, no_loader),
        (in_phases_with_code_between, dict),
    ],
)
def test_a_run_that_is_stopped_anywhere_ends_as_one_that_is_not(tmp_path: Path, loop: Loop, make: Make) -> None:
    check(loop, tmp_path, make=make)
