"""Loops that never ask where they stand start over after a resume: refused when that is certain, and no others are."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import UnmanagedStateError
from tests.guard.test_loops import BATCHES, Program
from tests.guarded import Points

pytestmark = pytest.mark.usefixtures("clean")


def one(p: Program, batch: Any) -> None:
    p.step(*batch)
    p.guard.step_end()


# --- refused ---


def epochs_in_range(p: Program) -> None:
    with p.guard:
        for _epoch in range(3):
            for batch in p.loader:
                one(p, batch)


def full_batches(p: Program) -> None:
    with p.guard:
        for _step in range(6):
            one(p, p.full_batch())


def steps_in_an_epoch(p: Program) -> None:
    with p.guard:
        for _epoch in p.guard.epochs(3):
            for batch in [p.full_batch() for _ in range(3)]:
                one(p, batch)


def passes_in_an_epoch(p: Program) -> None:
    with p.guard:
        for _epoch in p.guard.epochs(3):
            for batch in itertools.chain(p.loader, p.loader):
                one(p, batch)


REFUSED = [
    (epochs_in_range, BATCHES + 1, "has not asked the guard where it stands"),
    (full_batches, 2, "has not asked the guard where it stands"),
    (steps_in_an_epoch, 2, "starts over when its epoch is resumed in the middle"),
    (passes_in_an_epoch, BATCHES + 1, "starts over when its epoch is resumed in the middle"),
]
WITHOUT_LOADER = (full_batches, steps_in_an_epoch)


def options_of(program: Callable[[Program], None]) -> dict[str, Any]:
    return {"loader": None} if program in WITHOUT_LOADER else {}


@pytest.mark.parametrize(("program", "step", "words"), REFUSED)
def test_refused_and_the_steps_are_saved(
    tmp_path: Path, program: Callable[[Program], None], step: int, words: str
) -> None:
    p = Program(tmp_path, **options_of(program))
    with pytest.raises(UnmanagedStateError, match=words):
        program(p)
    assert p.guard._loops.step == step
    corrected = Program(tmp_path, **options_of(program))
    with corrected.guard:
        assert corrected.guard.resumed_from_step == step


def test_an_epoch_that_asks_for_more_batches_than_are_left_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(p: Program) -> None:
        with p.guard:
            for _epoch in p.guard.epochs(3):
                batches = iter(p.loader)
                for _ in range(len(p.loader)):
                    one(p, next(batches))

    with pytest.raises(SystemExit):
        train(Program(tmp_path, stop_at=2))
    with pytest.raises(StopIteration):
        train(Program(tmp_path))
    assert "has asked for more batches than are left: it counts by itself" in caplog.text


# --- its own affair ---


def one_pass(p: Program) -> None:
    with p.guard:
        for batch in p.loader:
            one(p, batch)


def full_batches_until_the_guards_step(p: Program) -> None:
    with p.guard:
        while True:
            one(p, p.full_batch())
            if p.guard.step >= 7:
                return


def place_in_an_epoch(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(2):
            for _ in range(p.guard.position.step_in_epoch, 4):
                one(p, p.full_batch())


def a_count_that_is_kept(p: Program) -> None:
    state = p.guard._targets["state"]
    with p.guard:
        for _ in p.guard.epochs(2):
            state["done"] %= 5
            while state["done"] < 5:
                state["done"] += 1
                one(p, p.full_batch())


def one_batch_of_each_of_two_loaders(p: Program) -> None:
    with p.guard:
        for _ in p.guard.epochs(3):
            for batch, _other in zip(p.loader, p.loader.dataset, strict=False):
                one(p, batch)


FINE = [one_pass, one_batch_of_each_of_two_loaders]
FINE_WITHOUT_LOADER = [full_batches_until_the_guards_step, place_in_an_epoch, a_count_that_is_kept]


@pytest.mark.parametrize("program", [*FINE, *FINE_WITHOUT_LOADER])
def test_left_alone(tmp_path: Path, program: Callable[[Program], None], caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {} if program in FINE else {"loader": None}
    if program is a_count_that_is_kept:
        options["stateful"] = {"state": {"done": 0}}
    p = Program(tmp_path, **options)
    program(p)
    assert p.guard.step >= 5
    assert not [r for r in caplog.records if "counts by itself" in r.getMessage()]


def two_loaders() -> list[Any]:
    return [ResumableLoader(Points(), batch_size=size, shuffle=True, seed=3) for size in (10, 4)]


def test_few_data_gone_through_again_beside_many_are_left_alone(tmp_path: Path) -> None:
    p = Program(tmp_path, loader=two_loaders())
    few, many = p.loader
    with p.guard:
        for _ in p.guard.epochs(2):
            for batch, _other in zip(many, itertools.chain(few, few), strict=False):
                one(p, batch)
    assert p.guard._loops.step > 2 * len(few)


def both_anew(p: Program) -> None:
    few, many = p.loader
    with p.guard:
        for _ in p.guard.epochs(2):
            for _ in range(2):
                for batch, _other in zip(few, many, strict=False):
                    one(p, batch)


def test_two_loaders_that_begin_anew_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match="starts over when its epoch is resumed"):
        both_anew(Program(tmp_path, loader=two_loaders()))


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
    engine.update = lambda batch: one(p, batch)
    return p, engine


def test_a_trainer_of_a_library_is_refused_with_the_line_that_names_it(library: Any, tmp_path: Path) -> None:
    p, engine = engine_of(library, tmp_path / "ckpt")
    with (
        pytest.raises(UnmanagedStateError, match=r'foreign_engine runs \(run\) starts over .*"trainer": trainer'),
        p.guard,
    ):
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


def test_one_that_only_its_hooks_ask_for_is_told_when_it_is_resumed(
    library: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(stop_at: int) -> None:
        def update(batch: Any) -> None:
            one(p, batch)
            p.log.append(p.guard.step)

        p, engine = engine_of(library, tmp_path / "ckpt", stop_at=stop_at)
        engine.update = update
        with p.guard:
            engine.run(p.loader, 2)

    with pytest.raises(SystemExit):
        train(stop_at=BATCHES + 2)
    assert "started over" not in caplog.text
    train(stop_at=0)
    assert "foreign_engine runs (run) has started over, for it counts by itself" in caplog.text
