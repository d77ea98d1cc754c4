"""The loader for everything else: custom samplers, iterable data sets, any iterable that can be begun again."""

from __future__ import annotations

import copy
import inspect
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from mindx_elastic.alarm.shield import WorkerShield
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import asked, attributes_of, has_method, length_of
from mindx_elastic.core.tensor_memory import memory_of
from mindx_elastic.data.generators import find_generators, is_generator, set_state, state_of
from mindx_elastic.data.iteration import CursorLoader, Opened
from mindx_elastic.data.permutation import mix
from mindx_elastic.data.position import check_unchanged, whole_number
from mindx_elastic.data.random_streams import (
    SeparateStreams,
    advance_streams,
    capture_streams,
)
from mindx_elastic.data.sampler import rank_and_world_size
from mindx_elastic.data.track import LoaderMark
from mindx_elastic.data.workers import make_torch_loader, open_iterator, shielded
from mindx_elastic.errors import MismatchError, UsageError

__all__ = ["ReplayLoader", "is_stream", "is_torchdata", "iterates_as_stock", "keeps_state", "parts_with_epoch"]

_STREAMS = "datasets.iterable_dataset"
_BATCH, _WORKERS = 5, 6  # keep the hashes of (seed, epoch) apart
_MOST_TENSORS = 8


class ReplayLoader(CursorLoader):
    """Resumes any loader by beginning its epoch again and skipping what was consumed.

    At the start of an epoch it notes the global random streams (Python, numpy, torch CPU) and those found on the
    loader and its samplers: generators, ``epoch``, ``state_dict()``. On resume these are put back, the iterator is
    made again, and the consumed batches are skipped: on the level of indices, without loading, for map-style data sets;
    by loading and dropping them for iterable ones. The loader itself is not changed (only a subclass with its own
    ``__iter__`` gets another ``worker_init_fn``), and the workers are shielded from signals.

    What is weaker than `ResumableLoader`:
    - skipping takes time in proportion to the batches consumed, and for iterable data sets as long as
      loading them;
    - the order is exact only if it follows from the noted state. What samplers and iterable data sets draw from
      the *global* streams does: in each epoch they have their own streams, which begin as the global ones;
    - augmentation is seeded per batch for map-style data sets (by its place in the epoch) and so resumes
      exactly; iterable data sets replay their worker streams, so there `num_workers` must stay the same;
    - the world size must stay the same, and sharding over ranks is the sampler's own business.

    Args:
        loader: a DataLoader, or any iterable that gives a new iterator each time.
        seed: whole number for the augmentation.

    Iterations, `set_epoch` and threads: as `ResumableLoader`. `set_epoch` is passed on to the sampler at once.
    """

    _form = "replay"

    def __init__(self, loader: Iterable[Any], *, seed: int = 0) -> None:
        if not has_method(loader, "__iter__"):
            raise UsageError(f"{type(loader).__name__} is not iterable")
        if isinstance(loader, Iterator):
            raise UsageError("an iterator can be gone through only once; pass a DataLoader or a list of batches")
        self._set_up()
        self.loader = loader
        self.seed = whole_number("seed", seed)
        self._kind = type(loader)  # the class may be exchanged, see `data.adoption`
        # A subclass with its own __iter__ decides by itself what a batch is: its batches are loaded and dropped.
        self._stock = loader if isinstance(loader, DataLoader) and iterates_as_stock(loader) else None
        self._following: list[dict[str, Any]] = []  # what begins the epochs after the loaded one
        self._skipper: _SkippingSampler | None = None
        if self._stock is not None and not isinstance(self._stock.dataset, IterableDataset):
            self._skipper = _SkippingSampler(self._stock)
        self._made_with = self._order()

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # not set yet (copy, failed __init__), or a protocol's probe
            raise AttributeError(name)
        return getattr(self.loader, name)  # dataset, batch_size, num_workers, ...

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is `epoch`; see `ResumableLoader.set_epoch`."""
        epoch = whole_number("epoch", epoch, low=0)
        self._cursor.set_epoch(epoch)
        for part in self._parts().values():
            if part is not self.loader and has_method(part, "set_epoch"):
                part.set_epoch(epoch)

    @property
    def _foresees_end(self) -> bool:
        return self._skipper is not None and self._cursor.size is not None

    def _move_on(self) -> None:
        ready, self.on_iterator_ready = self.on_iterator_ready, None
        try:  # a sampler's own generator goes through the epoch
            batches = iter(self)
            if self._cursor.finished:
                next(batches, None)
            del batches
        finally:
            self.on_iterator_ready = ready

    _end_loaded = _move_on

    def _begin(self) -> Opened:
        cursor = self._cursor
        self._settings = self._current_settings()
        cursor.size = self._length()
        if cursor.start is None and self._following:
            cursor.start = self._following.pop(0)
        is_new = cursor.start is None
        if cursor.start is None:
            # Streams are restored before torch draws from them, as in a run that was never stopped.
            self._announce()
            cursor.start = self._capture()
            advance_streams()  # or the next epoch would begin with the same ones, if the training draws none
        else:
            self._restore(cursor.start)
        announce = None if is_new else self._announce
        streams, skip = SeparateStreams(cursor.start["streams"]), 0 if is_new else cursor.batch
        if (skipper := self._skipper) is None:
            return Opened(self._open_apart(cursor.start, streams, skip), lambda count: (0, False), announce)
        skipper.begin_at(skip, cursor.samples, self._hash(_BATCH), streams)
        batches, walk = self._open(self._build, persistent=self._persistent), skipper.walk
        assert walk is not None
        walk.skip_now()  # where torch has not asked for an item yet: without workers it asks when the caller does
        return Opened(batches, lambda count: (walk.order_after(skip + count), False), announce)

    def state_at(self, at: LoaderMark, later: Sequence[LoaderMark] = ()) -> dict[str, Any]:
        state = {**super().state_at(at), "start": at.start}
        begun = {id(mark.start): mark.start for mark in later if mark.start is not None and mark.start is not at.start}
        if begun:
            state["following"] = list(begun.values())  # epochs that have begun have drawn what they draw
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration replays up to this position.

        Raises MismatchError, and changes nothing, when seed, world size or (iterable data sets) num_workers have
        changed, or when another kind of loader wrote the state. A changed length is found when the iteration begins.
        """
        super().load_state_dict(state)

    def _load(self, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        super()._load(state, expected)
        self._cursor.start = state.get("start")
        self._following = list(state.get("following") or ())
        self._settings = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """As `ResumableLoader.set_aside`. The generators and states of the samplers are put back, too."""
        found = {name: _capture_part(part, self.loader) for name, part in self._parts().items()}
        following, self._following = self._following, []
        try:
            with super().set_aside():
                yield
        finally:
            self._following = following
            for name, part in self._parts().items():
                _restore_part(part, found.get(name, {}), self.loader)

    @property
    def _persistent(self) -> bool:
        # Workers of an iterable data set must start each epoch with new streams, or no later epoch could be replayed.
        return self._skipper is not None and self._stock is not None and self._stock.persistent_workers

    def _current_settings(self) -> dict[str, Any]:
        workers = None if self._skipper is not None else asked(self.loader, "num_workers")
        world_size = rank_and_world_size(None, None)[1]
        return {**super()._current_settings(), "num_workers": workers, "world_size": world_size}

    def _hash(self, purpose: int) -> int:
        return mix(self.seed, self._cursor.epoch, rank_and_world_size(None, None)[0], purpose)

    def _order(self) -> tuple[Any, ...]:
        inner = None if self._skipper is None else self._skipper.inner
        return (inner.batch_size, inner.drop_last) if type(inner) is BatchSampler else ()  # others change theirs

    def _open_apart(self, start: dict[str, Any], streams: SeparateStreams, skip: int) -> Iterator[Any]:
        with streams.used():
            opened = self._open_foreign() if self._stock is None else self._open(self._build, persistent=False)
        batches = _Apart(opened, streams, start)
        for done in range(skip):
            if next(batches, _END) is _END:
                raise _too_short(done, skip)
        return batches

    def _open_foreign(self) -> Iterator[Any]:
        loader = self.loader
        if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, WorkerShield):
            loader.worker_init_fn = shielded(loader.worker_init_fn, self.worker_grace_s)
        return open_iterator(loader, self._kind.__iter__)

    def _build(self) -> DataLoader[Any]:
        stock = self._stock
        assert stock is not None
        if self._skipper is None:
            sampler: dict[str, Any] = {"batch_size": stock.batch_size, "drop_last": stock.drop_last}
        elif stock.batch_sampler is not None:
            sampler = {"batch_sampler": self._skipper}
        else:
            sampler = {"sampler": self._skipper, "batch_size": None}
        # With persistent workers the base seed is drawn once for all epochs. From the user's stream, a resume, which
        # starts the workers again, would take one number more than the run without a stop did.
        return make_torch_loader(
            stock,
            sampler,
            seed=self._hash(_WORKERS),
            grace_s=self.worker_grace_s,
            persistent=self._persistent,
            is_seeded=self._skipper is not None,
        )

    def _parts(self) -> dict[str, Any]:
        """The objects whose state decides the order, by name."""
        batch_sampler = asked(self.loader, "batch_sampler")
        parts = {
            "loader": self.loader,
            "sampler": asked(self.loader, "sampler"),
            "batch_sampler": batch_sampler,
            "batch_sampler.sampler": asked(batch_sampler, "sampler"),
            # The state of a map-style data set runs ahead of the position, because batches are prefetched.
            "dataset": asked(self.loader, "dataset") if self._skipper is None else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _capture(self) -> dict[str, Any]:
        return {
            "length": self._length(),
            "first": "",
            "streams": capture_streams(),
            "parts": {name: _capture_part(part, self.loader) for name, part in self._parts().items()},
        }

    def _restore(self, start: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            _restore_part(part, start["parts"].get(name, {}), self.loader)
        # Only now: a sampler may have another length in each epoch.
        check_unchanged(self._form, {**start, "kind": self._form}, {"length": self._length()})

    def _length(self) -> int | None:
        return length_of(self.loader)


_END = object()


class _Apart(Iterator[Any]):
    """Fetches with its own streams: a replay, in which the training draws nothing, comes out the same, or says so:
    where a shuffle is seeded by the time or the process, the first batch is another one.
    """

    def __init__(self, batches: Iterator[Any], streams: SeparateStreams, start: dict[str, Any]) -> None:
        self.wrapped, self._streams, self._start, self._is_first = batches, streams, start, True

    def __next__(self) -> Any:
        with self._streams.used():
            batch = next(self.wrapped)
        if self._is_first:
            self._is_first = False
            now, before = _digest(batch), self._start.get("first", "")
            self._start["first"] = now
            if before and now != before:
                logger.warning(
                    "not bit for bit the uninterrupted run: the epoch began again with another batch than before the "
                    "stop, and samples come twice or never. Give its data set, and each shuffle in it, a fixed seed"
                )
        return batch


def _digest(batch: Any) -> str:
    """The digest of some of its tensors. Empty: there are none."""
    found = islice((t for t in _tensors_in(batch) if t.layout is torch.strided and not t.is_nested), _MOST_TENSORS)
    each = [tensor.detach().resolve_conj().resolve_neg().cpu().contiguous() for tensor in found]
    return xxhash.xxh3_64_hexdigest(b"".join(map(memory_of, each))) if each else ""


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors_in(item)


def iterates_as_stock(loader: DataLoader[Any]) -> bool:
    """Whether the batches of `loader` are those of its samplers: a subclass with its own ``__iter__`` may differ."""
    kind = type(loader)
    if kind.__name__ == "StatefulDataLoader" and is_torchdata(kind):
        return True
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def is_torchdata(kind: type) -> bool:
    """Whether it is a class of torchdata's, which need not be installed."""
    return kind.__module__.split(".")[0] == "torchdata"


def is_stream(value: Any) -> bool:
    """Whether it is a stream of Hugging Face's `datasets`: the order of an epoch follows from the epoch's number alone,
    and its own state, which is a position inside of the epoch, leaves out the shuffle buffer."""
    return any(kind.__name__ == "IterableDataset" and kind.__module__ == _STREAMS for kind in type(value).__mro__)


# --- skipping what was consumed, without loading it ---


def _too_short(found: int, wanted: int) -> MismatchError:
    return MismatchError(
        f"the epoch has only {found} batches now, and {wanted} were consumed before the checkpoint: "
        "the data or the sampler has changed. Use those of that run, or start afresh"
    )


class _SkippingSampler(Sampler[Any]):
    """The (batch) sampler of `loader`, begun `skip` items in, with a seed for each.

    The seed of a batch is a hash of `prefix` and its place in the epoch, not of its indices: these need not be
    numbers.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.inner: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.batched = loader.batch_sampler is not None
        self.walk: _Walk | None = None
        """The newest one."""

    def begin_at(self, skip: int, order: int, prefix: int, streams: SeparateStreams) -> None:
        """Where the next ``iter`` begins, and what the sampler draws from in place of the global streams. `order`: as
        `_Walk.order_after` has given it for what is skipped; 0: it is not known."""
        self.skip, self.order, self.prefix, self.streams = skip, order, prefix, streams

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        with self.streams.used():
            self.walk = _Walk(iter(self.inner), self)
        return self.walk


class _Walk(Iterator[Any]):
    """One pass. Skips at the first item and not before: with workers torch makes two passes and uses the second one,
    and the first must not draw from the sampler's generator."""

    def __init__(self, items: Iterator[Any], sampler: _SkippingSampler) -> None:
        self._items, self._kind = items, type(sampler.inner).__name__
        self._orders = array("q")
        """By number of batches the digest of their indices, as far as these are numbers. 63 bits: what is larger takes
        the slow way into the boundary ring (`persist.packer`)."""
        self._batched, self._streams = sampler.batched, sampler.streams
        self._skip, self._expected, self._prefix = sampler.skip, sampler.order, sampler.prefix
        self._batch = 0  # batches so far

    def order_after(self, batches: int) -> int:
        """The digest of the epoch's indices up to there; 0: it is not known."""
        return self._orders[batches - 1] if 0 < batches <= len(self._orders) else 0

    def skip_now(self) -> None:
        wanted, self._skip = self._skip, 0
        for done in range(wanted):
            try:
                self._take()
            except StopIteration:
                raise _too_short(done, wanted) from None
        order = self.order_after(wanted)
        if order != self._expected and 0 not in (order, self._expected):
            logger.warning(
                "not bit for bit the uninterrupted run: %s gives other samples from the beginning of this epoch than "
                "it gave before the stop, so samples come twice or never. Let its order follow from the epoch, the "
                "random streams and attributes that are set between two epochs",
                self._kind,
            )

    def _take(self) -> Any:
        with self._streams.used():
            item = next(self._items)
        if len(self._orders) == self._batch:
            with suppress(TypeError, ValueError, OverflowError):  # names of files, pairs
                indices = array("q", item if self._batched else (item,))
                self._orders.append(xxhash.xxh3_64_intdigest(indices, self.order_after(self._batch)) >> 1)
        self._batch += 1
        return item

    def __next__(self) -> Any:
        if self._skip:
            self.skip_now()
        return mix(self._prefix, self._batch), self._take()


# --- state of a sampler, a loader or an iterable data set that decides its order ---


def _capture_part(part: Any, loader: Any) -> dict[str, Any]:
    """The random generators that `part` keeps, its ``epoch`` and its ``state_dict()``."""
    found: dict[str, Any] = {"rngs": {name: state_of(rng) for name, rng in _generators(part, loader).items()}}
    if isinstance(epoch := _epoch_of(part), int):
        found["epoch"] = epoch
    if keeps_state(part) and not is_stream(part) and part is not loader:  # some loaders start workers to answer
        try:
            inspect.signature(part.state_dict).bind()
        except TypeError:
            raise UsageError(
                f"the position of {type(part).__name__} is kept by its own library's loader, which alone can ask for "
                "its state. Use that one in place of this loader (StreamingDataLoader): Guard(loader=loader, ...)"
            ) from None
        found["state"] = copy.deepcopy(part.state_dict())
    return found


def _restore_part(part: Any, found: Mapping[str, Any], loader: Any) -> None:
    """Put back what `_capture_part` found; what is no longer there is left out."""
    if "state" in found and keeps_state(part) and not is_stream(part):
        part.load_state_dict(copy.deepcopy(found["state"]))
    if "epoch" in found and isinstance(_epoch_of(part), int):
        if has_method(part, "set_epoch"):
            part.set_epoch(found["epoch"])
        else:
            part.epoch = found["epoch"]
    rngs = _generators(part, loader)
    for name, state in found.get("rngs", {}).items():
        if name in rngs:
            set_state(rngs[name], state)


def _generators(part: Any, loader: Any) -> dict[str, Any]:
    if part is loader:  # its samplers and its data set are separate parts
        return {name: value for name, value in attributes_of(part).items() if is_generator(value)}
    dataset = asked(loader, "dataset")
    return find_generators(part, excluding=None if part is dataset else dataset)


def parts_with_epoch(loader: ReplayLoader) -> list[Any]:
    """The samplers and data sets of the program whose ``epoch`` is part of the state of `loader`."""
    return [part for part in loader._parts().values() if isinstance(_epoch_of(part), int)]


def _epoch_of(part: Any) -> Any:
    return part.epoch if is_stream(part) else attributes_of(part).get("epoch")


def keeps_state(part: Any) -> bool:
    return has_method(part, "state_dict", "load_state_dict")
