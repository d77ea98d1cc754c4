"""Batches of a DataLoader without workers, made in the thread that asks for them.

torch's own iterator for that keeps a record for a profiler around each batch, running or not; without it and the rest
of its frame a small sample is loaded in three quarters of the time. Here there is a record while a profiler runs. What
else torch's iterator has to do (pinned memory, data pipes, time-outs that it refuses) is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, MapDataPipe

from mindx_elastic.data.random_streams import SeededDataset
from mindx_elastic.data.sampler import ResumableBatchSampler

__all__ = ["InProcessBatches", "can_be_in_process"]

_PROFILED_AS = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled


def can_be_in_process(loader: Any) -> bool:
    """Whether `InProcessBatches` gives what ``iter(loader)`` would. (torch's also draws a seed for workers, of which
    there are none, from the loader's own generator.)"""
    return (
        type(loader) is DataLoader
        and loader.num_workers == 0
        and not loader.timeout
        and not loader.pin_memory
        and isinstance(loader.batch_sampler, ResumableBatchSampler)  # its order draws from no stream
        and not isinstance(loader.dataset, MapDataPipe)
    )


class InProcessBatches(Iterator[Any]):
    """Any one thread at a time."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        """`loader`: one that `can_be_in_process`."""
        self._next_keys = iter(loader.batch_sampler).__next__  # type: ignore[arg-type]
        assert isinstance(loader.dataset, SeededDataset)  # it collates, too
        self._fetch: Callable[[Any], Any] = loader.dataset.__getitems__

    def __next__(self) -> Any:
        if _is_profiled():
            with torch.autograd.profiler.record_function(_PROFILED_AS):
                return self._fetch(self._next_keys())
        return self._fetch(self._next_keys())
