"""What no position covers is told: loaders that are not named, older iterators, threads, batches that are kept."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mindx_elastic import Guard
from mindx_elastic import data as mx_data
from mindx_elastic.data import from_loader
from mindx_elastic.errors import GracefulExit, MismatchError, UnmanagedStateError, UsageError
from mindx_elastic.guard.loops import followed_loader
from tests.guard.loader_loops import BATCHES, EPOCHS, Pictures, Run, run_loop
from tests.guarded import no_traces, plain_environment, stop_and_wait


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plain_environment(monkeypatch)
    before = dict(vars(_BaseDataLoaderIter))
    with no_traces():
        yield
    assert dict(vars(_BaseDataLoaderIter)) == before, "torch's DataLoader is as it was"


def points(size: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * size).reshape(size, 4), torch.arange(size))


def stop_and_resume(form: Callable[[Run, Any], None], directory: Path, stop: int, **options: Any) -> None:
    whole, weights = run_loop(form, directory / "whole", **options)
    with pytest.raises(GracefulExit) as caught:
        run_loop(form, directory / str(stop), stop_at=stop, **options)
    second, resumed = run_loop(form, directory / str(stop), **options)
    assert caught.value.run.steps + second.steps == whole.steps  # type: ignore[attr-defined]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


# --- refused ---


def another(run: Run, loader: Any) -> None:
    train = DataLoader(Pictures(), batch_size=2, shuffle=True)
    for _ in run.guard.epochs(EPOCHS):
        for batch in train:
            run.train(batch)


def from_before(run: Run, loader: Any) -> None:
    for batch in run.before:
        run.train(batch)


def after_the_step(run: Run, loader: Any) -> None:
    held_out = DataLoader(points(), batch_size=4, shuffle=True)
    for _ in run.guard.epochs(EPOCHS):
        for batch in loader:
            run.train(batch)
            if run.guard.position.step % 3 == 0:
                list(held_out)


def thread(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        ready: queue.Queue[Any] = queue.Queue(2)

        def fill(ready: queue.Queue[Any] = ready) -> None:
            for batch in loader:
                ready.put(batch)
            ready.put(None)

        filling = threading.Thread(target=fill, daemon=True)
        filling.start()
        while (batch := ready.get()) is not None:
            run.train(batch)


def cycled(run: Run, loader: Any) -> None:
    for batch in itertools.islice(itertools.cycle(loader), EPOCHS * BATCHES):
        run.train(batch)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the loader ends under the thread
@pytest.mark.parametrize(
    ("form", "words"),
    [
        (another, r"steps use batches of a DataLoader over Pictures, next to the named ones.*loader=loader"),
        (after_the_step, r"moves after guard.step_end\(\).*outside_step"),
        (thread, r"batches of loader are fetched in another thread.*prefetch_factor"),
    ],
)
def test_what_is_certain_is_refused(form: Callable[[Run, Any], None], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match=words):
        run_loop(form, tmp_path)


def test_no_loader_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnmanagedStateError, match=r"no loader is named.*Guard\(loader=loader"):
        run_loop(another, tmp_path, unnamed=True)


@pytest.mark.parametrize("make", [None, lambda: mx_data.ResumableLoader(Pictures(), 2, shuffle=True)])
def test_an_iterator_made_before_the_guard(tmp_path: Path, make: Any) -> None:
    with pytest.raises(UnmanagedStateError, match="made before the guard was entered"):
        run_loop(from_before, tmp_path, make=make, iterate_before=True)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([(torch.zeros(2, 4), torch.zeros(2))], "loader is a list.*from_loader"),
        (iter([1]), "can be gone through only once"),
    ],
)
def test_what_has_no_position_is_refused_with_the_line_to_write(tmp_path: Path, loader: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_loop(another, tmp_path, make=lambda: loader)


# --- risks ---


def several_steps_a_batch(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(1):
        for batch in loader:
            run.train(batch)
            run.train(batch)


def left_early(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for batch in itertools.islice(loader, 3):
            run.train(batch)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (several_steps_a_batch, "without a batch"),
        (left_early, "right after a step, with batches left"),
        (cycled, "keeps its batches, as itertools.cycle does"),
    ],
)
def test_what_may_differ_is_one_warning(form: Callable[[Run, Any], None], words: str, tmp_path: Path) -> None:
    run, _ = run_loop(form, tmp_path)
    assert sum(words in note for note in run.guard._unmanaged.notes) == 1, run.guard._unmanaged.notes


def ahead_of_a_sum(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        held = None
        for x, index in loader:
            scaled = ((x - 0.5) / 2).float()
            if held is not None:
                run.train(held)
            held = scaled, index
        run.train(held)


def test_what_is_made_of_a_batch_may_be_held_for_the_next_step(tmp_path: Path) -> None:
    stop_and_resume(ahead_of_a_sum, tmp_path, 7)


# --- exact, and without a word ---


def evaluates(run: Run, loader: Any) -> None:
    """With loaders of its own and with the training's, in all the free places."""
    held_out = DataLoader(points(), batch_size=4, shuffle=True)
    list(held_out)
    ours = mx_data.from_function(drawn, 2)
    for _ in run.guard.epochs(EPOCHS):
        for batch in loader:
            if run.guard.position.step % 4 == 2:
                with run.guard.outside_step():
                    assert len(list(held_out)) == 2
                    assert len(list(loader)) == BATCHES
            list(held_out)  # in every step: part of it
            run.train(batch)
            list(ours)
        list(held_out)
        list(ours)


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


def plain(run: Run, loader: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for batch in loader:
            run.train(batch)


def epochs_of_steps(run: Run, loader: Any) -> None:
    """An epoch is a number of steps (FixMatch), and the loader starts over in the middle of one."""
    held_out = DataLoader(points(), batch_size=4, shuffle=True)
    batches = iter(loader)
    for _ in run.guard.epochs(EPOCHS):
        for _ in run.guard.steps(BATCHES - 1):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            run.train(batch)
        list(held_out)


def skips(run: Run, loader: Any) -> None:
    """Leaves out bad batches, and leaves an epoch before the step."""
    for _ in run.guard.epochs(EPOCHS):
        for batch in loader:
            if batch[1].sum() % 4 == 1 and run.guard.position.step > 1:
                continue
            if run.guard.position.step_in_epoch >= 3:
                break
            run.train(batch)


def peeks(run: Run, loader: Any) -> None:
    next(iter(loader))
    plain(run, loader)


def silent(run: Run) -> bool:
    return run.guard._unmanaged.notes == ()


@pytest.mark.few(3)
@pytest.mark.parametrize("form", [evaluates, epochs_of_steps, skips, peeks])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_false_alarm(form: Callable[[Run, Any], None], workers: int, tmp_path: Path) -> None:
    run, _ = run_loop(form, tmp_path / "silent", workers=workers)
    assert silent(run), run.guard._unmanaged.notes
    stop_and_resume(form, tmp_path, 3, workers=workers)
    if form is not skips:
        stop_and_resume(form, tmp_path / "later", 7, workers=workers)


def test_a_data_set_may_use_data_loaders(tmp_path: Path) -> None:
    run, _ = run_loop(plain, tmp_path, make=lambda: DataLoader(Nested(), batch_size=2, shuffle=True))
    assert silent(run)


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.randint(100, (3,))
    return torch.randn(3, 4) + index[:, None], index


def of_ours(run: Run, loader: Any) -> None:
    batches = mx_data.from_function(drawn)
    for _ in run.guard.steps(6):
        run.train(next(iter(batches)))  # it goes on


def test_a_loader_of_ours_that_is_not_named_is_refused(tmp_path: Path) -> None:
    words = r"a FunctionLoader of drawn\(\), and no loader is named.*write Guard\(loader=loader, ...\)"
    with pytest.raises(UnmanagedStateError, match=words):
        run_loop(of_ours, tmp_path, unnamed=True)


@pytest.mark.parametrize("stop", [4, 5])
def test_a_loader_for_a_function(stop: int, tmp_path: Path) -> None:
    stop_and_resume(plain, tmp_path, stop, make=lambda: mx_data.from_function(drawn, BATCHES))


# --- loaders of different lengths side by side ---


def two_lengths() -> list[DataLoader[Any]]:
    return [DataLoader(Pictures(size), batch_size=2, shuffle=True) for size in (2 * BATCHES, 3 * BATCHES)]


def in_parallel(run: Run, loaders: Any) -> None:
    for _ in run.guard.epochs(EPOCHS):
        for batch, other in zip(*loaders, strict=False):
            (run.forward(batch) + run.forward(other)).backward()
            run.update()


@pytest.mark.parametrize("stop", [4, 5, 6, 10])
def test_a_longer_loader_is_left_where_the_shorter_one_ends(stop: int, tmp_path: Path) -> None:
    run, _ = run_loop(in_parallel, tmp_path / "silent", make=two_lengths)
    assert silent(run), run.guard._unmanaged.notes
    stop_and_resume(in_parallel, tmp_path, stop, make=two_lengths)


def test_a_cycle_beside_a_longer_loader_is_told(tmp_path: Path) -> None:
    """As ``zip(unlabelled, itertools.cycle(labelled))``: the short one's later batches are no loader's."""
    many, few = DataLoader(points(20), batch_size=2), DataLoader(points(6), batch_size=2, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model=model, optimizer=optimizer, loader=[many, few], directory=tmp_path)
    with guard:
        again = itertools.cycle(few)
        for _ in guard.epochs(2):
            for x, _ in many:
                model(torch.cat([x, next(again)[0]])).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                guard.step_end()
    (note,) = guard._unmanaged.notes
    assert "after the end of an epoch of loader_1, and the program keeps its batches" in note


def test_batches_of_an_evaluation_may_be_kept(tmp_path: Path) -> None:
    def evaluates_on_a_list(run: Run, loaders: Any) -> None:
        held_out: list[Any] = []
        for _ in run.guard.epochs(EPOCHS):
            for batch in loaders[0]:
                run.train(batch)
            held_out = held_out or list(loaders[1])

    run, _ = run_loop(evaluates_on_a_list, tmp_path, make=two_lengths)
    assert silent(run), run.guard._unmanaged.notes


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
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.given += 1
                self.dataset.advance()  # type: ignore[attr-defined]
                yield batch + self.epoch * 100

    def state_dict(self) -> dict[str, int]:
        if self.loaded is not None:
            self.epoch = 0
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state
        self.epoch, self.given = state["epoch"], state["given"]


class Numbered(Dataset[Any]):
    place = 0

    def advance(self) -> None:
        self.place += 1

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))

    def state_dict(self, num_samples: int) -> dict[str, int]:
        return {"samples": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def streamed(directory: Path, stop: int, workers: int = 0) -> list[Any]:
    loader, net = Streaming(workers), nn.Linear(1, 1)
    found: list[Any] = []
    guard = Guard(model=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), loader=loader, directory=directory)
    with guard:
        for _ in guard.epochs(3):
            for batch in loader:
                found.append(batch.tolist())
                if guard.step + 1 == stop:
                    stop_and_wait(SimpleNamespace(guard=guard))  # type: ignore[arg-type]
                guard.step_end()
    return found


@pytest.mark.parametrize(("stop", "workers"), [(3, 0), (10, 0), (7, 1)])
def test_a_loader_with_workers_and_a_state_of_its_own(
    stop: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-epoch, and behind the last batch of one."""
    monkeypatch.setattr(followed_loader, "_MOVE_ON", ("tests",))
    whole = streamed(tmp_path / "whole", 0, workers)
    assert len(whole) == 15
    with pytest.raises(GracefulExit):
        streamed(tmp_path / "cut", stop, workers)
    assert streamed(tmp_path / "cut", 0, workers) == whole[stop:]


def test_a_file_of_an_earlier_version_or_of_another_loader() -> None:
    """The first had the library's state as it is."""
    loader = Streaming(0)
    own = followed_loader.SelfPositionedLoader(loader)
    own.load_state_dict({"epoch": 1, "given": 2})
    assert own.state_dict() == {"own": {"epoch": 1, "given": 2}, "batches": 0}
    assert next(iter(loader)).tolist() == [108.0, 109.0, 110.0, 111.0]
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
