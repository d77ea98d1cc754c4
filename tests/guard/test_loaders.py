"""Loops that fetch ahead, stopped by a real signal at every boundary: no batch is lost and none comes twice."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from mindx_elastic import Guard
from mindx_elastic.errors import GracefulExit, MismatchError, UsageError
from mindx_elastic.guard.loops.loaders import Loaders
from tests.guard.loader_loops import (
    BATCHES,
    FORMS,
    TAKES_A_BATCH_FOR_GRANTED,
    Pictures,
    Run,
    at_their_own_pace,
    in_two_phases,
    run_loop,
)
from tests.guarded import stop_and_wait

pytestmark = pytest.mark.usefixtures("clean")


def check(form: str, directory: Path, stops: list[int] | None = None, **options: Any) -> None:
    loop = FORMS[form]
    whole, weights = run_loop(loop, directory / "whole", **options)
    last = len(whole.steps) - (form in TAKES_A_BATCH_FOR_GRANTED)
    for stop in stops or range(1, last + 1):
        at = directory / str(stop)
        with pytest.raises(GracefulExit) as caught:
            run_loop(loop, at, stop_at=stop, **options)
        first = caught.value.run  # type: ignore[attr-defined]
        second, resumed = run_loop(loop, at, **options)
        assert first.steps + second.steps == whole.steps, f"{form}, stopped at {stop}"
        assert all(torch.equal(weights[name], resumed[name]) for name in weights), f"{form}, stopped at {stop}"


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_boundary(form: str, tmp_path: Path) -> None:
    check(form, tmp_path)


_FURTHER = ["nvidia", "timm", "three_ahead", "accumulated_ahead"]


@pytest.mark.parametrize("form", ["nano", *(pytest.param(form, marks=pytest.mark.drill) for form in _FURTHER)])
def test_with_workers(form: str, tmp_path: Path) -> None:
    """At the first boundary, in the middle, at an epoch's end and at the next one's begin."""
    last = 3 if form == "accumulated_ahead" else BATCHES
    check(form, tmp_path, [1, 2, last, last + 1], workers=2)


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["nano", "endless", "timm", "three_ahead"])
@pytest.mark.parametrize("kind", ["sampler", "stream", "running"])
def test_a_replayed_loader(form: str, kind: str, tmp_path: Path) -> None:
    """Its sampler or data set draws from the global streams in mid-epoch, some batches before they are used."""
    loaders: dict[str, Callable[[], Any]] = {
        "sampler": lambda: DataLoader(Pictures(), batch_size=2, sampler=Drawing()),
        "stream": lambda: DataLoader(DrawingStream(), batch_size=2),
        "running": Drawn,
    }
    check(form, tmp_path, [1, 3, BATCHES, BATCHES + 1, 2 * BATCHES - 1], make=loaders[kind])


class Drawing(Sampler[int]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield random.randrange(2 * BATCHES) + int(torch.randint(1, ()))


class DrawingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        pictures = Pictures()
        for _ in range(2 * BATCHES):
            yield pictures[int(torch.randint(len(pictures), ()))]


class Drawn(DataLoader[Any]):
    """A subclass that decides by itself what a batch is."""

    def __init__(self) -> None:
        super().__init__(Pictures(), batch_size=2, shuffle=True)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, index in super().__iter__():
            assert len(self) == BATCHES
            yield x + torch.rand(()), index


@pytest.mark.parametrize("form", [at_their_own_pace, in_two_phases])
def test_two_loaders(form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return [DataLoader(Pictures(), 2, shuffle=True), DataLoader(Pictures(6), 2, shuffle=True)]

    monkeypatch.setitem(FORMS, "two", form)
    check("two", tmp_path, [2, 4, BATCHES, 8, 12], make=make)


# --- adoption ---


def test_a_stock_loader_is_adopted_and_given_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mindx_elastic")
    loader = DataLoader(Pictures(), batch_size=2, shuffle=True)
    seen: list[Any] = []

    def look(run: Run, loader: Any) -> None:
        seen.extend([type(loader) is DataLoader, isinstance(loader, DataLoader), repr(type(loader)), len(loader)])
        copied = pickle.loads(pickle.dumps(loader))
        seen.extend([type(copied) is DataLoader, run.guard.loader.state_dict()["batch"]])
        FORMS["plain"](run, loader)

    run_loop(look, tmp_path, make=lambda: loader)
    assert seen == [False, True, repr(DataLoader), BATCHES, True, 0]
    assert type(loader) is DataLoader
    assert not [name for name in vars(loader) if name.startswith("_mindx")]
    said = [record.getMessage() for record in caplog.records if "is shuffled in each epoch" in record.getMessage()]
    assert len(said) == 1, "one line says how the order arises"


def test_the_order_follows_from_torchs_seed(tmp_path: Path) -> None:
    def seeded(seed: int) -> Any:
        def make() -> Any:
            torch.manual_seed(seed)
            return DataLoader(Pictures(), batch_size=2, shuffle=True)

        return make

    runs = [run_loop(FORMS["plain"], tmp_path / str(n), make=seeded(seed))[0] for n, seed in enumerate((1, 1, 2))]
    assert runs[0].steps == runs[1].steps
    assert runs[0].steps != runs[2].steps


def test_a_persistent_loader_and_what_is_set_on_it_later(tmp_path: Path) -> None:
    def make() -> Any:
        loader = DataLoader(Pictures(), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
        loader.collate_fn = shifted
        return loader

    check("plain", tmp_path, [2, BATCHES], make=make)
    with_it, _ = run_loop(FORMS["plain"], tmp_path / "shifted", make=make)
    assert min(min(batch) for _, batches in with_it.steps for batch in batches) == 100


def shifted(samples: list[Any]) -> Any:
    x, index = torch.utils.data.default_collate(samples)
    return x, index + 100


# --- torchdata and Hugging Face's datasets, and stand-ins with their protocols ---


class _Stateful(DataLoader[Any]):
    """As torchdata's: an ``__iter__`` of its own, which keeps the iterator, and a state that holds what was fetched."""

    def __iter__(self) -> Any:
        self._own = self._get_iterator()
        return self._own

    def state_dict(self) -> dict[str, Any]:
        return {"_num_yielded": self._own._num_yielded if hasattr(self, "_own") else 0}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = dict(state)


_Stateful.__name__, _Stateful.__module__ = "StatefulDataLoader", "torchdata.stateful_dataloader.stateful_dataloader"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_torchdatas_protocol(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return _Stateful(Pictures(), batch_size=2, shuffle=True, num_workers=workers)

    check("nano", tmp_path, [2, BATCHES], make=make)


def test_a_position_that_torchdata_wrote_is_refused() -> None:
    """Version 0.1 kept such a loader's own state, which does not say what a loop fetches ahead."""
    loaders = Loaders(_Stateful(Pictures(), batch_size=2), None)
    with ExitStack() as stack:
        loaders.begin(stack, is_again=False)
        with pytest.raises(MismatchError, match="written by another kind of loader"):
            loaders.argument.load_state_dict({"_num_yielded": 3})


class _Stream(IterableDataset[Any]):
    """As Hugging Face's: the order follows from seed and epoch; the state is the place behind the shuffle buffer."""

    def __init__(self) -> None:
        self._epoch = self._place = 0
        self._starting: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place, "epoch": self._epoch}

    def load_state_dict(self, state: Any) -> None:
        self._starting = dict(state)

    def __iter__(self) -> Iterator[Any]:
        starting, draw, held = self._starting, random.Random(100 + self._epoch), []
        self._place = starting["place"] if starting is not None and starting["epoch"] == self._epoch else 0
        pictures = Pictures()
        for index in range(self._place, len(pictures)):
            self._place = index + 1
            held.append(index)
            if len(held) == 6:
                yield pictures[held.pop(draw.randrange(6))]
        draw.shuffle(held)
        yield from (pictures[index] for index in held)


_Stream.__name__, _Stream.__module__ = "IterableDataset", "datasets.iterable_dataset"


@pytest.mark.drill
@pytest.mark.parametrize("form", ["plain", "nano"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_with_a_shuffle_buffer(form: str, workers: int, tmp_path: Path) -> None:
    stops = [3, BATCHES, BATCHES + 2]
    check(form, tmp_path, stops, make=lambda: DataLoader(_Stream(), batch_size=2, num_workers=workers))


def test_a_stream_by_itself_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"shuffle buffer.*from_loader"):
        run_loop(FORMS["plain"], tmp_path, make=_Stream)


# --- loaders that come within the epochs of the first one ---


class Within:
    """Two named loaders: each epoch goes through the first one, then through the second one."""

    def __init__(self, directory: Path, *, trains: bool, breaks: bool, every: int) -> None:
        torch.manual_seed(0)
        self.trains, self.breaks, self.every = trains, breaks, every
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.first = DataLoader(TensorDataset(torch.randn(12, 4)), 4, shuffle=True)
        self.second = DataLoader(TensorDataset(torch.randn(8, 4)), 2, shuffle=True)
        self.guard = Guard(
            model=self.net, optimizer=self.optimizer, loader=[self.first, self.second], directory=directory
        )
        self.seen: list[float] = []

    def step(self, x: torch.Tensor, stop: int) -> None:
        self.optimizer.zero_grad()
        self.net(x).square().mean().backward()
        self.optimizer.step()
        if self.guard.step + 1 == stop:
            stop_and_wait(SimpleNamespace(guard=self.guard))  # type: ignore[arg-type]
        self.guard.step_end()

    def run(self, stop: int = 0) -> list[float]:
        with self.guard as guard:
            for epoch in guard.epochs(4):
                for (x,) in self.first:
                    self.step(x, stop)
                if epoch % self.every:
                    continue
                total = 0.0
                for number, (x,) in enumerate(self.second):
                    if self.breaks and number == 3:
                        break
                    total += float(x.sum())
                    if self.trains:
                        self.step(x, stop)
                if not self.trains:
                    self.seen.append(total)
        return self.seen


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("trains", "breaks"), [(False, False), (False, True), (True, False)])
def test_one_that_was_at_its_end_begins_anew(
    trains: bool, breaks: bool, every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the evaluation's loader does, stopped in the next epoch: it had come empty once."""
    settings: dict[str, Any] = {"trains": trains, "breaks": breaks, "every": every}
    whole = Within(tmp_path / "whole", **settings)
    totals = whole.run()
    for stop in (4, 5, 7, 9, 10) if trains else (4, 5, 6, 8, 10):
        at = tmp_path / str(stop)
        first = Within(at, **settings)
        with pytest.raises(GracefulExit):
            first.run(stop)
        second = Within(at, **settings)
        # Of an epoch that is resumed behind its training the second loader comes as a whole.
        assert first.seen + second.run() == totals
        assert torch.equal(whole.net.weight, second.net.weight)
    assert "fetched ahead" not in caplog.text
