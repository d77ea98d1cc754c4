"""Random augmentation that does not depend on who loads a sample, or on what was loaded before it.

torch seeds a worker once and lets its streams run on, so augmentation depends on the number of workers and cannot be
resumed without replaying it (torchdata's StatefulDataLoader restores the indices only). Here the streams are seeded
for each sample, with a number that is a function of the sample; this takes about 8 us a sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from mindx_elastic.core.mersenne import numpy_state, put_back_numpy, put_back_python, python_state
from mindx_elastic.data.permutation import mix

__all__ = ["SeededDataset", "as_collated", "capture_streams", "preserved_streams", "restore_streams", "seed_streams"]

_COLLATE = 3


def seed_streams(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU global streams from one 64-bit number.

    Not `torch.manual_seed`: that one also seeds every accelerator (and costs 100 us).
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 32)


def capture_streams() -> dict[str, Any]:
    """The three global CPU streams, in types that a checkpoint can hold."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.default_generator.get_state(),
    }


def restore_streams(streams: dict[str, Any]) -> None:
    """Undo what happened to the global CPU streams since `capture_streams`."""
    version, words, gauss = streams["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(streams["numpy"])
    torch.default_generator.set_state(streams["torch"])


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Put the global CPU streams back at the end of the block. Takes about 5 us."""
    python, numpy, generator = python_state(), numpy_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        put_back_python(python)
        put_back_numpy(numpy)
        torch.default_generator.set_state(generator)


def as_collated(batch: Any) -> Any:
    """The collate_fn beside a `SeededDataset`, which collates by itself."""
    return batch


class SeededDataset(Dataset[Any]):
    """Loads *and collates* the keys of one batch, ``(seed, index)`` each, with the streams seeded per sample.

    Collating happens in here because many collate functions draw too (mixup, cutmix); they get a seed made
    from the batch's first key. Where the data set brings its own batched ``__getitems__``, the whole batch
    is seeded from its first key. In the main process (`num_workers` 0) the global streams are put back
    afterwards, so that dropout and the like are not disturbed.
    """

    def __init__(self, wrapped: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.wrapped = wrapped
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        if get_worker_info() is None:
            with preserved_streams():
                return self._load_one(key)
        return self._load_one(key)

    def __getitems__(self, keys: list[tuple[int, Any]]) -> Any:
        if get_worker_info() is None:
            with preserved_streams():
                return self._load_batch(keys)
        return self._load_batch(keys)

    def _load_one(self, key: tuple[int, Any]) -> Any:
        seed_streams(key[0])
        return self.collate_fn(self.wrapped[key[1]])

    def _load_batch(self, keys: list[tuple[int, Any]]) -> Any:
        dataset = self.wrapped
        first_seed = keys[0][0] if keys else 0
        if _loads_batches(dataset):
            seed_streams(first_seed)
            samples = dataset.__getitems__([index for _, index in keys])
        else:
            samples = []
            for seed, index in keys:
                seed_streams(seed)
                samples.append(dataset[index])
        seed_streams(mix(first_seed, _COLLATE))
        return self.collate_fn(samples)


def _loads_batches(dataset: Any) -> bool:
    """Whether the data set has a batched getter of its own. torch's Subset only passes the call on: look inside it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
