"""Tells whether an object of the program has changed between two looks: a module or a generator.

A look copies a little: version counters, a few elements of some tensors, a generator's state. It changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.dtensors import local_part

__all__ = ["GeneratorLook", "Movement", "TensorsLook", "is_sharded_in_part"]

_SAMPLED_TENSORS = 24
_SAMPLED_ELEMENTS = 8


class Movement(Enum):
    """What has happened between two looks."""

    NONE = "nothing"
    MOVED = "moved"
    UNKNOWN = "changed, perhaps set anew by the program"


def is_sharded_in_part(module: nn.Module) -> bool:
    """Whether FSDP2 has some of a module's parameters whole at the moment: then they cannot be compared."""
    if not any(each.__name__ == "FSDPModule" for child in module.modules() for each in type(child).__mro__):
        return False
    return not all(isinstance(parameter, DTensor) for parameter in module.parameters())


@dataclass(frozen=True)
class TensorsLook:
    """Some tensors as they are now."""

    versions: tuple[int, ...]
    places: tuple[int, ...]
    sample: tuple[tuple[float | complex, ...], ...]

    @classmethod
    def at(cls, tensors: Sequence[torch.Tensor]) -> TensorsLook:
        own = [local_part(tensor) for tensor in tensors]
        every = max(1, len(own) // _SAMPLED_TENSORS)
        return cls(tuple(t._version for t in tensors), tuple(map(_place, own)), _samples(own[::every]))

    def movement(self, now: TensorsLook) -> Movement:
        """Whether they have changed. A version counter that moved with the tensor (`to` another device) does not count:
        what is in them does."""
        if len(now.versions) != len(self.versions):
            return Movement.UNKNOWN
        if repr(now.sample) != repr(self.sample):  # text: NaN is NaN
            return Movement.MOVED
        before = zip(self.versions, self.places, strict=True)
        after = zip(now.versions, now.places, strict=True)
        written = any(b[1] == a[1] and b[0] != a[0] for b, a in zip(before, after, strict=True))
        return Movement.MOVED if written else Movement.NONE


def _place(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # no storage of its own
        return 0


@torch.no_grad()
def _samples(tensors: Sequence[torch.Tensor]) -> tuple[tuple[float | complex, ...], ...]:
    """Some elements of each. Those of one device and type come in one copy, which is waited for once."""
    pieces = [_piece(tensor) for tensor in tensors]
    found: list[tuple[float | complex, ...]] = [()] * len(pieces)
    on_devices: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, piece in enumerate(pieces):
        if piece is not None and piece.is_cpu:
            found[number] = tuple(piece.tolist())
        elif piece is not None:
            on_devices.setdefault((piece.device, piece.dtype), []).append(number)
    for numbers in on_devices.values():
        parts: list[torch.Tensor] = [pieces[number] for number in numbers]  # type: ignore[misc]
        values = iter(torch.cat(parts).tolist())
        for number, part in zip(numbers, parts, strict=True):
            found[number] = tuple(islice(values, len(part)))
    return tuple(found)


def _piece(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[(0,) * tensor.ndim].reshape(-1)
    every = max(1, flat.numel() // _SAMPLED_ELEMENTS)
    return flat[::every][: 2 * _SAMPLED_ELEMENTS]


@dataclass(frozen=True)
class GeneratorLook:
    """A random generator's state."""

    kind: str
    state: Any
    seed: object = None
    """What is the same as long as the generator has not been seeded anew; None: not known."""

    @classmethod
    def at(cls, generator: Any) -> GeneratorLook | None:
        """None for a generator whose state cannot be read."""
        try:
            if isinstance(generator, torch.Generator):
                return cls("torch", bytes(generator.get_state().numpy()), generator.initial_seed())
            if isinstance(generator, random.Random):
                *keys, place = random.Random.getstate(generator)[1]
                return cls("twister", (keys, place))
            if isinstance(generator, np.random.RandomState):
                _, keys, place, *_ = _numpy_state(generator)
                return cls("twister", (np.asarray(keys).tobytes(), place))
            bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
            state = bits.state
            return cls("bits", repr(_plain(state)), _seed_of(state))
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
            return None

    def movement(self, now: GeneratorLook) -> Movement:
        """Whether numbers were drawn from it. `UNKNOWN` where it may have been seeded anew, by which a Mersenne twister
        gets other keys, as after 624 numbers."""
        if now.state == self.state:
            return Movement.NONE
        if now.kind != self.kind or now.seed != self.seed:
            return Movement.UNKNOWN
        if self.kind == "twister":
            (keys, place), (other_keys, other_place) = self.state, now.state
            return Movement.MOVED if keys == other_keys and place < other_place else Movement.UNKNOWN
        return Movement.MOVED


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _seed_of(state: Mapping[str, Any]) -> object:
    inner = state.get("state")
    return (state.get("bit_generator"), inner.get("inc") if isinstance(inner, Mapping) else None)


def _numpy_state(generator: np.random.RandomState) -> tuple[Any, ...]:
    return generator.get_state(legacy=True)  # type: ignore[return-value]  # a dict only without `legacy`
