"""Loops that fetch ahead, stopped by a real signal in all places of an epoch: no batch is lost and none comes twice."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from mindx_elastic.errors import MismatchError, UsageError
from mindx_elastic.guard.loops.loaders import Loaders
from tests.capture.round_trip import assert_same
from tests.guard.program import BATCHES, EPOCHS, LAST, Loop, Program, check, draw, run

pytestmark = pytest.mark.usefixtures("clean")


class Pictures(Dataset[Any]):
    """Sample i is i and noise from every global stream."""

    def __init__(self, size: int = 2 * BATCHES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return torch.arange(4.0) * index / 10 + 0.1 * noise, index


def shuffled(size: int = 2 * BATCHES, **options: Any) -> DataLoader[Any]:
    return DataLoader(Pictures(size), batch_size=2, shuffle=True, **options)


def of(make: Callable[[], Any] = shuffled) -> Callable[[], dict[str, Any]]:
    return lambda: {"loader": make()}


def train(p: Program, batch: Any) -> None:
    p.log.append(batch[1].tolist())
    p.train(batch)


def plain(p: Program) -> None:
    for _ in p.guard.epochs(EPOCHS):
        for batch in p.loader:
            train(p, batch)


def nano(p: Program) -> None:
    """nanoGPT: primed before the loop, fetched after the forward; the iterator is made again at an epoch's end."""
    it = iter(p.loader)

    def fetch() -> Any:
        nonlocal it
        try:
            return next(it)
        except StopIteration:
            it = iter(p.loader)
            return next(it)

    batch = fetch()
    while p.guard.position.step < LAST:
        p.log.append(batch[1].tolist())
        p.backward(*batch)
        batch = fetch()
        p.update()
        p.guard.step_end()


def one_ahead(loader: Any) -> Iterator[Any]:
    """timm's: a generator that is one batch ahead of what it yields, and that takes the first one for granted."""
    first = True
    held: Any
    for following in loader:
        if not first:
            yield held  # noqa: F821
        first = False
        held = following
    yield held


def ahead_with_a_tail(p: Program) -> None:
    for epoch in p.guard.epochs(EPOCHS):
        batches = iter(p.loader)
        ahead = next(batches, None)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            train(p, batch)
        p.scheduler.step()
        p.log.append((epoch, batch[1].tolist()))


@pytest.mark.parametrize(("size", "last"), [(2 * BATCHES, LAST), (2, EPOCHS)])
def test_the_code_after_an_epoch_that_is_fetched_ahead_runs_once(size: int, last: int, tmp_path: Path) -> None:
    make = of(lambda: shuffled(size))
    check(ahead_with_a_tail, tmp_path, make=make)
    for folder in ("whole", f"stop_{last}"):
        again, _ = run(ahead_with_a_tail, tmp_path / folder, **make())
        assert again.guard.resumed_from_step == last and again.log == []


def test_with_several_ranks_a_loop_that_is_ahead_has_a_boundary_at_the_end_of_the_last_epoch_only(
    tmp_path: Path,
) -> None:
    """A rank that is killed in an earlier one's tail could not go on at that boundary bit for bit."""
    boundaries = []

    def loop(p: Program) -> None:
        p.guard._loops.tail.is_alone = False
        for _ in p.guard.epochs(EPOCHS):
            boundaries.append(p.guard._collector.position.step)
            for batch in one_ahead(p.loader):
                train(p, batch)

    program, _ = run(loop, tmp_path, **of()())
    boundaries.append(program.guard._collector.position.step)
    assert boundaries == [0, BATCHES - 1, 2 * BATCHES - 1, LAST]


def test_an_early_stop_of_a_loop_that_is_ahead_is_not_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    streams = []

    def stops_early(p: Program) -> None:
        draw()
        for epoch in p.guard.epochs(EPOCHS):
            for batch in one_ahead(p.loader):
                train(p, batch)
            p.log.append(batch[1].tolist())
            if epoch == 2:
                break
        streams.append(torch.get_rng_state())

    whole, expected = run(stops_early, tmp_path, **of()())
    at_end = torch.get_rng_state()
    again, result = run(stops_early, tmp_path, **of()())
    assert again.guard.resumed_from_step == 2 * BATCHES == whole.guard.step and again.log == []
    assert_same(result["weights"], expected["weights"])
    assert torch.equal(streams[1], at_end)
    assert "give a larger one" not in caplog.text


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Pictures(), batch_size=2, sampler=Drawing()),
        lambda: DataLoader(DrawingStream(), batch_size=2),
    ],
)
def test_a_replayed_loader(make: Callable[[], Any], tmp_path: Path) -> None:
    """Its sampler or data set draws from the global streams in mid-epoch, some batches before they are used."""
    check(nano, tmp_path, [1, BATCHES, BATCHES + 1], make=of(make))


def one_of_each_pass(p: Program) -> None:
    for _ in p.guard.steps(LAST):
        train(p, next(iter(p.loader)))


def some_of_each_pass(p: Program) -> None:
    for epoch in p.guard.epochs(EPOCHS):
        for number, batch in enumerate(p.loader):
            if number == 2:
                break
            p.backward(*batch)
        p.update()
        p.guard.step_end()
        p.scheduler.step()
        p.log.append((epoch, batch[1].tolist()))


@pytest.mark.parametrize("loop", [one_of_each_pass, some_of_each_pass])
@pytest.mark.parametrize("make", [shuffled, lambda: DataLoader(Pictures(), batch_size=2, sampler=Drawing())])
def test_a_loop_that_gives_up_each_pass_before_its_step_ends(
    loop: Loop, make: Callable[[], Any], tmp_path: Path
) -> None:
    check(loop, tmp_path, [1, 2], make=of(make))


def at_their_own_pace(p: Program) -> None:
    """Labelled data by epochs; unlabelled data one batch ahead, started over wherever it ends."""
    labelled, unlabelled = p.loader
    others = iter(unlabelled)

    def fetch() -> Any:
        nonlocal others
        try:
            return next(others)
        except StopIteration:
            others = iter(unlabelled)
            return next(others)

    other = fetch()
    for _ in p.guard.epochs(EPOCHS):
        for batch in labelled:
            p.log.append((batch[1].tolist(), other[1].tolist()))
            p.backward(*batch)
            p.backward(*other)
            other = fetch()
            p.update()
            p.guard.step_end()


def test_two_loaders(tmp_path: Path) -> None:
    check(at_their_own_pace, tmp_path, [2, 4, BATCHES, 8, 12], make=of(lambda: [shuffled(), shuffled(6)]))


# --- adoption ---


def test_a_stock_loader_is_adopted_and_given_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mindx_elastic")
    loader = shuffled()
    seen: list[Any] = []

    def look(p: Program) -> None:
        seen.extend([type(loader) is DataLoader, isinstance(loader, DataLoader), repr(type(loader)), len(loader)])
        copied = pickle.loads(pickle.dumps(loader))
        seen.extend([type(copied) is DataLoader, p.guard.loader.state_dict()["batch"]])
        plain(p)

    run(look, tmp_path, loader=loader)
    assert seen == [False, True, repr(DataLoader), BATCHES, True, 0]
    assert type(loader) is DataLoader
    assert not [name for name in vars(loader) if name.startswith("_mindx")]
    assert caplog.text.count("is shuffled in each epoch") == 1, "one line says how the order arises"


def test_the_order_follows_from_torchs_seed(tmp_path: Path) -> None:
    runs = [run(plain, tmp_path / str(n), loader=shuffled(), seed=seed)[0] for n, seed in enumerate((1, 1, 2))]
    assert runs[0].log == runs[1].log
    assert runs[0].log != runs[2].log


def test_a_persistent_loader_and_what_is_set_on_it_later(tmp_path: Path) -> None:
    def make() -> Any:
        loader = shuffled(num_workers=1, persistent_workers=True)
        loader.collate_fn = shifted
        return loader

    whole = check(plain, tmp_path, [2, BATCHES], make=of(make))
    assert min(map(min, whole.log)) == 100


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
    make = of(lambda: _Stateful(Pictures(), batch_size=2, shuffle=True, num_workers=workers))
    check(nano, tmp_path, [2, BATCHES], make=make)


def test_a_position_that_torchdata_wrote_is_refused() -> None:
    """Version 0.1 kept such a loader's own state, which does not say what a loop fetches ahead."""
    loaders = Loaders(_Stateful(Pictures(), batch_size=2), None)
    with ExitStack() as stack:
        loaders.begin(stack, is_again=False)
        with pytest.raises(MismatchError, match="written by another kind of loader"):
            loaders.argument.load_state_dict({"_num_yielded": 3})


class _Stream(DrawingStream):
    pass


_Stream.__name__, _Stream.__module__ = "IterableDataset", "datasets.iterable_dataset"


def test_a_stream_by_itself_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"shuffle buffer.*from_loader"):
        run(plain, tmp_path, loader=_Stream())


# --- loaders that come within the epochs of the first one ---


@pytest.mark.few(3)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("trains", "breaks"), [(False, False), (False, True), (True, False)])
def test_one_that_was_at_its_end_begins_anew(
    trains: bool, breaks: bool, every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the evaluation's loader does, stopped in the next epoch: it had come empty once. Of an epoch that is resumed
    behind its training the second loader comes as a whole."""

    def loop(p: Program) -> None:
        first, second = p.loader
        for epoch in p.guard.epochs(4):
            for batch in first:
                train(p, batch)
            if epoch % every:
                continue
            total = 0
            for number, batch in enumerate(second):
                if breaks and number == 3:
                    break
                total += int(batch[1].sum())
                if trains:
                    p.train(batch)
            if not trains:
                p.log.append(total)

    stops = (4, 5, 7, 9, 10) if trains else (4, 5, 6, 8, 10)
    check(loop, tmp_path, stops, make=of(lambda: [shuffled(6), shuffled(8)]))
    assert "fetched ahead" not in caplog.text
