"""A sampler that begins some items in, without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from mindx_elastic.data.permutation import mix_array
from mindx_elastic.errors import MismatchError

__all__ = ["SkippingSampler", "too_short"]


def too_short(found: int, wanted: int) -> MismatchError:
    return MismatchError(
        f"the epoch has only {found} batches now, and {wanted} were consumed before the checkpoint: "
        "the data or the sampler has changed. Use those of that run, or start afresh"
    )


class SkippingSampler(Sampler[Any]):
    """The (batch) sampler of `loader`, begun `skip` items in, with seeds added to its indices when `seeded`.

    The seed of a sample is a hash of `prefix` and its place in the epoch, not of its index: an index need
    not be a number, and a sampler with replacement may draw one twice.
    """

    def __init__(self, loader: DataLoader[Any], *, seeded: bool) -> None:
        self.inner: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.batched = loader.batch_sampler is not None
        self.seeded = seeded
        self._skip = 0
        self._prefix = 0
        self._walk: _Walk | None = None

    def begin_at(self, skip: int, prefix: int) -> None:
        """Where the next ``iter`` begins."""
        self._skip, self._prefix = skip, prefix

    def skip_now(self) -> None:
        """Skip, if torch has not asked for an item yet (without workers it asks when the caller does)."""
        if self._walk is not None:
            self._walk.skip_now()

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self._walk = _Walk(iter(self.inner), self)
        return self._walk


class _Walk(Iterator[Any]):
    """One pass. Skips at the first item and not before: with workers torch makes two passes and uses the
    second, and the
    first must not draw from the sampler's generator."""

    def __init__(self, items: Iterator[Any], sampler: SkippingSampler) -> None:
        self._items = items
        self._skip = sampler._skip
        self._prefix = sampler._prefix
        self._batched = sampler.batched
        self._seeded = sampler.seeded
        self._place = 0  # samples so far

    def skip_now(self) -> None:
        wanted, self._skip = self._skip, 0
        for done in range(wanted):
            try:
                item = next(self._items)
            except StopIteration:
                raise too_short(done, wanted) from None
            self._place += len(item) if self._batched else 1

    def __next__(self) -> Any:
        if self._skip:
            self.skip_now()
        item = next(self._items)
        count = len(item) if self._batched else 1
        first, self._place = self._place, self._place + count
        if not self._seeded:
            return item
        seeds = mix_array(self._prefix, np.arange(first, first + count, dtype=np.uint64)).tolist()
        return list(zip(seeds, item, strict=True)) if self._batched else (seeds[0], item)
