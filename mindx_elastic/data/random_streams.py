"""Random augmentation that does not depend on who loads a sample, or on what was loaded before it.

torch seeds a worker once and lets its streams run on, so augmentation depends on the number of workers and cannot be
resumed without replaying it (torchdata's StatefulDataLoader restores the indices only). Here the streams are seeded
for each sample by the libraries' own functions, with a number that is a function of the sample; this takes about 6 us.

Many data sets draw nothing, or a few numbers from one stream, and loading a small sample takes 2 us. So in the training
process only those streams are seeded that the data set has drawn from so far, and the streams are looked at around each
batch, which takes about 3 us a batch. A batch that has moved another one is loaded again, with all seeds, and from then
on that one is seeded, too. The same goes for the collate function. So what a sample is does not depend on it. All
streams are always seeded for data sets that have their own generators, or whose code names functions that read a
stream without moving it (`generators.may_read_streams`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from mindx_elastic.core.mersenne import (
    NumpyState,
    numpy_state,
    put_back_numpy,
    put_back_python,
    python_state,
    torch_state,
)
from mindx_elastic.data.generators import find_generators, may_read_streams, seed_generators, set_state, state_of
from mindx_elastic.data.permutation import mix

__all__ = [
    "VERSION",
    "SeededDataset",
    "SeparateStreams",
    "StreamUse",
    "advance_streams",
    "as_collated",
    "capture_streams",
    "device_generators",
    "preserved_streams",
    "restore_streams",
    "seed_streams",
]

VERSION = 4
"""The version of how samples draw, part of each position. Where it changes, a resumed epoch draws other numbers and
says so."""
PYTHON, NUMPY, TORCH = range(3)
_COLLATE = 3
_States = tuple[Any, Any, torch.Tensor]


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed >> 32)  # torch.manual_seed() seeds every accelerator and takes 100 us


def seed_streams(seed: int, streams: Iterable[int] = (PYTHON, NUMPY, TORCH)) -> None:
    """Seed these of Python's, numpy's and torch's CPU global streams from one 64-bit number."""
    if PYTHON in streams:
        random.seed(seed)
    if NUMPY in streams:
        _seed_numpy(seed)
    if TORCH in streams:
        _seed_torch(seed)


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
def preserved_streams(own: dict[str, Any] | None = None) -> Iterator[None]:
    """Put the global CPU streams back at the end of the block, and the generators `own`. Takes about 5 us."""
    python, numpy, generator = python_state(), numpy_state(), torch_state()
    states = [(one, state_of(one)) for one in own.values()] if own else []
    try:
        yield
    finally:
        for one, state in states:
            set_state(one, state)
        put_back_python(python)
        put_back_numpy(numpy)
        torch.default_generator.set_state(generator)


def device_generators() -> dict[str, Any]:
    """The default generators of the CUDA devices, once CUDA is in use in this process."""
    if not torch.cuda.is_initialized():
        return {}
    return {f"cuda:{number}": generator for number, generator in enumerate(torch.cuda.default_generators)}


class SeparateStreams:
    """Streams in the place of the global ones, which go on where they were left."""

    def __init__(self, streams: dict[str, Any]) -> None:
        """`streams`: as `capture_streams` gives them."""
        with preserved_streams():
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


def _now() -> _States:
    return python_state(), numpy_state(), torch_state()


def _put_back(state: _States, streams: Iterable[int] = (PYTHON, NUMPY, TORCH)) -> None:
    python, numpy, generator = state
    if PYTHON in streams:
        put_back_python(python)
    if NUMPY in streams:
        put_back_numpy(numpy)
    if TORCH in streams:
        torch.default_generator.set_state(generator)


def advance_streams() -> None:
    """Draw one number from each of the global streams."""
    random.random()
    np.random.random()
    torch.empty((), dtype=torch.int64, device="cpu").random_()


def _moved(before: _States, ignored: frozenset[int] = frozenset()) -> frozenset[int]:
    """The streams that are others than in `before`, which `_now` has given, and those of which that cannot be told.
    Not asked of those in `ignored`."""
    found = []
    if PYTHON not in ignored:
        python = python_state(before[0])
        if python is not before[0] and python != before[0]:
            found.append(PYTHON)
    if NUMPY not in ignored:
        numpy = numpy_state(before[1])
        if numpy is not before[1] and (type(numpy) is not NumpyState or numpy != before[1]):
            found.append(NUMPY)
    if TORCH not in ignored:
        state = torch_state()
        if state is not before[2] and not torch.equal(state, before[2]):
            found.append(TORCH)
    return frozenset(found)


class StreamUse:
    """What a loader has found out about its data set, for all of its iterations."""

    def __init__(self) -> None:
        self.drawn: frozenset[int] = frozenset()
        """The streams that a sample or the collate function has drawn from."""
        self.may_read: bool | None = None
        """Their code may use a stream without moving it; None: it was not looked through yet."""


def as_collated(batch: Any) -> Any:
    """The collate_fn that goes with a `SeededDataset`, which collates by itself."""
    return batch


class SeededDataset(Dataset[Any]):
    """Loads *and collates* the keys of one batch, ``(seed, index)`` each, with the streams seeded per sample.

    So are the generators that the data set, its transforms and the collate function keep (`data.generators`), which
    are looked for once an iteration in each process. Collating happens in here because many collate functions draw
    too (mixup, cutmix); they get a seed made from the batch's first key. Where the data set brings its own batched
    ``__getitems__``, the whole batch is seeded from its first key. In the main process (`num_workers` 0) all streams
    are put back afterwards, so that dropout and the like are not disturbed. Nothing is seeded for torch's own data set
    of plain tensors, which draws nothing: that would take longer than the loading; and in the main process only the
    streams that are drawn from (see above).
    """

    def __init__(
        self,
        wrapped: Any,
        collate_fn: Callable[[Any], Any],
        use: StreamUse | None = None,
    ) -> None:
        """`use`: of the loader; None: every sample is seeded."""
        self.wrapped = wrapped
        self.collate_fn = collate_fn
        self._use = use
        self._is_watched: bool | None = None  # only the streams that it draws from are seeded; None: not known yet
        self._draws = not _draws_nothing(wrapped, collate_fn)
        self._own: dict[str, Any] | None = None
        self._complete = False
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_own": None,
            "_complete": False,
            "_use": None,
            "_is_watched": None,
            "_last": (None,) * 3,
        }

    def __len__(self) -> int:
        return len(self.wrapped)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        if not self._draws:
            return self.collate_fn(self.wrapped[key[1]])
        return self._kept(self._load_one, key)

    def __getitems__(self, keys: list[tuple[int, Any]]) -> Any:
        if not self._draws:
            dataset = self.wrapped
            return self.collate_fn([dataset[index] for _, index in keys])
        use = self._use
        if use is None or self._is_watched is False or get_worker_info() is not None:
            return self._kept(self._load_batch, keys)
        if self._is_watched is None:
            if use.may_read is None:
                use.may_read = may_read_streams([self.wrapped, self.collate_fn])
            self._is_watched = not (use.may_read or self._generators())
            if not self._is_watched:
                return self._kept(self._load_batch, keys)
        last, drawn = self._last, use.drawn  # what has not moved since is taken over, not copied
        before = python_state(last[0]), numpy_state(last[1]), torch_state()
        self._last = before
        try:
            batch = self._load_watched(keys, drawn)
        except BaseException as error:
            moved = _moved(before, drawn)
            _put_back(before)
            if not moved or not isinstance(error, Exception):
                raise
        else:
            moved = _moved(before, drawn)
            _put_back(before, drawn | moved)
            if not self._complete:
                self._complete, self._own = True, None
                self._is_watched = not self._generators()  # the first sample may have made some
            if not moved and self._is_watched:
                return batch
        use.drawn |= moved
        return self._kept(self._load_batch, keys)

    def _load_watched(self, keys: list[tuple[int, Any]], drawn: frozenset[int]) -> Any:
        """As `_load_batch`, and only the streams `drawn` are seeded."""
        dataset = self.wrapped
        first_seed = keys[0][0] if keys else 0
        if _loads_batches(dataset):
            seed_streams(first_seed, drawn)
            samples = dataset.__getitems__([index for _, index in keys])
        elif not drawn:
            samples = [dataset[index] for _, index in keys]
        else:
            samples = []
            for seed, index in keys:
                seed_streams(seed, drawn)
                samples.append(dataset[index])
        if drawn:
            seed_streams(mix(first_seed, _COLLATE), drawn)
        return self.collate_fn(samples)

    def _kept(self, load: Callable[[Any], Any], keys: Any) -> Any:
        if get_worker_info() is not None:
            return load(keys)
        with preserved_streams(self._generators()):
            return load(keys)

    def _generators(self) -> dict[str, Any]:
        if self._own is None:
            self._own = find_generators([self.wrapped, self.collate_fn])
        return self._own

    def _seed(self, seed: int) -> None:
        seed_streams(seed)
        own = self._generators()
        if own:
            seed_generators(own, seed)

    def _seeded(self, seed: int, load: Callable[[], Any]) -> Any:
        """What `load` gives under `seed`. The first time again if it has made the data set create generators."""
        self._seed(seed)
        loaded = load()
        if self._complete:
            return loaded
        before, self._own = self._own, None
        self._complete = True
        if self._generators().keys() == (before or {}).keys():
            return loaded
        self._seed(seed)
        return load()

    def _load_one(self, key: tuple[int, Any]) -> Any:
        return self.collate_fn(self._seeded(key[0], lambda: self.wrapped[key[1]]))

    def _load_batch(self, keys: list[tuple[int, Any]]) -> Any:
        dataset = self.wrapped
        first_seed = keys[0][0] if keys else 0
        if _loads_batches(dataset):
            samples = self._seeded(first_seed, lambda: dataset.__getitems__([index for _, index in keys]))
        else:
            samples = [self._seeded(seed, functools.partial(dataset.__getitem__, index)) for seed, index in keys]
        self._seed(mix(first_seed, _COLLATE))
        return self.collate_fn(samples)


def _draws_nothing(dataset: Any, collate_fn: object) -> bool:
    """Whether neither can draw random numbers: only code of torch's runs in them, and none of it does."""
    if collate_fn is not default_collate or default_collate_fn_map.get(torch.Tensor) is not collate_tensor_fn:
        return False
    while type(dataset) is Subset and type(dataset.indices) in (list, tuple, range):
        dataset = dataset.dataset
    plain = type(dataset) is TensorDataset and all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    return plain and not hasattr(dataset, "__getitems__") and "__getitem__" not in vars(dataset)


def _loads_batches(dataset: Any) -> bool:
    """Whether the data set has its own batched getter. torch's Subset only passes the call on: look inside it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))
