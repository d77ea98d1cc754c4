"""Loops that never ask where they stand start over after a resume: refused when that is certain, and no others are."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import UnmanagedStateError
from tests.guard.program import BATCHES, Loop, Make, Program, check, draw, no_loader, run, stopped
from tests.guarded import Points

pytestmark = pytest.mark.usefixtures("clean")


# --- refused ---


def epochs_in_range(p: Program) -> None:
    for _epoch in range(3):
        for batch in p.loader:
            p.train(batch)


def full_batches(p: Program) -> None:
    for _step in range(6):
        p.train(p.full_batch())


def steps_in_an_epoch(p: Program) -> None:
    for _epoch in p.guard.epochs(3):
        for batch in [p.full_batch() for _ in range(3)]:
            p.train(batch)


def passes_in_an_epoch(p: Program) -> None:
    for _epoch in p.guard.epochs(3):
        for batch in itertools.chain(p.loader, p.loader):
            p.train(batch)


def two_loaders() -> dict[str, Any]:
    return {"loader": [ResumableLoader(Points(), batch_size=size, shuffle=True, seed=3) for size in (10, 4)]}


def both_anew(p: Program) -> None:
    few, many = p.loader
    for _ in p.guard.epochs(2):
        for _ in range(2):
            for batch, _other in zip(few, many, strict=False):
                p.train(batch)


NOT_ASKED, IN_EPOCH = "has not asked the guard where it stands", "starts over when its epoch is resumed in the middle"


@pytest.mark.parametrize(
    ("loop", "make", "step", "words"),
    [
        (epochs_in_range, dict, BATCHES + 1, NOT_ASKED),
        (full_batches, no_loader, 2, NOT_ASKED),
        (steps_in_an_epoch, no_loader, 2, IN_EPOCH),
        (passes_in_an_epoch, dict, BATCHES + 1, IN_EPOCH),
        (both_anew, two_loaders, 3, IN_EPOCH),
    ],
)
def test_refused_and_the_steps_are_saved(tmp_path: Path, loop: Loop, make: Make, step: int, words: str) -> None:
    p = Program(tmp_path, **make())
    with pytest.raises(UnmanagedStateError, match=words), p.guard:
        loop(p)
    assert p.guard._loops.step == step
    corrected = Program(tmp_path, **make())
    with corrected.guard:
        assert corrected.guard.resumed_from_step == step


def counts_the_batches(p: Program, *, is_corrected: bool) -> None:
    for _epoch in p.guard.epochs(3):
        batches = iter(p.loader)
        for _ in range(len(p.loader) - is_corrected * p.guard.position.step_in_epoch):
            p.train(next(batches))


def makes_the_iterator_where_next_fails(p: Program, *, is_corrected: bool) -> None:
    """It is over at once where the stop came with the last batch of an epoch."""
    batches: Any = iter(p.loader) if is_corrected else None
    for _step in p.guard.steps(3 * BATCHES):
        try:
            batch = next(batches)
        except (TypeError, StopIteration):
            batches = iter(p.loader)
            batch = next(batches)
        p.train(batch)


@pytest.mark.parametrize(("loop", "stop"), [(counts_the_batches, 2), (makes_the_iterator_where_next_fails, BATCHES)])
def test_a_loop_that_asks_for_more_batches_than_are_left_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: Any, stop: int
) -> None:
    stopped(lambda p: loop(p, is_corrected=False), tmp_path, stop)
    p = Program(tmp_path)
    with pytest.raises(StopIteration), p.guard:
        loop(p, is_corrected=False)
    assert "has asked for more batches than are left. If it counts by itself" in caplog.text
    assert "Make an iterator before the loop, not where next() has failed" in caplog.text
    p = Program(tmp_path)
    with p.guard:
        loop(p, is_corrected=True)
    assert p.guard.step == 3 * BATCHES


def a_list_whose_steps_are_printed(p: Program) -> None:
    batches = p.loader or [p.full_batch() for _ in range(BATCHES)]
    for _ in p.guard.epochs(2):
        for batch in batches:
            p.train(batch)
            print(p.guard.step)


def a_list_and_the_step_is_printed_in_front_of_it(p: Program) -> None:
    batches = p.loader or [p.full_batch() for _ in range(BATCHES)]
    for _ in p.guard.epochs(3):
        print(p.guard.step)
        for batch in batches:
            p.train(batch)


@pytest.mark.parametrize("is_first", [True, False], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize(
    "loop",
    [a_list_whose_steps_are_printed, a_list_and_the_step_is_printed_in_front_of_it],
    ids=["after a step", "in front"],
)
def test_a_list_that_a_resumed_epoch_begins_again_is_told(
    loop: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    stopped(loop, tmp_path, (0 if is_first else BATCHES) + 2, loader=None)
    assert "started the resumed epoch over" not in caplog.text
    p, _ = run(loop, tmp_path, loader=None)
    assert p.guard.step > 2 * BATCHES
    assert "started the resumed epoch over" in caplog.text and "mx.data.from_loader(batches)" in caplog.text


# --- its own affair ---


def few_data_gone_through_again_beside_many(p: Program) -> None:
    few, many = p.loader
    for _ in p.guard.epochs(2):
        for batch, _other in zip(many, itertools.chain(few, few), strict=False):
            p.train(batch)


def full_batches_until_the_guards_step(p: Program) -> None:
    while p.guard.step < 7:
        p.train(p.full_batch())


def place_in_an_epoch(p: Program) -> None:
    for _ in p.guard.epochs(2):
        for _ in range(p.guard.position.step_in_epoch, 4):
            p.train(p.full_batch())


def a_count_that_is_kept(p: Program) -> None:
    state = p.guard._targets["state"]
    for _ in p.guard.epochs(2):
        state["done"] %= 5
        while state["done"] < 5:
            state["done"] += 1
            p.train(p.full_batch())


def a_count() -> dict[str, Any]:
    return {"loader": None, "stateful": {"state": {"done": 0}}}


@pytest.mark.parametrize(
    ("loop", "make"),
    [
        (few_data_gone_through_again_beside_many, two_loaders),
        (full_batches_until_the_guards_step, no_loader),
        (place_in_an_epoch, no_loader),
        (a_count_that_is_kept, a_count),
    ],
)
def test_left_alone(tmp_path: Path, loop: Loop, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    p = Program(tmp_path, **make())
    with p.guard:
        loop(p)
    assert p.guard.step >= 5
    assert "counts by itself" not in caplog.text


# --- episodes: the program alone knows when an epoch ends ---


def episodes(p: Program) -> None:
    state = p.guard._targets["state"]
    for _ in p.guard.epochs(3):
        while True:
            state["done"] += 1
            p.train(p.full_batch())
            if state["done"] % 3 == 0:
                break


def episodes_that_begin_with_a_draw(p: Program) -> None:
    state = p.guard._targets["state"]
    for _ in p.guard.epochs(3):
        begin = draw()
        while True:
            state["done"] += 1
            p.train((p.full_batch()[0] + begin, torch.arange(8) % 3))
            if state["done"] % 3 == 0:
                break


def test_episodes_that_have_ended_train_nothing_again(tmp_path: Path) -> None:
    check(episodes, tmp_path, stops=[2, 5], make=a_count)
    assert run(episodes, tmp_path / "whole", seed=99, **a_count())[0].guard.step == 9


def test_what_the_begin_of_an_episode_draws_again_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDX_OVERLAP", "1")
    stopped(episodes_that_begin_with_a_draw, tmp_path, 5, **a_count())
    run(episodes_that_begin_with_a_draw, tmp_path, **a_count())
    assert "step 6 is not the one of the stopped process" in caplog.text


def test_what_the_begin_of_an_episode_may_do_again_is_told_where_nothing_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_in_step_6(p: Program) -> None:
        def backward(x: torch.Tensor, y: torch.Tensor) -> None:
            if p.guard._loops.step == 5:
                raise ZeroDivisionError
            Program.backward(p, x, y)

        p.backward = backward  # type: ignore[method-assign]
        episodes_that_begin_with_a_draw(p)

    monkeypatch.setenv("MINDX_OVERLAP", "1")
    with pytest.raises(ZeroDivisionError):
        run(fails_in_step_6, tmp_path, **a_count())
    caplog.set_level(logging.INFO)
    run(episodes_that_begin_with_a_draw, tmp_path, **a_count())
    assert "step 6 is not compared" in caplog.text and "what the begin of epoch 2 sets anew" in caplog.text
