"""Tells whether tensors of the program have changed between two looks, by version counters and a few elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.weight_samples import WeightSample, same_elements, sample_of
from mindx_elastic.guard.checks.unnamed_optimizers import storage_of

__all__ = ["TensorsLook", "is_sharded_in_part"]


def is_sharded_in_part(module: nn.Module) -> bool:
    """Whether FSDP2 has some of a module's parameters whole at the moment: then they cannot be compared."""
    if not any(each.__name__ == "FSDPModule" for child in module.modules() for each in type(child).__mro__):
        return False
    return not all(isinstance(parameter, DTensor) for parameter in module.parameters())


class TensorsLook(NamedTuple):
    """Some tensors as they are now."""

    sample: WeightSample
    places: Sequence[int | None]

    @classmethod
    def at(cls, tensors: Sequence[torch.Tensor]) -> TensorsLook:
        return cls(sample_of(tensors), list(map(storage_of, tensors)))

    def has_moved(self, now: TensorsLook) -> bool:
        """Whether they have changed. A version counter that moved with the tensor (`to` another device) does not count:
        what is in them does."""
        if len(now.places) != len(self.places):
            return False  # others
        before = zip(self.places, self.sample.versions, strict=True)
        after = zip(now.places, now.sample.versions, strict=True)
        written = any(b[0] == a[0] and b[1] != a[1] for b, a in zip(before, after, strict=True))
        return written or not same_elements(self.sample, now.sample)
