"""Loops that count by themselves begin anew after a resume: they are refused at the second step, and no others are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.errors import UnmanagedStateError
from tests.guard.test_loops import Program
from tests.guarded import no_traces, plain_environment

NUMBER = 3


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    with no_traces():
        yield


class Settings:
    epochs = 3


args = Settings()


def one(p: Program, batch: Any) -> None:
    p.step(*batch)
    p.guard.step_end()


# --- refused ---


def epochs_in_range(p: Program) -> None:
    with p.guard:
        for _epoch in range(args.epochs):
            for batch in p.loader:
                one(p, batch)


def epochs_in_range_with_a_function(p: Program) -> None:
    def train_one_epoch() -> None:
        for batch in p.loader:
            one(p, batch)

    with p.guard:
        for epoch in range(1, args.epochs + 1):
            p.log.append(epoch)
            train_one_epoch()


def steps_in_range(p: Program) -> None:
    with p.guard:
        batches = itertools.cycle(p.loader)
        for _step in range(100):
            one(p, next(batches))


def while_counting(p: Program) -> None:
    step = 0
    with p.guard:
        while step < 100:
            for batch in p.loader:
                one(p, batch)
                step += 1


def while_true_counting(p: Program) -> None:
    step = 0
    with p.guard:
        while True:
            for batch in p.loader:
                one(p, batch)
                step += 1
                if step >= 100:
                    return


def logs_the_guards_step(p: Program) -> None:
    with p.guard:
        for _epoch in range(args.epochs):
            for batch in p.loader:
                one(p, batch)
                if p.guard.step % 10 == 0:
                    p.log.append(p.guard.step)


def prints_where_it_resumed(p: Program) -> None:
    with p.guard:
        p.log.append(p.guard.resumed_from_step)
        for _epoch in range(args.epochs):
            for batch in p.loader:
                one(p, batch)


def full_batches(p: Program) -> None:
    with p.guard:
        for _step in range(6):
            one(p, p.full_batch())


def inner_range_without_loader(p: Program) -> None:
    with p.guard:
        for _epoch in p.guard.epochs(3):
            for _step in range(5):
                one(p, p.full_batch())


REFUSED = [
    (epochs_in_range, r"Write for _epoch in guard\.epochs\(args\.epochs, start=0\):"),
    (epochs_in_range_with_a_function, r"for epoch in guard\.epochs\(args\.epochs\):"),
    (steps_in_range, r"for _step in guard\.steps\(100, start=0\):"),
    (while_counting, r"while step < 100\) begins anew.*begin with step = guard\.step"),
    (while_true_counting, r"while True\) begins anew.*begin with step = guard\.step"),
    (logs_the_guards_step, r"guard\.epochs\(args\.epochs, start=0\)"),
    (prints_where_it_resumed, r"guard\.epochs\(args\.epochs, start=0\)"),
    (full_batches, r"test_own_counters\.py:\d+ \(for _step in range\(6\)\) begins anew"),
    (inner_range_without_loader, r"for _step in range\(5\)\).*in the middle.*guard\.steps"),
]
WITHOUT_LOADER = (full_batches, inner_range_without_loader)


@pytest.mark.parametrize(("program", "words"), REFUSED)
def test_refused_at_the_second_step_and_nothing_is_saved(
    tmp_path: Path, program: Callable[[Program], None], words: str
) -> None:
    options: dict[str, Any] = {"loader": None} if program in WITHOUT_LOADER else {}
    p = Program(tmp_path, **options)
    with pytest.raises(UnmanagedStateError, match=words):
        program(p)
    assert p.guard._loops.step == 2
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_warning_where_that_is_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    epochs_in_range(Program(tmp_path, unmanaged="warn"))
    (line,) = [r.getMessage() for r in caplog.records if "begins anew" in r.getMessage()]
    assert "guard.epochs(args.epochs, start=0)" in line


# --- its own affair ---


def one_pass(p: Program) -> None:
    with p.guard:
        for batch in p.loader:
            one(p, batch)


def one_numbered_pass(p: Program) -> None:
    with p.guard:
        for number, batch in enumerate(p.loader):
            p.log.append(number)
            one(p, batch)


def seeds_around_the_block(p: Program) -> None:
    for _seed in range(1):
        with p.guard:
            for batch in p.loader:
                one(p, batch)


def endless_until_the_guards_step(p: Program) -> None:
    with p.guard:
        while True:
            for batch in p.loader:
                one(p, batch)
                if p.guard.step >= 7:
                    return


def many_epochs_until_the_guards_step(p: Program) -> None:
    with p.guard:
        for _epoch in range(10**9):
            for batch in p.loader:
                one(p, batch)
                if p.guard.step >= 7:
                    return


def counts_from_the_guards_step(p: Program) -> None:
    with p.guard:
        step = p.guard.step
        while step < 7:
            one(p, p.full_batch())
            step += 1


def skips_what_is_done(p: Program) -> None:
    with p.guard:
        first = max(1, p.guard.position.epoch)
        for epoch in range(NUMBER):
            if epoch + 1 < first:
                continue
            for batch in p.loader:
                one(p, batch)


def what_is_left(p: Program) -> None:
    with p.guard:
        left = 7 - p.guard.step
        for _ in range(left):
            one(p, p.full_batch())


def until_the_scheduler_ends(p: Program) -> None:
    with p.guard:
        while p.scheduler.last_epoch < 7:
            one(p, p.full_batch())


class Counter:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def counts_in_an_object(p: Program) -> None:
    counter = p.guard._targets["counter"]
    with p.guard:
        for _ in range(counter.number, 7):
            counter.number += 1
            one(p, p.full_batch())


def place_in_an_epoch(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(2):
            for _ in range(p.guard.position.step_in_epoch, 4):
                one(p, p.full_batch())


FINE = [
    *(one_pass, one_numbered_pass, seeds_around_the_block, endless_until_the_guards_step),
    *(many_epochs_until_the_guards_step, counts_from_the_guards_step, skips_what_is_done, what_is_left),
    *(until_the_scheduler_ends, counts_in_an_object, place_in_an_epoch),
]


@pytest.mark.parametrize("program", FINE)
def test_left_alone(tmp_path: Path, program: Callable[[Program], None], caplog: pytest.LogCaptureFixture) -> None:
    stateful: dict[str, Any] = {"stateful": {"counter": Counter()}} if program is counts_in_an_object else {}
    full = (counts_from_the_guards_step, what_is_left, until_the_scheduler_ends, place_in_an_epoch, counts_in_an_object)
    loader: dict[str, Any] = {"loader": None} if program in full else {}
    p = Program(tmp_path, **stateful, **loader)
    program(p)
    assert p.guard.step >= 5
    assert not [r for r in caplog.records if "begins anew" in r.getMessage()]


SOURCES = {
    "for _ in range(3):\n    for batch in p.loader:\n        one(p, batch)": 6,
    "for _ in range(6):\n    one(p, p.full_batch())": 2,
    "for batch in p.loader:\n    one(p, batch)": 0,
    "p.guard.step\nfor _ in range(6):\n    one(p, p.full_batch())": 0,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_program_without_source(tmp_path: Path, source: str) -> None:
    """From stdin, or made by `exec`: told when a second epoch begins, at the latest."""
    options: dict[str, Any] = {"loader": None} if "full_batch" in source else {}
    p = Program(tmp_path, **options)
    refused = SOURCES[source]
    if not refused:
        with p.guard:
            exec(source, {"p": p, "one": one, "__name__": "__main__"})  # noqa: S102
        return
    with pytest.raises(UnmanagedStateError, match="has not asked the guard where it stands"), p.guard:
        exec(source, {"p": p, "one": one, "__name__": "__main__"})  # noqa: S102
    assert p.guard._loops.step in (refused - 1, refused)


def inner_list_without_loader(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(3):
            for batch in [p.full_batch() for _ in range(3)]:
                one(p, batch)


def inner_count_without_loader(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(3):
            number = 0
            while number < 3:
                one(p, p.full_batch())
                number += 1


def two_boundaries_an_iteration(p: Program) -> None:
    with p.guard:
        for _ in p.guard.steps(6):
            one(p, p.full_batch())
            one(p, p.full_batch())


def weights_changed_before_the_loop(p: Program) -> None:
    with p.guard:
        p.network.load_state_dict({name: value * 2 for name, value in p.network.state_dict().items()})
        for _ in p.guard.steps(3):
            one(p, p.full_batch())


def as_many_as_the_loader_has(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(3):
            batches, number = iter(p.loader), 0
            while number < len(p.loader):
                for _ in range(2):
                    batch = next(batches)
                    number += 1
                one(p, batch)


def as_many_as_are_left(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(3):
            batches, number = iter(p.loader), p.guard.position.step_in_epoch
            while number < len(p.loader):
                one(p, next(batches))
                number += 1


MORE = [
    (inner_list_without_loader, r"for batch in \[p\.full_batch\(\).* begins anew when its epoch"),
    (inner_count_without_loader, r"while number < 3\) begins anew when its epoch"),
    (two_boundaries_an_iteration, r"has passed 2 boundaries"),
    (weights_changed_before_the_loop, r"weights are changed inside the guard's block"),
]


@pytest.mark.parametrize(("program", "words"), MORE)
def test_refused_in_loops_of_ours(tmp_path: Path, program: Callable[[Program], None], words: str) -> None:
    p = Program(tmp_path, loader=None)
    with pytest.raises(UnmanagedStateError, match=words):
        program(p)
    assert not list(tmp_path.glob("*.safetensors"))


# --- the same with a dict that is kept, which might have the count: where it certainly has not ---


def chunks_of_a_text(p: Program) -> None:
    state, text = p.guard._targets["state"], list(range(21))
    with p.guard:
        for _ in p.guard.epochs(2):
            state["hidden"] = 0.0
            for _batch, _i in enumerate(range(0, len(text) - 1, 5)):
                state["hidden"] += 1
                if p.guard.step % 2 == 0:
                    p.log.append(state["hidden"])
                one(p, p.full_batch())


def a_number_of_steps(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(2):
            for _step in range(5):
                one(p, p.full_batch())


def chunks_of_any_length(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(2):
            batch, i = 0, 0
            while i < 20:
                one(p, p.full_batch())
                batch += 1
                i += random.randint(3, 5)


WITH_A_DICT = [
    (
        chunks_of_a_text,
        r"_i\) in enumerate.* anew.*guard\.steps\(len\(range\(0, len\(text\) - 1, 5\)\), start=0\): .*_i = range",
    ),
    (a_number_of_steps, r"for _step in range\(5\)\) begins anew.*for _step in guard\.steps\(5, start=0\)"),
    (chunks_of_any_length, r"while i < 20\) begins anew.*if guard\.position\.step_in_epoch == 0:"),
]


@pytest.mark.parametrize(("program", "words"), WITH_A_DICT)
def test_a_dict_does_not_hide_a_count(tmp_path: Path, program: Callable[[Program], None], words: str) -> None:
    with pytest.raises(UnmanagedStateError, match=words):
        program(Program(tmp_path, loader=None, stateful={"state": {"hidden": 0.0}}))


def chunks_from_the_dict(p: Program) -> None:
    state = p.guard._targets["state"]
    with p.guard:
        for _ in p.guard.epochs(2):
            done = state["done"] = state["done"] % 5
            for _i in range(done, 5):
                state["done"] += 1
                one(p, p.full_batch())


def chunks_that_are_left(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(2):
            for _i in range(0, 20 - p.guard.position.step_in_epoch * 4, 4):
                one(p, p.full_batch())


def skips_by_the_dict(p: Program) -> None:
    state = p.guard._targets["state"]
    with p.guard:
        for _ in p.guard.epochs(2):
            state["done"] %= 5
            for i in range(5):
                if i >= state["done"]:
                    state["done"] += 1
                    one(p, p.full_batch())


def a_count_in_the_dict(p: Program) -> None:
    state = p.guard._targets["state"]
    with p.guard:
        for _ in p.guard.epochs(2):
            if p.guard.position.step_in_epoch == 0:
                state["done"] = 0
            while state["done"] < 20:
                state["done"] += random.randint(3, 5)
                one(p, p.full_batch())


def as_the_message_says(p: Program) -> None:
    text, state = list(range(21)), p.guard._targets["state"]
    with p.guard:
        for _ in p.guard.epochs(2):
            if p.guard.position.step_in_epoch == 0:
                state["done"] = 0
            for step in p.guard.steps(len(range(0, len(text) - 1, 5)), start=0):
                p.log.append(range(0, len(text) - 1, 5)[step])
                state["done"] += 1
                one(p, p.full_batch())
            p.log.append(state["done"])


@pytest.mark.parametrize(
    "program", [chunks_from_the_dict, chunks_that_are_left, skips_by_the_dict, a_count_in_the_dict, as_the_message_says]
)
def test_a_dict_may_have_the_count(tmp_path: Path, program: Callable[[Program], None]) -> None:
    program(Program(tmp_path, loader=None, stateful={"state": {"done": 0}}))


# --- what is done between step_end() and the next batch ---


def scheduler_after_the_boundary(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(2):
            for batch in p.loader:
                one(p, batch)
                p.scheduler.step()


def draws_after_the_boundary(p: Program) -> None:
    with p.guard:
        for _ in p.guard.steps(6):
            one(p, p.full_batch())
            p.log.append(p.full_batch())


def scheduler_after_a_full_batch(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(6):
            one(p, p.full_batch())
            p.scheduler.step()


@pytest.mark.parametrize(
    ("program", "words", "options"),
    [
        (scheduler_after_the_boundary, r"lr_scheduler moves after guard\.step_end\(\)", {}),
        (draws_after_the_boundary, r"a random stream \(python, torch, numpy\) moves after", {"loader": None}),
        (scheduler_after_a_full_batch, r"lr_scheduler moves after", {"loader": None}),
    ],
)
def test_what_a_stop_would_lose_is_refused(
    tmp_path: Path, program: Callable[[Program], None], words: str, options: dict[str, Any]
) -> None:
    p = Program(tmp_path, **options)
    with pytest.raises(UnmanagedStateError, match=words):
        program(p)


def samples_now_and_then(p: Program, *, last: int) -> None:
    with p.guard:
        for step in p.guard.steps(last):
            one(p, p.full_batch())
            if step % 5 == 0:
                p.log.append(p.full_batch())


def test_a_run_that_was_not_refused_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps 1, 2, 3 and 8 show nothing; of the resumed process's own first steps the third one does."""
    samples_now_and_then(Program(tmp_path, loader=None), last=7)
    assert "moves after" not in caplog.text
    resumed = Program(tmp_path, loader=None)
    samples_now_and_then(resumed, last=12)
    assert resumed.guard.resumed_from_step == 7 and "moves after guard.step_end()" in caplog.text
    assert resumed.guard._unmanaged.notes


def test_numbers_that_no_step_draws_may_be_drawn_anywhere(tmp_path: Path) -> None:
    p = Program(tmp_path)
    with p.guard:
        for _ in p.guard.epochs(2):
            for batch in p.loader:
                p.step(*batch)
                p.guard.step_end()
                p.log.append(random.choice("which sample to print"))
    assert p.guard._unmanaged.notes == ()


def at_the_head_and_between(p: Program) -> None:
    counter = p.guard._targets["counter"]
    with p.guard:
        for _ in p.guard.epochs(2):
            for batch in p.loader:
                if p.guard.step % 2 == 1:
                    with p.guard.outside_step():
                        p.full_batch()
                    counter.number += 1
                p.full_batch()
                one(p, batch)
                with p.guard.outside_step():
                    p.full_batch()
            p.scheduler.step()
            with p.guard.outside_step():
                p.full_batch()
            counter.number += 1
            p.full_batch()


def test_the_right_places_are_left_alone(tmp_path: Path) -> None:
    at_the_head_and_between(Program(tmp_path, stateful={"counter": Counter()}))


def test_a_result_noted_after_the_boundary_is_a_risk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter()
    p = Program(tmp_path, stateful={"counter": counter})
    with p.guard:
        for _ in p.guard.epochs(3):
            for batch in p.loader:
                one(p, batch)
                if p.guard.step == 12:
                    with p.guard.outside_step():
                        p.full_batch()
                    counter.number += 1
    (line,) = [r.getMessage() for r in caplog.records if "moves after" in r.getMessage()]
    assert line.startswith("counter moves after guard.step_end()") and "at the head of the loop" in line


def test_a_count_of_batches_that_ends_at_the_length_of_the_loader(tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match=r"while number < len\(p\.loader\)\) begins anew when its epoch"):
        as_many_as_the_loader_has(Program(tmp_path / "anew"))
    as_many_as_are_left(Program(tmp_path / "left"))
