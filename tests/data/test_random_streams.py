from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from mindx_elastic.data.random_streams import SeededDataset, as_collated, capture_streams, restore_streams
from tests.data.datasets import Batched, Noisy, draw, noisy_collate


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(Subset(d, range(9)), range(9))])
def test_a_batched_getter_is_used(wrap: Callable[[Any], Dataset[Any]]) -> None:
    batch = SeededDataset(wrap(Batched(9)), default_collate).__getitems__((11, [1, 2]))
    assert torch.equal(batch[0, 1:], batch[1, 1:])
    assert torch.equal(batch[:1], SeededDataset(wrap(Batched(9)), default_collate).__getitems__((11, [1])))


class OwnTensors(torch.Tensor):
    pass


def own_collate(batch: Any) -> Any:
    return default_collate(batch)


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return (self.tensors[0][index] + torch.rand(1),)


TENSORS = TensorDataset(torch.arange(20.0), torch.arange(20))


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "seeds"),
    [
        (TENSORS, default_collate, False),
        (Subset(Subset(TENSORS, range(9)), (3, 1, 2, 0)), default_collate, False),
        (TENSORS, own_collate, True),
        (Subset(Augmented(torch.arange(20.0)), [3, 1, 2, 0]), default_collate, True),
        (Noisy(4), as_collated, True),
        (TensorDataset(torch.arange(20.0).as_subclass(OwnTensors)), default_collate, True),
    ],
)
def test_only_what_cannot_draw_is_not_seeded(dataset: Any, collate_fn: Any, seeds: bool) -> None:
    seeded, again = SeededDataset(dataset, collate_fn), SeededDataset(dataset, collate_fn)
    assert seeded._draws is seeds
    before = capture_streams()
    got, one = seeded.__getitems__((11, [2, 0, 3])), seeded[12, 2]
    assert_same_streams(before)
    draw()
    assert repr((one, got)) == repr((again[12, 2], again.__getitems__((11, [2, 0, 3]))))


def assert_same_streams(before: dict[str, Any]) -> None:
    expected = draw()
    restore_streams(before)
    assert draw() == expected


def deviates_collate(batch: list[torch.Tensor]) -> torch.Tensor:
    """Leaves a normal deviate behind in Python's and in numpy's stream."""
    return torch.stack(batch) + random.gauss(0, 1) + np.random.randn()


class Lazy(Noisy):
    """Makes its generator with the first sample, as workers do it."""

    rng: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.rng = self.rng or np.random.default_rng(random.randrange(2**32))
        return super().__getitem__(index) + float(self.rng.random())


@pytest.mark.parametrize("collate_fn", [default_collate, noisy_collate, deviates_collate])
@pytest.mark.parametrize("kind", [Noisy, Batched, Lazy])
def test_a_batch_does_not_depend_on_what_was_loaded_before(kind: type[Noisy], collate_fn: Any) -> None:
    whole = SeededDataset(kind(12), collate_fn)
    batches = [whole.__getitems__((first << 40, [first, first + 1, first + 2])) for first in range(0, 12, 3)]
    draw()
    assert torch.equal(SeededDataset(kind(12), collate_fn).__getitems__((9 << 40, [9, 10, 11])), batches[3])


def test_what_batches_draw_is_part_of_the_format() -> None:
    """Where these numbers change, `VERSION` does."""
    batch = SeededDataset(Noisy(12), default_collate).__getitems__((7919 << 20, [4, 8]))
    assert batch[0, 1:].tolist() == [0.4140646543380324, 0.8262472634824459, 0.7576315999031067]
