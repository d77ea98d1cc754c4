"""Hugging Face Accelerate: a guard for what `accelerator.prepare` has returned.

::

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with integrations.accelerate.guard(accelerator, directory="ckpt") as guard:
        for epoch in guard.epochs(4):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                guard.step_end()

Accelerate's own loader fetches one batch ahead, draws its order from torch's stream, and skips batches by loading
them. So the prepared loader stays the same object, and gives the batches of a `ResumableLoader` with its settings.

Private places of accelerate: `Accelerator._models`, ``_optimizers``, ``_schedulers``, ``_dataloaders``,
``_custom_objects``; `DataLoaderShard` and its ``begin`` and ``end``; `BatchSamplerShard`, `SeedableRandomSampler`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, data_loader
from accelerate.utils import DistributedType, broadcast_object_list, send_to_device
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from mindx_elastic.data import ReplayLoader
from mindx_elastic.data.loader import with_settings_of
from mindx_elastic.data.position import num_batches
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.guard import Guard
from mindx_elastic.integrations.layer import check_library, with_names_of

__all__ = ["follow", "guard"]

_TRIED = ("1.15",)
_KEPT = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_KEY, _FIRST_EPOCH = "_mindx_resumable", "_mindx_first_epoch"
_MASK = (1 << 63) - 1


def guard(
    accelerator: Accelerator, *, loader: Any = None, stateful: Mapping[str, Any] | None = None, **options: Any
) -> Guard:
    """A `mindx_elastic.Guard` for all that `accelerator` has prepared.

    Args:
        accelerator: after `prepare`. Its models, optimizers, schedulers, gradient scaler, accumulation counter and the
            objects of `register_for_checkpointing` are kept.
        loader: the prepared loader of the training, or a list of them; None: the only one that was prepared. From now
            on it gives its batches in its own order, a function of (seed, epoch), where the seed is that of
            torch's stream on rank 0. Loaders of an evaluation are read in ``with guard.outside_step():``.
        stateful, options: as for `mindx_elastic.Guard`.

    Every rank calls it, in the main thread: ranks agree on the seed. Raises UsageError where accelerate has another
    version than is known, or something was prepared that cannot be kept.
    """
    _check(accelerator)
    chosen = _training_loaders(accelerator, loader)
    agreed: list[Any] = [torch.initial_seed() & _MASK]
    broadcast_object_list(agreed)
    followed = [follow(each, agreed[0]) for each in chosen]
    registered = {f"registered_{n}": each for n, each in enumerate(accelerator._custom_objects)}
    return Guard(
        model=list(accelerator._models) or None,
        optimizer=[each.optimizer for each in accelerator._optimizers] or None,
        lr_scheduler=[each.scheduler for each in accelerator._schedulers] or None,
        scaler=accelerator.scaler,
        loader=followed[0] if len(followed) == 1 else followed or None,
        stateful=with_names_of({"accelerate": _Counter(accelerator), **registered}, stateful),
        **options,
    )


class _Counter:
    """The place in an accumulation window."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        # The next folder of `save_state`: accelerate raises where it is there.
        folders = Path(str(self._accelerator.project_dir), "checkpoints").glob("checkpoint_*")
        numbers = [name for each in folders if (name := each.name.rpartition("_")[2]).isdecimal()]
        self._accelerator.project_configuration.iteration = max((int(each) + 1 for each in numbers), default=0)


# --- what cannot be kept ---


def _check(accelerator: Accelerator) -> None:
    names = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "step", "scaler",
             "project_configuration", "project_dir", "accumulate", "register_for_checkpointing")  # fmt: skip
    loaders = ("DataLoaderShard.begin", "DataLoaderShard.end", "DataLoaderDispatcher", "BatchSamplerShard")
    check_library("accelerate", _TRIED, (accelerator, names), (data_loader, (*loaders, "SeedableRandomSampler")))
    if accelerator.distributed_type not in _KEPT:
        raise UsageError(
            f"accelerate's {accelerator.distributed_type.value} is not kept by this integration: prepare for one "
            "process, or for DistributedDataParallel"
        )
    if not accelerator._models:
        raise UsageError("call accelerator.prepare(...) first: the guard keeps what that has returned")


def _training_loaders(accelerator: Accelerator, given: Any) -> list[Any]:
    prepared = list(accelerator._dataloaders)
    if given is None:
        if len(prepared) > 1:
            raise UsageError(
                f"{len(prepared)} loaders were prepared: say which one the training reads, "
                "guard(accelerator, loader=train_loader, ...)"
            )
        return prepared
    chosen = list(given) if isinstance(given, (list, tuple)) else [given]
    for each in chosen:
        if not any(each is known for known in prepared):
            raise UsageError(
                f"loader={type(each).__name__}: give what accelerator.prepare(loader) has returned; the training "
                "iterates that, too"
            )
    return chosen


# --- the loader ---


def follow(shard: Any, seed: int, *, first_epoch: int = 1) -> Any:
    """Let `shard`, a loader that accelerate has prepared, give the batches of a resumable loader. Returns that.

    seed: of its order, the same on all ranks. first_epoch: the number that the program gives to the first epoch in
    ``shard.set_epoch``. Raises UsageError for a loader whose position cannot be known.
    """
    if not issubclass(type(shard), data_loader.DataLoaderShard):
        raise UsageError(
            f"the prepared loader is a {type(shard).__name__}, whose batches come from rank 0 and know no position; "
            "write Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
        )
    known = vars(shard).get(_KEY)
    if known is not None:  # a second guard
        return known
    resumable = _resumable(shard, seed)
    resumable._takes_first_seed = True
    vars(shard)[_KEY], vars(shard)[_FIRST_EPOCH] = resumable, first_epoch
    # `DataLoaderShard.__class__` is a property that names the class of the loader inside.
    object.__dict__["__class__"].__set__(shard, _followed_kind(type(shard)))
    return resumable


def _followed_kind(kind: type) -> type:
    class Followed(kind):
        """A prepared loader: accelerate's side of it (device, end of the epoch), with the batches of ours."""

        def __iter__(self) -> Iterator[Any]:
            ours = vars(self)[_KEY]
            self.begin()
            try:
                for batch, is_last in _with_last(ours):
                    self.end_of_dataloader = is_last
                    if self.device is None:
                        yield batch
                    else:
                        yield send_to_device(batch, self.device, non_blocking=self._non_blocking)
                self.iteration += 1
            finally:
                self.end()

        def __len__(self) -> int:
            return len(vars(self)[_KEY])

        def set_epoch(self, epoch: int) -> None:
            vars(self)[_KEY].set_epoch(epoch + 1 - vars(self)[_FIRST_EPOCH])

    Followed.__name__, Followed.__qualname__, Followed.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Followed


def _with_last(ours: Any) -> Iterator[tuple[Any, bool]]:
    """Its batches, and whether each is the last one of its epoch."""
    if num_batches(ours):
        for batch in ours:
            yield batch, ours.is_last
        return
    batches, nothing = iter(ours), object()  # only the end of a stream tells: one is read ahead, as accelerate does
    batch = next(batches, nothing)
    while batch is not nothing:
        following = next(batches, nothing)
        yield batch, following is nothing
        batch = following


def _resumable(shard: Any, seed: int) -> Any:
    """As `mindx_elastic.data.from_loader`, for a loader that accelerate has divided over the ranks."""
    inner: DataLoader[Any] = shard.base_dataloader
    batches: Any = inner.batch_sampler
    split, even, rank, world_size = False, True, 0, 1
    if isinstance(batches, data_loader.BatchSamplerShard):
        split, even = batches.split_batches, batches.even_batches
        rank, world_size = batches.process_index, batches.num_processes
        batches = batches.batch_sampler
    order = _stock_order(inner, batches)
    if order is None:
        return ReplayLoader(inner, seed=seed)
    if not even and world_size > 1:
        raise UsageError(
            "even_batches=False: ranks would have different numbers of batches, and no step that all of them end; "
            "leave it at True, or write drop_last=True"
        )
    per_rank = batches.batch_size // world_size if split else batches.batch_size
    loader = with_settings_of(
        inner, per_rank, drop_last=batches.drop_last, shuffle=order, seed=seed, rank=rank, world_size=world_size
    )
    loader._sampler.filled_rounds = not batches.drop_last  # batches of equal size, which programs rely on
    return loader


def _stock_order(inner: DataLoader[Any], batches: Any) -> bool | None:
    """Whether the whole data set is shuffled; None: the order is another one."""
    if isinstance(inner.dataset, IterableDataset) or type(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) in (RandomSampler, data_loader.SeedableRandomSampler):
        return None if sampler.replacement or sampler.num_samples != len(sampler.data_source) else True
    return None
