"""What moves between step_end() and the next batch: refused or told, and left alone in the right places."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mindx_elastic.errors import UnmanagedStateError
from tests.guard.program import Loop, Make, Program, no_loader

pytestmark = pytest.mark.usefixtures("clean")


class Counter:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


# --- refused ---


def scheduler_after_the_boundary(p: Program) -> None:
    for _ in p.guard.epochs(2):
        for batch in p.loader:
            p.train(batch)
            p.scheduler.step()


def scheduler_after_a_full_batch(p: Program) -> None:
    for _ in p.guard.epochs(6):
        p.train(p.full_batch())
        p.scheduler.step()


def draws_after_the_boundary(p: Program) -> None:
    for _ in p.guard.steps(6):
        p.train(p.full_batch())
        p.log.append(p.full_batch())


def two_boundaries_an_iteration(p: Program) -> None:
    for _ in p.guard.steps(6):
        p.train(p.full_batch())
        p.train(p.full_batch())


def weights_changed_before_the_loop(p: Program) -> None:
    p.network.load_state_dict({name: value * 2 for name, value in p.network.state_dict().items()})
    draws_after_the_boundary(p)


@pytest.mark.parametrize(
    ("loop", "words", "make"),
    [
        (scheduler_after_the_boundary, r"lr_scheduler moves after guard\.step_end\(\)", dict),
        (scheduler_after_a_full_batch, r"lr_scheduler moves after", no_loader),
        (draws_after_the_boundary, r"a random stream \(python, torch, numpy\) moves after", no_loader),
        (two_boundaries_an_iteration, r"has passed 2 boundaries", no_loader),
        (weights_changed_before_the_loop, r"weights are changed inside the guard's block", no_loader),
    ],
)
def test_what_a_stop_would_lose_is_refused(tmp_path: Path, loop: Loop, words: str, make: Make) -> None:
    p = Program(tmp_path, **make())
    with pytest.raises(UnmanagedStateError, match=words), p.guard:
        loop(p)


# --- told ---


def samples_now_and_then(p: Program, *, last: int) -> None:
    with p.guard:
        for step in p.guard.steps(last):
            p.train(p.full_batch())
            if step % 9 == 0:
                p.log.append(p.full_batch())


def test_a_run_that_was_not_refused_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps 1, 2 and 8 show nothing; of the resumed process's own first steps the second one does."""
    samples_now_and_then(Program(tmp_path, loader=None), last=7)
    assert "moves after" not in caplog.text
    resumed = Program(tmp_path, loader=None)
    samples_now_and_then(resumed, last=12)
    assert resumed.guard.resumed_from_step == 7 and "moves after guard.step_end()" in caplog.text
    assert resumed.guard._unmanaged.notes


def test_a_result_noted_after_the_boundary_is_a_risk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter()
    p = Program(tmp_path, stateful={"counter": counter})
    with p.guard:
        for _ in p.guard.epochs(3):
            for batch in p.loader:
                p.train(batch)
                if p.guard.step == 12:
                    with p.guard.outside_step():
                        p.full_batch()
                    counter.number += 1
    (line,) = [r.getMessage() for r in caplog.records if "moves after" in r.getMessage()]
    assert line.startswith("counter moves after guard.step_end()") and "at the head of the loop" in line


# --- left alone ---


def test_numbers_that_no_step_draws_may_be_drawn_anywhere(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard:
        for _ in p.guard.epochs(2):
            for batch in p.loader:
                p.train(batch)
                p.log.append(random.choice("which sample to print"))
    assert p.guard._unmanaged.notes == ()
