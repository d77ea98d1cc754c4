"""Loops that never ask where they stand start over after a resume: refused when that is certain, and no others are."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import UnmanagedStateError
from tests.guard.program import BATCHES, Loop, Make, Program, no_loader, run, stopped
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


def test_an_epoch_that_asks_for_more_batches_than_are_left_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(p: Program) -> None:
        for _epoch in p.guard.epochs(3):
            batches = iter(p.loader)
            for _ in range(len(p.loader)):
                p.train(next(batches))

    stopped(loop, tmp_path, 2)
    p = Program(tmp_path)
    with pytest.raises(StopIteration), p.guard:
        loop(p)
    assert "has asked for more batches than are left. If it counts by itself" in caplog.text


def test_an_iterator_that_is_made_where_next_fails_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is over at once where the stop came with the last batch of an epoch."""

    def loop(p: Program, *, is_corrected: bool = False) -> None:
        batches: Any = iter(p.loader) if is_corrected else None
        for _step in p.guard.steps(3 * BATCHES):
            try:
                batch = next(batches)
            except (TypeError, StopIteration):
                batches = iter(p.loader)
                batch = next(batches)
            p.train(batch)

    stopped(loop, tmp_path, BATCHES)
    p = Program(tmp_path)
    with pytest.raises(StopIteration), p.guard:
        loop(p)
    assert "If it makes the iterator where next() has failed, make it before the loop" in caplog.text
    assert "In place of itertools.cycle(loader) use a generator with `while True: yield from loader`" in caplog.text
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


# --- a loop that a library runs ---

ENGINE = """
class Engine:
    def __init__(self, update):
        self.update, self.epoch = update, 0

    def run(self, loader, epochs):
        while self.epoch < epochs:
            for batch in loader:
                self.update(batch)
            self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Any]:
    """A trainer as a package has it."""
    file = tmp_path / "site-packages" / "foreign_engine.py"
    file.parent.mkdir()
    file.write_text(ENGINE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("foreign_engine", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["foreign_engine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["foreign_engine"]


def engine_of(library: Any, directory: Path, *, named: bool = False, **options: Any) -> tuple[Program, Any]:
    engine = library.Engine(None)
    p = Program(directory, stateful={"engine": engine} if named else None, **options)
    engine.update = p.train
    return p, engine


def test_a_trainer_of_a_library_is_refused_with_the_line_that_names_it(library: Any, tmp_path: Path) -> None:
    p, engine = engine_of(library, tmp_path / "ckpt")
    words = r'foreign_engine runs \(run\) starts over .*"trainer": trainer'
    with pytest.raises(UnmanagedStateError, match=words), p.guard:
        engine.run(p.loader, 2)
    assert p.guard.step == BATCHES + 1


def test_one_that_is_named_or_told_where_to_begin_is_not(library: Any, tmp_path: Path) -> None:
    named, engine = engine_of(library, tmp_path / "named", named=True)
    with named.guard:
        engine.run(named.loader, 2)
    told, engine = engine_of(library, tmp_path / "told")
    with told.guard:
        engine.run(told.loader, 2 - max(0, told.guard.position.epoch - 1))
    assert named.guard.step == told.guard.step == 2 * BATCHES
