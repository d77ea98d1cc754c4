"""Finds weights of a named loader's sampler that follow the training.

A loader begins a resumed epoch again as it began. Weights that were changed within an epoch are not there then; those
that the head of an epoch sets are, for that runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import WeightedRandomSampler

from mindx_elastic.core.looks import has_method
from mindx_elastic.data import ReplayLoader

__all__ = ["WeightsOfSamplers"]


def _parts(loaders: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Samplers and data sets that decide an order and have no state of their own for a checkpoint."""
    for loader in loaders:
        if isinstance(loader, ReplayLoader):
            for name, part in loader._parts().items():
                if name != "loader" and not has_method(part, "state_dict"):
                    yield name, part


@dataclass
class _Weights:
    tensor: weakref.ref[torch.Tensor]
    version: int
    epoch: int


class WeightsOfSamplers:
    """Watches the `WeightedRandomSampler` of each named loader. One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[int, _Weights] = {}
        self._done: set[int] = set()

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    def look(
        self, loaders: Iterable[Any], epoch: int, is_kept: Callable[[torch.Tensor], bool]
    ) -> Iterator[tuple[str, str]]:
        """What is known against the named loaders, and what to write."""
        for name, sampler in _parts(loaders):
            if not isinstance(sampler, WeightedRandomSampler) or not isinstance(sampler.weights, torch.Tensor):
                continue
            key, weights = id(sampler), sampler.weights
            if key in self._done or is_kept(weights):
                continue
            old = self._before.get(key)
            self._before[key] = _Weights(weakref.ref(weights), weights._version, epoch)
            if old is None or old.epoch != epoch:
                continue
            if old.tensor() is not weights or old.version != weights._version:
                self._done.add(key)
                what = f"the weights of loader.{name} (WeightedRandomSampler) change in the training and are not kept"
                remedy = (
                    "Change them in place, after the inner loop: sampler.weights.copy_(weights), and write "
                    'Guard(stateful={"sampler_weights": sampler.weights, ...}, ...) with whatever they are made of; or '
                    "set them at the head of each epoch, from what the guard keeps"
                )
                yield what, remedy
