"""Random augmentation that does not depend on who loads a batch, or on what was loaded before it.

torch seeds a worker once and lets its streams run on, so augmentation depends on the number of workers and cannot be
resumed without replaying it (torchdata's StatefulDataLoader restores the indices only). Here the streams are seeded
for each batch by the libraries' own functions, with a number that is a function of the batch; this takes about 8 us.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from mindx_elastic.core.mersenne import numpy_state, put_back_numpy, put_back_python, python_state, torch_state
from mindx_elastic.data.generators import find_generators, seed_generators, set_state, state_of

__all__ = [
    "VERSION",
    "SeededDataset",
    "SeparateStreams",
    "advance_streams",
    "as_collated",
    "capture_streams",
    "device_generators",
    "restore_streams",
    "seed_streams",
    "seeded",
]

VERSION = 5
"""The version of how batches draw, part of each position. Where it changes, a resumed epoch draws other numbers and
says so."""


def seed_streams(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU global streams from one 64-bit number."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 32)  # torch.manual_seed() seeds every accelerator and takes 100 us


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
def _preserved_streams(own: dict[str, Any] | None = None) -> Iterator[None]:
    """Put the global CPU streams back at the end of the block, and the generators `own`. Takes about 5 us."""
    streams = _now()
    states = [(one, state_of(one)) for one in own.values()] if own else []
    try:
        yield
    finally:
        for one, state in states:
            set_state(one, state)
        _put_back(streams)


@contextmanager
def seeded(seed: int, own: dict[str, Any]) -> Iterator[None]:
    """Inside, the global CPU streams and the generators `own` begin with `seed`; afterwards they are as before."""
    with _preserved_streams(own):
        seed_streams(seed)
        seed_generators(own, seed)
        yield


def device_generators() -> dict[str, Any]:
    """The default generators of the CUDA devices, once CUDA is in use in this process."""
    if not torch.cuda.is_initialized():
        return {}
    return {f"cuda:{number}": generator for number, generator in enumerate(torch.cuda.default_generators)}


class SeparateStreams:
    """Streams in the place of the global ones, which go on where they were left."""

    def __init__(self, streams: dict[str, Any]) -> None:
        """`streams`: as `capture_streams` gives them."""
        with _preserved_streams():
            restore_streams(streams)
            self._state = _now()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the global streams are these. Takes about 10 us."""
        live = _now()
        _put_back(self._state)
        try:
            yield
        finally:
            self._state = _now()
            _put_back(live)


def _now() -> tuple[Any, Any, torch.Tensor]:
    return python_state(), numpy_state(), torch_state()


def _put_back(state: tuple[Any, Any, torch.Tensor]) -> None:
    python, numpy, generator = state
    put_back_python(python)
    put_back_numpy(numpy)
    torch.default_generator.set_state(generator)


def advance_streams() -> None:
    """Draw one number from each of the global streams."""
    random.random()
    np.random.random()
    torch.empty((), dtype=torch.int64, device="cpu").random_()


def as_collated(batch: Any) -> Any:
    """The collate_fn that goes with a `SeededDataset`, which collates by itself."""
    return batch


class SeededDataset(Dataset[Any]):
    """Loads *and collates* one batch, asked for as ``(seed, indices)``, with the streams seeded for it.

    So are the generators that the data set, its transforms and the collate function keep (`data.generators`), which
    are looked for once an iteration in each process. Collating happens in here because many collate functions draw
    too (mixup, cutmix). All streams are put back afterwards, so that dropout and the like are not disturbed in the main
    process (`num_workers` 0). Nothing is seeded for torch's own data set of plain tensors, which draws nothing.
    """

    def __init__(self, wrapped: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.wrapped = wrapped
        self.collate_fn = collate_fn
        self._draws = not _draws_nothing(wrapped, collate_fn)
        self._own: dict[str, Any] = {}
        self._has_loaded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_own": {}, "_has_loaded": False}

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        """Of a sampler without batches: one sample."""
        seed, index = key
        return self._seeded(seed, lambda: self.collate_fn(self.wrapped[index]))

    def __getitems__(self, key: tuple[int, Any]) -> Any:
        seed, indices = key
        return self._seeded(seed, lambda: self.collate_fn(self._samples(indices)))

    def _samples(self, indices: Any) -> Any:
        dataset = self.wrapped
        if getattr(dataset, "__getitems__", None):  # as torch asks
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]

    def _seeded(self, seed: int, load: Callable[[], Any]) -> Any:
        if not self._draws:
            return load()
        if self._has_loaded:
            return self._load(seed, load)
        self._own = find_generators([self.wrapped, self.collate_fn])
        loaded = self._load(seed, load)
        self._has_loaded, before = True, self._own
        self._own = find_generators([self.wrapped, self.collate_fn])
        # Once more if the data set has only now made some of its generators.
        return loaded if self._own.keys() == before.keys() else self._load(seed, load)

    def _load(self, seed: int, load: Callable[[], Any]) -> Any:
        with seeded(seed, self._own):
            return load()


def _draws_nothing(dataset: Any, collate_fn: object) -> bool:
    """Whether neither can draw random numbers: only code of torch's runs in them, and none of it does."""
    if collate_fn is not default_collate or default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return False
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
