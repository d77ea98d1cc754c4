"""What a program sets on its loader or its samplers acts as with torch, and goes on in a resumed run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mindx_elastic import Guard
from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import GracefulExit, UsageError
from tests.guarded import stop_and_wait

SAMPLES, EPOCHS = 48, 4
DATA, TWICE = TensorDataset(torch.arange(SAMPLES)), TensorDataset(torch.arange(2 * SAMPLES))
Batches = list[list[int]]


pytestmark = pytest.mark.usefixtures("clean")


class Grouped(Sampler[list[int]]):
    """A batch sampler as programs write them."""

    def __init__(self) -> None:
        self.batch_size = 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        while order:
            batch, order = order[: self.batch_size], order[self.batch_size :]
            yield batch


def adopted(workers: int = 0, drop_last: bool = False) -> DataLoader[Any]:
    ahead = 3 if workers else None
    return DataLoader(DATA, 4, shuffle=True, num_workers=workers, drop_last=drop_last, prefetch_factor=ahead)


def with_workers() -> DataLoader[Any]:
    return adopted(workers=2)


def dropping() -> DataLoader[Any]:
    return adopted(drop_last=True)


def in_order() -> DataLoader[Any]:
    return DataLoader(DATA, 4)


def replayed() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(SAMPLES)))


def replayed_with_workers() -> DataLoader[Any]:
    sampler = BatchSampler(SubsetRandomSampler(range(SAMPLES)), 4, drop_last=False)
    return DataLoader(DATA, batch_sampler=sampler, num_workers=2, prefetch_factor=3)


def own_batches() -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=Grouped())


def resumable() -> DataLoader[Any]:
    return ResumableLoader(DATA, 4, shuffle=True)


def of_two_ranks() -> DataLoader[Any]:
    return DataLoader(TWICE, 4, sampler=DistributedSampler(TWICE, 2, 1))


Make = Callable[[], DataLoader[Any]]
Change = Callable[[Any, int, int], None]
"""Gets the loader, the epoch and the number of the batch in it; 0: the epoch is over."""


def after_an_epoch(loader: Any, epoch: int, batch: int) -> None:
    if not batch and epoch <= 2:
        loader.batch_sampler.batch_size *= 2


def in_mid_epoch(loader: Any, epoch: int, batch: int) -> None:
    """Twice in one epoch."""
    if epoch == 2 and batch in (2, 3):
        loader.batch_sampler.batch_size += 2


def run(make: Make, change: Change, directory: Path | None, stop: int = 0) -> Batches:
    """The batches that the steps had. Without a directory: no guard is there."""
    torch.manual_seed(0)
    loader, net = make(), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    found: Batches = []
    if directory is None:
        for epoch in range(1, EPOCHS + 1):
            for number, (x,) in enumerate(loader, 1):
                found.append(x.tolist())
                change(loader, epoch, number)
            change(loader, epoch, 0)
        return found
    guard = Guard(model=net, optimizer=optimizer, loader=loader, directory=directory)
    with guard:
        for epoch in guard.epochs(EPOCHS):
            for number, (x,) in guard.enumerate(loader, 1):
                found.append(x.tolist())
                change(loader, epoch, number)
                if guard.step + 1 == stop:
                    stop_and_wait(SimpleNamespace(guard=guard))  # type: ignore[arg-type]
                guard.step_end()
            change(loader, epoch, 0)
    return found


def stopped(make: Make, change: Change, directory: Path, stop: int) -> int:
    with pytest.raises(GracefulExit):
        run(make, change, directory, stop)
    return stop


STOCK: list[Make] = [with_workers, dropping, of_two_ranks, adopted, in_order]
OTHERS: list[Make] = [replayed, own_batches, resumable, replayed_with_workers]
CASES = [
    (in_mid_epoch, with_workers, 16),  # batches of three sizes are fetched and not used
    (in_mid_epoch, replayed_with_workers, 18),
    (in_mid_epoch, own_batches, 15),
    (in_mid_epoch, resumable, 18),
    (after_an_epoch, resumable, 18),
    (after_an_epoch, dropping, 15),
    (after_an_epoch, of_two_ranks, 15),
    (in_mid_epoch, adopted, 14),
    *itertools.product((in_mid_epoch, after_an_epoch), [*STOCK, *OTHERS], (9, 13, 14, 15, 16, 18)),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("change", "make"), [*itertools.product((in_mid_epoch, after_an_epoch), STOCK)])
def test_the_batch_size_acts_as_in_torch(make: Make, change: Change, tmp_path: Path) -> None:
    expected = [len(batch) for batch in run(make, change, None)]
    assert len(set(expected)) > 1
    assert [len(batch) for batch in run(make, change, tmp_path)] == expected


@pytest.mark.few(8)
@pytest.mark.parametrize(("change", "make", "stop"), CASES)
def test_and_is_kept(make: Make, change: Change, stop: int, tmp_path: Path) -> None:
    expected = run(make, change, tmp_path / "whole")
    stopped(make, change, tmp_path / "cut", stop)
    assert run(make, change, tmp_path / "cut") == expected[stop:]


def in_turn(loader: Any, epoch: int, batch: int) -> None:
    if not batch and epoch == 2:
        loader.sampler.shuffle = False


def test_a_sampler_that_shuffles_no_more(tmp_path: Path) -> None:
    expected = run(of_two_ranks, in_turn, tmp_path / "whole")
    assert sorted(expected[-1]) == expected[-1]
    stopped(of_two_ranks, in_turn, tmp_path / "cut", 15)
    assert run(of_two_ranks, in_turn, tmp_path / "cut") == expected[15:]


class Chosen(Sampler[int]):
    """A sampler as programs write them, with what a curriculum sets on it."""

    def __init__(self) -> None:
        self.pool, self.chances, self.order = list(range(80)), torch.ones(SAMPLES), np.arange(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        drawn = torch.multinomial(self.chances, SAMPLES, replacement=True).tolist()
        return (self.pool[self.order[number]] % SAMPLES for number in drawn)

    def __len__(self) -> int:
        return len(self.pool) - 32


def weighted() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))


def of_a_hundred() -> DataLoader[Any]:
    return DataLoader(TWICE, 4, sampler=SubsetRandomSampler(list(range(2 * SAMPLES))))


def chosen() -> DataLoader[Any]:
    return DataLoader(DATA, 4, sampler=Chosen())


def from_the_second_epoch(change: Callable[[Any], None]) -> Change:
    """Once: a resumed run does not come by it again."""
    return lambda loader, epoch, batch: change(loader.sampler) if not batch and epoch == 1 else None


def other_weights(sampler: Any) -> None:
    sampler.weights = torch.arange(float(SAMPLES))


def weights_in_place(sampler: Any) -> None:
    sampler.weights[: SAMPLES // 2] = 0


def fewer_indices(sampler: Any) -> None:
    sampler.indices = list(range(SAMPLES, SAMPLES + 40))


def of_its_own(sampler: Any) -> None:
    sampler.pool = list(range(79, -1, -1))
    sampler.order = sampler.order[::-1].copy()
    sampler.chances[:9] = 0


@pytest.mark.parametrize(
    ("make", "change", "stop"),
    [
        (weighted, other_weights, 15),
        (weighted, weights_in_place, 27),
        (of_a_hundred, fewer_indices, 27),
        (chosen, of_its_own, 15),
    ],
)
def test_what_says_which_samples_come_is_kept(
    make: Make, change: Callable[[Any], None], stop: int, tmp_path: Path
) -> None:
    """Lists, arrays and tensors, of more items than other settings may have."""
    once = from_the_second_epoch(change)
    expected = run(make, once, tmp_path / "whole")
    stopped(make, once, tmp_path / "cut", stop)
    assert run(make, once, tmp_path / "cut") == expected[stop:]


def with_replacement(loader: Any, epoch: int, batch: int) -> None:
    loader.sampler.replacement = True


def test_an_order_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make the loader with that sampler before the guard"):
        run(adopted, with_replacement, tmp_path)
