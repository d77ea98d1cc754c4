"""What a program sets on its loader or its samplers acts as with torch, and goes on in a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import UsageError
from tests.guard.program import Loop, Program, check, run, stopped
from tests.guard.test_loaders import of

SAMPLES, EPOCHS = 48, 4


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * size).reshape(size, 4) / size, torch.arange(size))


DATA, TWICE = numbers(SAMPLES), numbers(2 * SAMPLES)

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


def adopted(drop_last: bool = False) -> DataLoader[Any]:
    return DataLoader(DATA, 4, shuffle=True, drop_last=drop_last)


def dropping() -> DataLoader[Any]:
    return adopted(drop_last=True)


def replayed_with_workers() -> DataLoader[Any]:
    sampler = BatchSampler(SubsetRandomSampler(range(SAMPLES)), 4, drop_last=False)
    return DataLoader(DATA, batch_sampler=sampler, num_workers=2, prefetch_factor=3)


def own_batches() -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=Grouped())


def resumable() -> DataLoader[Any]:
    return ResumableLoader(DATA, 4, shuffle=True)


Make = Callable[[], DataLoader[Any]]
Change = Callable[[Any, int, int], None]
"""Gets the loader, the epoch and the number of the batch in it; 0: the epoch is over."""


def after_an_epoch(loader: Any, epoch: int, batch: int) -> None:
    if not batch and epoch <= 2:
        loader.batch_sampler.batch_size *= 2


def without_the_rest(loader: Any, epoch: int, batch: int) -> None:
    loader.batch_sampler.drop_last ^= epoch == 2 and batch == 1


def in_mid_epoch(loader: Any, epoch: int, batch: int) -> None:
    if epoch == 2 and batch == 2:
        loader.batch_sampler.batch_size += 2


def loop_with(change: Change) -> Loop:
    """It logs the samples of each step."""

    def loop(p: Program) -> None:
        for epoch in p.guard.epochs(EPOCHS):
            for number, batch in p.guard.enumerate(p.loader, 1):
                p.log.append(batch[1].tolist())
                change(p.loader, epoch, number)
                p.train(batch)
            change(p.loader, epoch, 0)

    return loop


@pytest.mark.parametrize("make", [dropping, resumable, replayed_with_workers])
@pytest.mark.parametrize(("change", "steps"), [(after_an_epoch, 12), (in_mid_epoch, 14), (without_the_rest, 13)])
def test_a_batch_size_that_is_set_is_refused(make: Make, change: Change, steps: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"set from \(4.*make a loader for each.*the saved steps go on"):
        run(loop_with(change), tmp_path, loader=make())
    p, _ = run(loop_with(lambda *_: None), tmp_path, loader=make())
    assert p.guard.resumed_from_step == steps and len(p.log[-1]) == 4, "mended, it goes on"


def test_a_sampler_that_cannot_give_the_epoch_again_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch sampler of the program's with another size from the third batch on: its new walk has it from the first.
    Where the stop comes before the change, or between two epochs, the walk is the same."""
    told = "Grouped gives other samples from the beginning of this epoch than it gave before the stop"
    loop, make = loop_with(in_mid_epoch), of(own_batches)
    for stop, differs in ((12, False), (13, False), (16, True), (24, False)):
        stopped(loop, tmp_path / f"stop_{stop}", stop, **make())
        caplog.clear()
        run(loop, tmp_path / f"stop_{stop}", **make())
        assert (told in caplog.text) is differs, f"stop {stop}: {caplog.text}"


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
    """Lists, arrays and tensors, of more items than other settings may have. They are set once, behind the first
    epoch: a resumed run does not come by it again."""

    def once(loader: Any, epoch: int, batch: int) -> None:
        if not batch and epoch == 1:
            change(loader.sampler)

    check(loop_with(once), tmp_path, (stop,), make=of(make))


def test_an_order_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    def with_replacement(loader: Any, epoch: int, batch: int) -> None:
        loader.sampler.replacement = True

    with pytest.raises(UsageError, match="make the loader with that sampler before the guard"):
        run(loop_with(with_replacement), tmp_path, loader=adopted())
