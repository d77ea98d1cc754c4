"""Tells whether objects of the program have moved between two looks: tensors by version counters and a few elements,
generators by their state, schedulers and scalers by their counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.weight_samples import WeightSample, same_elements, sample_of
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.checks.named_state import NamedState
from mindx_elastic.guard.checks.unnamed_optimizers import storage_of

__all__ = ["GeneratorLook", "TensorsLook", "kept_anyway", "scale_of", "steps_of"]


class TensorsLook(NamedTuple):
    """Some tensors as they are now."""

    sample: WeightSample
    places: Sequence[int | None]

    @classmethod
    def at(cls, tensors: Sequence[torch.Tensor]) -> TensorsLook:
        return cls(sample_of(tensors), list(map(storage_of, tensors)))

    @classmethod
    def of_module(cls, module: nn.Module, kept: NamedState) -> tuple[TensorsLook, TensorsLook] | None:
        """The parameters and the buffers of a module that are not kept. None: FSDP2 has some of its parameters whole at
        the moment, so they cannot be compared."""
        is_fsdp = any(each.__name__ == "FSDPModule" for child in module.modules() for each in type(child).__mro__)
        if is_fsdp and not all(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return None
        parameters, buffers = kept.missing(module)
        return cls.at(parameters), cls.at(buffers)

    def has_moved(self, now: TensorsLook) -> bool:
        """Whether they have changed. A version counter that moved with the tensor (`to` another device) does not count:
        what is in them does."""
        if len(now.places) != len(self.places):
            return False  # others
        before = zip(self.places, self.sample.versions, strict=True)
        after = zip(now.places, now.sample.versions, strict=True)
        written = any(b[0] == a[0] and b[1] != a[1] for b, a in zip(before, after, strict=True))
        return written or not same_elements(self.sample, now.sample)


class GeneratorLook(NamedTuple):
    """A generator's state as it is now."""

    state: Any
    seed: object
    """What is the same as long as the generator has not been seeded again. Of a Mersenne twister: the 624 words that
    the next numbers are made of, which go on to others, too."""

    @classmethod
    def at(cls, generator: Any) -> GeneratorLook | None:
        """None for a generator whose state cannot be read."""
        try:
            if isinstance(generator, torch.Generator):
                return cls(bytes(generator.get_state().numpy()), generator.initial_seed())
            if isinstance(generator, random.Random):
                *words, place = random.Random.getstate(generator)[1]
                return cls(place, words)
            if isinstance(generator, np.random.RandomState):
                _, words, place, *_ = generator.get_state(legacy=True)
                return cls(place, np.asarray(words).tobytes())
            bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
            state = bits.state
            inner = state.get("state")
            return cls(repr(state), (type(bits), inner.get("inc") if isinstance(inner, dict) else None))
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
            return None

    def shows_draws(self, now: GeneratorLook) -> bool:
        """Whether numbers were drawn until `now`, for certain."""
        if self.seed != now.seed:
            return False
        return bool(self.state < now.state) if type(self.state) is int else self.state != now.state


def steps_of(scheduler: object) -> int:
    """How many steps it has made, as far as it says so."""
    attributes = attributes_of(scheduler)
    number = attributes.get("_step_count", attributes.get("last_epoch", 0))
    return number if isinstance(number, int) else 0


def scale_of(scaler: Any) -> tuple[float, int] | None:
    """How a GradScaler stands; None while it is unused or switched off."""
    attributes = attributes_of(scaler)
    scale, tracker = attributes.get("_scale"), attributes.get("_growth_tracker")
    if not attributes.get("_enabled") or not torch.is_tensor(scale) or not torch.is_tensor(tracker):
        return None
    return float(scale.item()), int(tracker.item())


def kept_anyway() -> set[int]:
    """The `id` of the global generators."""
    numpys = np.random.mtrand._rand
    devices = torch.cuda.default_generators if torch.cuda.is_available() else ()
    return set(map(id, (torch.default_generator, random._inst, numpys, numpys._bit_generator, *devices)))
