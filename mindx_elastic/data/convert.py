"""Turns a plain loader into one that resumes."""

from __future__ import annotations

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

from mindx_elastic.data.loader import ResumableLoader
from mindx_elastic.data.permutation import mix
from mindx_elastic.data.replay import ReplayLoader

__all__ = ["from_loader"]


def from_loader(loader: Any, seed: int = 0) -> ResumableLoader | ReplayLoader:
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
    if isinstance(loader, (ResumableLoader, ReplayLoader)):
        return loader
    order = _stock_order(loader) if isinstance(loader, DataLoader) else None
    if order is None:
        return ReplayLoader(loader, seed=seed)
    whole_rounds = order.pop("whole_rounds")
    own_seed = order.pop("own_seed")
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    batches: Any = loader.batch_sampler  # has the numbers also where the user passed it to DataLoader ready-made
    converted = ResumableLoader(
        loader.dataset,
        batches.batch_size,
        seed=seed if own_seed is None else mix(seed, own_seed),
        num_workers=loader.num_workers,
        drop_last=batches.drop_last,
        worker_init_fn=loader.worker_init_fn,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        **workers,
        **order,
    )
    converted._sampler.whole_rounds = whole_rounds
    return converted


def _stock_order(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Arguments that make a `ResumableLoader` visit the same samples; None: the order is not one of torch's own."""
    if not (
        type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
        and type(loader.batch_sampler) is BatchSampler
        and not isinstance(loader.dataset, IterableDataset)
        and hasattr(loader.dataset, "__len__")
    ):
        return None
    batches: Any = loader.batch_sampler
    sampler: Any = batches.sampler
    kind = type(sampler)
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
    return order if source is loader.dataset or len(source) == len(loader.dataset) else None
