"""Generators that data sets and transforms keep: found and seeded for each sample."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from mindx_elastic.data import ResumableLoader
from mindx_elastic.data.generators import find_generators

_module_rng = np.random.default_rng(11)


class Jitter:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        draw = self.rng.random() if not isinstance(self.rng, np.random.RandomState) else self.rng.rand()
        return x + float(draw)


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x


def shift(x: torch.Tensor, *, rng: random.Random) -> torch.Tensor:
    return x + rng.random()


class Augmented(Dataset[torch.Tensor]):
    """Draws from a generator of every kind, in every place that people keep them."""

    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.names = [f"{number}.png" for number in range(100_000)]
        self.torch_rng = torch.Generator().manual_seed(1)
        enclosed = np.random.RandomState(6)
        self.transform = Compose(
            Jitter(np.random.default_rng(0)),
            Jitter(np.random.RandomState(3)),
            functools.partial(shift, rng=random.Random(5)),
            lambda x: x + float(enclosed.rand()),
        )
        self.lazy: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.lazy is None:  # as workers do it
            self.lazy = np.random.default_rng(random.randrange(2**32))
        x = torch.full((2,), float(index), dtype=torch.float64) + torch.rand(2, generator=self.torch_rng)
        return self.transform(x) + float(self.lazy.random()) + float(_module_rng.random())


@pytest.mark.parametrize(("workers", "done"), [(0, 1), (2, 3)])
def test_a_resumed_epoch_is_augmented_the_same(workers: int, done: int) -> None:
    assert len(find_generators([Augmented(), None])) == 6
    whole = [batch.clone() for batch in ResumableLoader(Augmented(), 2, shuffle=True)]
    first = ResumableLoader(Augmented(), 2, shuffle=True, num_workers=workers)
    iterator = iter(first)
    begun = [next(iterator).clone() for _ in range(done)]
    second = ResumableLoader(Augmented(), 2, shuffle=True, num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat(begun + list(second)), torch.cat(whole))
    first.shutdown()


class Flip:
    """A transform with a generator of its own, and a method that only code names."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, x: float) -> float:
        return x + self.rng.random()


class Held:
    flip = Flip(4)


flip, flop, flap, HOLDER = Flip(137), Flip(5), Flip(6), Held
"""Not attributes of any data set."""


def flipped(x: float) -> float:
    return flop(x)


class Images(Dataset[float]):
    """Draws by a global, in a function that it calls, in a method of its own and by a class."""

    def __getitem__(self, index: int) -> float:
        return [flip(index), flipped(index), self.load(index), HOLDER.flip(index)][index % 4]

    def __len__(self) -> int:
        return 12

    def load(self, index: int) -> float:
        return flap(index)


def test_what_a_data_set_uses_and_does_not_hold() -> None:
    """A sample is the same with and without the batches before it, in this process and in a worker."""
    whole = list(ResumableLoader(Images(), 4, shuffle=True))
    source = ResumableLoader(Images(), 4, shuffle=True)
    next(iter(source))
    resumed = ResumableLoader(Images(), 4, shuffle=True, num_workers=1)
    resumed.load_state_dict(source.state_dict())
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in whole[1:]]
