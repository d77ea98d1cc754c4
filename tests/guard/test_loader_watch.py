"""What no position covers is told: loaders that are not named, older iterators, threads, batches that are kept."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mindx_elastic import data as mx_data
from mindx_elastic.data import from_loader
from mindx_elastic.errors import MismatchError, UnmanagedStateError, UsageError
from mindx_elastic.guard.loops import followed_loader
from tests.guard.program import BATCHES, EPOCHS, Loop, Program, check, run, stopped
from tests.guard.test_loaders import Pictures, of, plain, shuffled
from tests.guarded import no_traces, plain_environment


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    before = dict(vars(_BaseDataLoaderIter))
    with no_traces():
        yield
    assert dict(vars(_BaseDataLoaderIter)) == before, "torch's DataLoader is as it was"


def points(size: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * size).reshape(size, 4), torch.arange(size))


def notes(p: Program) -> tuple[str, ...]:
    return p.guard._unmanaged.notes


# --- refused ---


def another(p: Program) -> None:
    train = shuffled()
    for _ in p.guard.epochs(EPOCHS):
        for batch in train:
            p.train(batch)


def after_the_step(p: Program) -> None:
    held_out = DataLoader(points(), batch_size=4, shuffle=True)
    for _ in p.guard.epochs(EPOCHS):
        for batch in p.loader:
            p.train(batch)
            if p.guard.position.step % 3 == 0:
                list(held_out)


def thread(p: Program) -> None:
    for _ in p.guard.epochs(EPOCHS):
        ready: queue.Queue[Any] = queue.Queue(2)

        def fill(ready: queue.Queue[Any] = ready) -> None:
            for batch in p.loader:
                ready.put(batch)
            ready.put(None)

        filling = threading.Thread(target=fill, daemon=True)
        filling.start()
        while (batch := ready.get()) is not None:
            p.train(batch)


def of_ours(p: Program) -> None:
    batches = mx_data.from_function(drawn)
    for _ in p.guard.steps(6):
        p.train(next(iter(batches)))  # it goes on


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the loader ends under the thread
@pytest.mark.parametrize(
    ("loop", "is_named", "words"),
    [
        (another, True, r"steps use batches of a DataLoader over Pictures, next to the named ones.*loader=loader"),
        (another, False, r"no loader is named.*Guard\(loader=loader"),
        (of_ours, False, r"a FunctionLoader of drawn\(\), and no loader is named.*write Guard\(loader=loader, ...\)"),
        (after_the_step, True, r"moves after guard.step_end\(\).*outside_step"),
        (thread, True, r"batches of loader are fetched in another thread.*prefetch_factor"),
    ],
)
def test_what_is_certain_is_refused(loop: Loop, is_named: bool, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match=words):
        run(loop, tmp_path, loader=shuffled() if is_named else None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (shuffled, "Make iterators in the block, after `with guard:`"),
        (lambda: mx_data.ResumableLoader(Pictures(), 2, shuffle=True), "made before the guard was entered"),
    ],
)
def test_an_iterator_made_before_the_guard(tmp_path: Path, make: Any, words: str) -> None:
    p = Program(tmp_path, loader=make())
    batches = iter(p.loader)

    def train() -> None:
        with p.guard:
            for _ in p.guard.steps(3):
                p.train(next(batches))

    with pytest.raises(UnmanagedStateError, match=words):
        train()


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([(torch.zeros(2, 4), torch.zeros(2))], "loader is a list.*from_loader"),
        (iter([1]), "can be gone through only once"),
    ],
)
def test_what_has_no_position_is_refused_with_the_line_to_write(tmp_path: Path, loader: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(another, tmp_path, loader=loader)


# --- risks ---


def several_steps_a_batch(p: Program) -> None:
    for _ in p.guard.epochs(1):
        for batch in p.loader:
            p.train(batch)
            p.train(batch)


def left_early(p: Program) -> None:
    for _ in p.guard.epochs(EPOCHS):
        for batch in itertools.islice(p.loader, 3):
            p.train(batch)


def cycled(p: Program) -> None:
    for batch in itertools.islice(itertools.cycle(p.loader), EPOCHS * BATCHES):
        p.train(batch)


def cycled_beside_a_longer_one(p: Program) -> None:
    """As ``zip(unlabelled, itertools.cycle(labelled))``: the short one's later batches are no loader's."""
    many, few = p.loader
    again = itertools.cycle(few)
    for _ in p.guard.epochs(2):
        for batch in many:
            p.backward(*next(again))
            p.train(batch)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (several_steps_a_batch, "without a batch"),
        (left_early, "right after a step, with batches left"),
        (cycled, "keeps its batches, as itertools.cycle does"),
        (cycled_beside_a_longer_one, "after the end of an epoch of loader_1, and the program keeps its batches"),
    ],
)
def test_what_may_differ_is_one_warning(loop: Loop, words: str, tmp_path: Path) -> None:
    loaders = [shuffled(20), shuffled(6)] if loop is cycled_beside_a_longer_one else shuffled()
    p, _ = run(loop, tmp_path, loader=loaders)
    assert sum(words in note for note in notes(p)) == 1, notes(p)


# --- exact, and without a word ---


def evaluates(p: Program) -> None:
    """With loaders of its own and with the training's, in all the free places."""
    held_out = DataLoader(points(), batch_size=4, shuffle=True)
    list(held_out)
    ours = mx_data.from_function(drawn, 2)
    for _ in p.guard.epochs(EPOCHS):
        for batch in p.loader:
            if p.guard.position.step % 4 == 2:
                with p.guard.outside_step():
                    assert len(list(held_out)) == 2
                    assert len(list(p.loader)) == BATCHES
            list(held_out)  # in every step: part of it
            p.train(batch)
            list(ours)
        list(held_out)
        list(ours)


def epochs_of_steps(p: Program) -> None:
    """An epoch is a number of steps (FixMatch), and the loader starts over in the middle of one."""
    held_out = DataLoader(points(), batch_size=4, shuffle=True)
    batches = iter(p.loader)
    for _ in p.guard.epochs(EPOCHS):
        for _ in p.guard.steps(BATCHES - 1):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(p.loader)
                batch = next(batches)
            p.train(batch)
        list(held_out)


def skips(p: Program) -> None:
    """Leaves out bad batches, and leaves an epoch before the step."""
    for _ in p.guard.epochs(EPOCHS):
        for batch in p.loader:
            if batch[1].sum() % 4 == 1 and p.guard.position.step > 1:
                continue
            if p.guard.position.step_in_epoch >= 3:
                break
            p.train(batch)


@pytest.mark.parametrize(
    ("loop", "stops", "workers"),
    [
        (evaluates, (3, 7), 0),
        (epochs_of_steps, (3, 7), 0),
        (skips, (3,), 0),
        *(pytest.param(loop, (3,), 2, marks=pytest.mark.drill) for loop in (evaluates, epochs_of_steps, skips)),
    ],
)
def test_no_false_alarm(loop: Loop, stops: tuple[int, ...], workers: int, tmp_path: Path) -> None:
    whole = check(loop, tmp_path, stops, make=of(lambda: shuffled(num_workers=workers)))
    assert notes(whole) == ()


class Nested(Dataset[Any]):
    """A data set with a DataLoader inside, whose iterator goes on from sample to sample."""

    def __init__(self) -> None:
        self.inner = Pictures()
        self.memory = iter(DataLoader(points(200), batch_size=1))

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        next(self.memory)
        return self.inner[index]


def test_a_data_set_may_use_data_loaders(tmp_path: Path) -> None:
    p, _ = run(plain, tmp_path, loader=DataLoader(Nested(), batch_size=2, shuffle=True))
    assert notes(p) == ()


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.randint(100, (3,))
    return torch.randn(3, 4) + index[:, None], index


def two_lengths() -> list[DataLoader[Any]]:
    return [shuffled(), shuffled(3 * BATCHES)]


def test_a_longer_loader_is_left_where_the_shorter_one_ends(tmp_path: Path) -> None:
    def loop(p: Program) -> None:
        for _ in p.guard.epochs(EPOCHS):
            for batch, other in zip(*p.loader, strict=False):
                p.log.append((batch[1].tolist(), other[1].tolist()))
                p.backward(*other)
                p.train(batch)

    assert notes(check(loop, tmp_path, (4, 5, 6, 10), make=of(two_lengths))) == ()


def test_batches_of_an_evaluation_may_be_kept(tmp_path: Path) -> None:
    def loop(p: Program) -> None:
        held_out: list[Any] = []
        for _ in p.guard.epochs(EPOCHS):
            for batch in p.loader[0]:
                p.train(batch)
            held_out = held_out or list(p.loader[1])

    assert notes(run(loop, tmp_path, loader=two_lengths())[0]) == ()


# --- loaders with a state of their own ---


class Streaming(DataLoader[Any]):
    """As streaming libraries have it: counts by itself what it has given, and its data set's state wants arguments. One
    that is loaded behind an epoch begins the next one, and to ask it before it is iterated spoils what was loaded."""

    def __init__(self, workers: int) -> None:
        super().__init__(Numbered(), batch_size=4, num_workers=workers)
        self.epoch = self.given = 0
        self.loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.loaded is None or self.given >= len(self):
            self.epoch, self.given = self.epoch + 1, 0
        begin, self.loaded = self.given, None
        for number, (x, index) in enumerate(super().__iter__()):
            if number >= begin:
                self.given += 1
                self.dataset.advance()  # type: ignore[attr-defined]
                yield x, index + self.epoch * 100

    def state_dict(self) -> dict[str, int]:
        if self.loaded is not None:
            self.epoch = 0
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state
        self.epoch, self.given = state["epoch"], state["given"]


class Numbered(TensorDataset):
    place = 0

    def __init__(self) -> None:
        super().__init__(*points(20).tensors)

    def advance(self) -> None:
        self.place += 1

    def state_dict(self, num_samples: int) -> dict[str, int]:
        return {"samples": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(("stops", "workers"), [((3, 10), 0), ((7,), 1)])
def test_a_loader_with_workers_and_a_state_of_its_own(
    stops: tuple[int, ...], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-epoch, and behind the last batch of one."""
    monkeypatch.setattr(followed_loader, "_MOVE_ON", ("tests",))
    assert len(check(plain, tmp_path, stops, make=of(lambda: Streaming(workers))).log) == 15


@pytest.mark.parametrize("is_ours", [False, True])
def test_one_that_an_evaluation_has_moved_is_told_of(is_ours: bool, tmp_path: Path) -> None:
    """No one but the library can put it back."""

    def evaluates(p: Program) -> None:
        for batch in p.loader:
            p.train(batch)
            with p.guard.outside_step():
                next(iter(p.loader))
            if p.guard.step == 2:
                break

    p, _ = run(evaluates, tmp_path, loader=shuffled() if is_ours else Streaming(0))
    told = [note for note in notes(p) if "keeps its position by itself was iterated inside" in note]
    assert len(told) == (not is_ours)


def test_a_file_of_an_earlier_version_or_of_another_loader() -> None:
    """The first had the library's state as it is."""
    loader = Streaming(0)
    own = followed_loader.SelfPositionedLoader(loader)
    own.load_state_dict({"epoch": 1, "given": 2})
    assert own.state_dict() == {"own": {"epoch": 1, "given": 2}, "batches": 0}
    assert next(iter(loader))[1].tolist() == [108, 109, 110, 111]
    with pytest.raises(MismatchError, match=r"another kind of loader \('resumable', .*Streaming"):
        own.load_state_dict({"kind": "resumable", "epoch": 1, "batch": 2})


def test_a_loader_of_that_kind_is_not_wrapped() -> None:
    with pytest.raises(UsageError, match="Guard\\(loader=loader"):
        from_loader(Streaming(0))
    with pytest.raises(UsageError, match="Use that one"):
        list(from_loader(DataLoader(StreamOfNumbers(), 4)))


class StreamOfNumbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))

    state_dict, load_state_dict = Numbered.state_dict, Numbered.load_state_dict


class Hand(DataLoader[Any]):
    """Gives the rows of its data set itself, and makes no iterator of torch's."""

    def __init__(self) -> None:
        super().__init__(points(20), 4)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while self.given < BATCHES:
            self.given += 1
            yield list(self.dataset[4 * self.given - 4 : 4 * self.given])
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def test_each_resume_of_such_a_loader_goes_on_at_its_own_batch(tmp_path: Path) -> None:
    """A second one as well: what the first one had loaded does not count any more once a batch was given."""
    whole = run(plain, tmp_path / "whole", loader=Hand(), unmanaged="warn")[0]
    for stop in (7, 10, 12):
        stopped(plain, tmp_path / "cut", stop, loader=Hand(), unmanaged="warn")
    assert run(plain, tmp_path / "cut", loader=Hand(), unmanaged="warn")[0].log == whole.log[12:]
