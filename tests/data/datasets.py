"""Data sets for the loader tests. In a module of their own, so that spawned workers can import them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

__all__ = ["Batched", "Noisy", "NoisyStream", "draw", "noisy_collate", "same"]


def draw() -> list[float]:
    """One number from each global stream, as augmentation draws them."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Noisy(Dataset[torch.Tensor]):
    """Sample i is (i, three random numbers)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.opened_by: int | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        assert type(index) is int
        assert 0 <= index < self.size
        return torch.tensor([index, *draw()], dtype=torch.float64)


class Batched(Noisy):
    """Loads a batch at a time, with one draw for the whole batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        noise = draw()
        return [torch.tensor([index, *noise], dtype=torch.float64) for index in indices]


class NoisyStream(IterableDataset[torch.Tensor]):
    """An iterable data set of `size` samples, shared out among the workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.size, step):
            yield torch.tensor([index, *draw()], dtype=torch.float64)


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    """Draws too, as mixup does: shape (batch, 7)."""
    noise = torch.tensor(draw(), dtype=torch.float64)
    return torch.stack([torch.cat([sample, noise]) for sample in samples])


def same(left: list[Any], right: list[Any]) -> bool:
    """Are the batches equal, bit for bit?"""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
