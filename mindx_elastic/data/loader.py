"""The loader for map-style data sets, and how any other loader becomes one that resumes.

Resuming is exact and costs the same at every batch, with any number of workers and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import has_method, length_of
from mindx_elastic.data.function import FunctionLoader
from mindx_elastic.data.iteration import CursorLoader, Opened
from mindx_elastic.data.permutation import mix
from mindx_elastic.data.position import check_numbers, check_unchanged, whole_number
from mindx_elastic.data.replay import ReplayLoader, is_torchdata, iterates_as_stock, keeps_state
from mindx_elastic.data.sampler import EpochPlan, ResumableBatchSampler, rank_and_world_size
from mindx_elastic.data.workers import make_torch_loader
from mindx_elastic.errors import MismatchError, UsageError

__all__ = ["ResumableLoader", "from_loader", "stock_order", "with_settings_of"]

_WORKERS = 4  # keeps the workers' base seeds apart from the other hashes of (seed, epoch)
_REPLACED = {
    "sampler": "the order is part of the position; shuffle=True or False chooses it",
    "batch_sampler": "the order is part of the position; use batch_size and shuffle",
    "generator": "the order is a function of seed and epoch; pass seed=",
    "in_order": "batches always come in order",
}


class ResumableLoader(CursorLoader, DataLoader[Any]):  # type: ignore[misc]  # its iterators are ours
    """A DataLoader whose order, batches and augmentation are functions of (seed, epoch, place).

    A position is a few numbers. Resuming costs the same at every batch, and `num_workers` may change.

    Args:
        dataset: map-style: ``len(dataset)`` and ``dataset[i]`` for i in 0..len-1.
        batch_size: samples a batch *and rank*.
        shuffle: a new pseudo random order each epoch; otherwise the data set's own order.
        seed: whole number, the same on every rank.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
            persistent_workers: as for DataLoader. Workers outlive SIGTERM, SIGINT and SIGUSR1 for the grace
            period.
        drop_last: drop the samples that do not fill a whole step over all ranks. Otherwise every sample comes
            exactly once an epoch, and every rank gets the same number of batches (see `EpochPlan`).
        rank, world_size: of this process; None: read from torch.distributed when an iteration begins.

    Python's, numpy's and torch's CPU streams are seeded for each batch, so that random augmentation resumes exactly.

    Each ``iter()`` is an epoch: the first starts at the loaded position (or at epoch 1), the next ones at the start of
    the following epoch, *also after a break*, unless `set_epoch` names another. Until then the position stays where the
    break left it; ``load_state_dict(state_dict())`` makes the next iteration go on there.

    Where ``batch_sampler.batch_size`` is set later, the next batch is a UsageError: make a loader for each size.

    All methods belong to the training thread, except `shutdown`. Raises UsageError for arguments that cannot work.
    """

    _form = "resumable"

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        num_workers: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        _check_arguments(dataset, rank, world_size, dataloader_kwargs)
        self._set_up()
        self._stands_for: DataLoader[Any] | None = None  # whose settings count then
        self._resplit_epoch = (0, 0)  # the epoch that goes on with another number of ranks, and its batches
        self._length_then: int | None = None  # of the data set, at a checkpoint whose position is loaded
        self._warned_of_padding = False
        sampler = ResumableBatchSampler(
            dataset,
            self._cursor,
            batch_size=whole_number("batch_size", batch_size, low=1),
            shuffle=bool(shuffle),
            seed=whole_number("seed", seed),
            drop_last=bool(drop_last),
            ranks=partial(rank_and_world_size, rank, world_size),  # not a method: a cycle would keep workers alive
        )
        super().__init__(
            dataset,
            batch_sampler=sampler,
            num_workers=whole_number("num_workers", num_workers, low=0),
            worker_init_fn=worker_init_fn,
            **dataloader_kwargs,
        )
        # DataLoader drops these two when it is given a batch sampler, and forbids setting them; people read them.
        self.__dict__.update(batch_size=sampler.batch_size, drop_last=sampler.drop_last)
        self._made_with = self._order()

    def __len__(self) -> int:
        """Batches of a whole epoch for one rank; in an epoch that goes on with another number of ranks, those that were
        handed out and those that are left: ``number == len(loader)`` is true of the last one."""
        epoch, total = self._resplit_epoch
        cursor = self._cursor
        return total if cursor.samples and epoch == cursor.next_epoch else len(self._sampler)

    @property
    def seed(self) -> int:
        return self._sampler.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._sampler.seed = seed

    @property
    def num_shares(self) -> int:
        """Among how many ranks its samples are shared out."""
        return self._sampler.ranks()[1]

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is `epoch`: from the loaded position if that is in this epoch, else from the start."""
        self._cursor.set_epoch(whole_number("epoch", epoch, low=0))

    def _begin(self) -> Opened:
        self._settings = self._current_settings()
        self._check_length(len(self._sampler.dataset))
        batches = self._open(self._build, persistent=self._with_settings.persistent_workers)
        plan = self._sampler.newest_plan
        assert plan is not None
        self._warn_of_padding(plan)
        return Opened(batches, partial(_progress, plan), self._announce)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration starts at this position.

        Raises MismatchError, and changes nothing, when batch size, seed, shuffle or drop_last have changed, or when
        another kind of loader wrote the state. Another world size is fine. So is another length of the data set until
        the iteration begins: the program may set it for each epoch, or from what it gets back after this.
        """
        super().load_state_dict(state)

    def _load(self, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        settings = dict(expected)
        world_size = settings.pop("world_size")
        del settings["num_samples"]
        check_unchanged(self._form, state, settings)
        check_numbers(state, "epoch", "batch", "samples", "num_samples", "batch_size")
        batch, samples, then = state["batch"], state["samples"], state["num_samples"]
        if samples > then:
            raise MismatchError(f"the checkpoint's data position is damaged: samples={samples}")
        finished = bool(state.get("finished"))
        until = None if finished else self._sampler.plan(size=then).batches_until(samples)
        if state.get("world_size") != world_size:
            batch = batch if until is None else until  # the place of the same sample, where there is one
            logger.info("world size was %s, is %s: the epoch goes on at sample %d", state.get("world_size"), world_size,
                      samples)  # fmt: skip
        self._resplit_epoch = (0, 0)
        if batch != until and not finished:  # in this start, or in an earlier one
            self._resplit_epoch = state["epoch"], batch + self._sampler.plan(samples, size=then).num_batches
        super()._load({**state, "batch": batch}, settings)
        self._settings = {**expected, "num_samples": then}
        self._length_then = then

    def _check_length(self, now: int) -> None:
        """At the first iteration after `load_state_dict`. Raises MismatchError in the middle of an epoch. At an epoch's
        end the program may be one that gives each epoch its own length."""
        then = self._length_then
        differs = f"the data set has {now} samples, and had {then} at the checkpoint"
        if then not in (None, now) and self._cursor.samples and not self._cursor.finished:
            raise MismatchError(
                f"{differs}. Use the data set of that run, or start afresh; where the training changes it, name in "
                "stateful= the list that it is made of, or set it at the head of each epoch"
            )
        if then not in (None, now):
            logger.info("%s, at an epoch's end: right where the training gives each epoch its own length", differs)
        self._length_then = None

    @property
    def _sampler(self) -> ResumableBatchSampler:
        assert isinstance(self.batch_sampler, ResumableBatchSampler)
        return self.batch_sampler

    def _stand_for(self, loader: DataLoader[Any]) -> None:
        """What the program sets on `loader` counts, from the next iteration on."""
        self._stands_for = loader
        self._made_with = self._order()

    def _order(self) -> tuple[Any, ...]:
        if self._stands_for is None:
            return self._sampler.batch_size, self._sampler.shuffle, self._sampler.drop_last
        batches: Any = self._stands_for.batch_sampler
        is_shuffled = getattr(batches.sampler, "shuffle", isinstance(batches.sampler, RandomSampler))
        return batches.batch_size, is_shuffled, batches.drop_last

    @property
    def _with_settings(self) -> DataLoader[Any]:
        return self if self._stands_for is None else self._stands_for

    def _current_settings(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            **super()._current_settings(),
            "num_samples": len(sampler.dataset),
            "batch_size": sampler.batch_size,
            "shuffle": sampler.shuffle,
            "drop_last": sampler.drop_last,
            "world_size": sampler.ranks()[1],
        }

    def _build(self) -> DataLoader[Any]:
        # Read at each epoch, so that attributes set after construction count, as they do in DataLoader.
        return make_torch_loader(
            self._with_settings,
            {"batch_sampler": self._sampler},
            seed=mix(self.seed, self._cursor.epoch, _WORKERS),
            grace_s=self.worker_grace_s,
            persistent=self._with_settings.persistent_workers,
        )

    def _warn_of_padding(self, plan: EpochPlan) -> None:
        if plan.padding and not plan.fill and not self._warned_of_padding:
            self._warned_of_padding = True
            logger.warning(
                "%d samples do not divide evenly over %d ranks with batch size %d: the last step of each epoch repeats "
                "%d of them. drop_last=True drops the remainder instead",
                plan.num_samples, plan.world_size, plan.batch_size, plan.padding,
            )  # fmt: skip


def _progress(plan: EpochPlan, count: int) -> tuple[int, bool]:
    """Samples that are consumed, and whether no batch is left, after `count` batches of a pass."""
    return plan.consumed(count), count >= plan.num_batches


def _check_arguments(dataset: Any, rank: int | None, world_size: int | None, others: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "an iterable data set has no index to resume at; wrap its DataLoader with mindx_elastic.data.from_loader"
        )
    if not has_method(dataset, "__len__", "__getitem__"):
        raise UsageError(f"{type(dataset).__name__} is not a map-style data set: it needs __len__ and __getitem__")
    for name, why in _REPLACED.items():
        if others.get(name) is not None and not (name == "in_order" and others[name] is True):
            raise UsageError(f"ResumableLoader does not take {name}=: {why}. To keep your own, see from_loader")
    if (rank is None) != (world_size is None):
        raise UsageError("give both rank and world_size, or neither")
    if rank is not None and world_size is not None:
        size = whole_number("world_size", world_size, low=1)
        if whole_number("rank", rank, low=0) >= size:
            raise UsageError(f"rank={rank} is not below world_size={size}")


def from_loader(loader: Any, seed: int = 0) -> ResumableLoader | ReplayLoader | FunctionLoader:
    """A resumable loader with the settings of `loader`, which is left as it is.

    A DataLoader over a map-style data set with torch's own SequentialSampler, RandomSampler (without
    replacement, over the whole data set) or DistributedSampler becomes a `ResumableLoader`: same batch
    size, collate_fn, workers and so on. Its shuffled order differs from torch's, and a loader without
    DistributedSampler is divided over the ranks. Anything else that can be iterated again becomes a
    `ReplayLoader`. A loader that already resumes comes back unchanged.

    Args:
        loader: a DataLoader, or any iterable of batches.
        seed: whole number, the same on every rank. The seed that the user gave to a DistributedSampler,
            or the initial seed of a generator that they passed, is mixed in, so that theirs still counts.

    Raises UsageError for an iterator, which can be gone through only once.
    """
    if isinstance(loader, (ResumableLoader, ReplayLoader, FunctionLoader)):
        return loader
    order = stock_order(loader) if isinstance(loader, DataLoader) and iterates_as_stock(loader) else None
    if order is None:
        if isinstance(loader, DataLoader) and keeps_state(loader) and not iterates_as_stock(loader):
            kind = type(loader).__name__
            raise UsageError(
                f"{kind} keeps its position by itself. Give it to the guard as it is: Guard(loader=loader, ...)"
            )
        return ReplayLoader(loader, seed=seed)
    whole_rounds = order.pop("whole_rounds")
    own_seed = order.pop("own_seed")
    batches: Any = loader.batch_sampler  # has the numbers also where the user passed it to DataLoader ready-made
    seed = seed if own_seed is None else mix(seed, own_seed)
    converted = with_settings_of(loader, batches.batch_size, drop_last=batches.drop_last, seed=seed, **order)
    converted._sampler.whole_rounds = whole_rounds
    return converted


def with_settings_of(loader: DataLoader[Any], batch_size: int, **order: Any) -> ResumableLoader:
    """A resumable loader with the data set, the workers and the functions of `loader`.

    order: arguments of `ResumableLoader` that say which samples come when.
    """
    names = ["num_workers", "worker_init_fn", "collate_fn", "pin_memory", "timeout"]
    if loader.num_workers:
        names += ["prefetch_factor", "persistent_workers", "multiprocessing_context"]
    settings = {name: getattr(loader, name) for name in names}
    return ResumableLoader(loader.dataset, batch_size, **settings, **order)


def stock_order(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Arguments that make a `ResumableLoader` visit the same samples; None: the order is not one of torch's own."""
    if not (
        _plain_kind(loader.batch_sampler) is BatchSampler
        and not isinstance(loader.dataset, IterableDataset)
        and hasattr(type(loader.dataset), "__len__")
    ):
        return None
    batches: Any = loader.batch_sampler
    sampler: Any = batches.sampler
    kind = _plain_kind(sampler)
    order: dict[str, Any] = {"shuffle": False, "whole_rounds": False, "own_seed": None}
    if kind is DistributedSampler:
        source = sampler.dataset
        order |= {
            "shuffle": sampler.shuffle,
            "rank": sampler.rank,
            "world_size": sampler.num_replicas,
            "whole_rounds": sampler.drop_last,
            "own_seed": sampler.seed or None,
        }
    elif kind is RandomSampler:
        source = sampler.data_source
        generator = sampler.generator
        order["shuffle"] = True
        if isinstance(generator, torch.Generator):
            order["own_seed"] = generator.initial_seed()
        if sampler.replacement or sampler.num_samples != len(source):
            return None
    elif kind is SequentialSampler:
        source = sampler.data_source
    else:
        return None
    return order if source is loader.dataset or length_of(source) == length_of(loader.dataset) else None


def _plain_kind(sampler: Any) -> type:
    """The class of torch's that a sampler of torchdata's stands for, else its own."""
    kind = type(sampler)
    if is_torchdata(kind):
        return {
            "BatchSampler": BatchSampler,
            "RandomSampler": RandomSampler,
            "StatefulDistributedSampler": DistributedSampler,
        }.get(kind.__name__, kind)
    return kind
