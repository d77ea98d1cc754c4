"""Random generators that a program has: their state, and how it is put back into the very generator."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch

from mindx_elastic.errors import MismatchError, UsageError

__all__ = ["GENERATORS", "GeneratorAdapter", "Stateful", "check_kind", "generator_adapter", "with_state"]

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState)
_TORCH, _PYTHON, _NUMPY, _OLD_NUMPY = (
    "torch.Generator",
    "random.Random",
    "numpy.random.Generator",
    "numpy.random.RandomState",
)
"""The kinds in a checkpoint; a bit generator by itself is one of numpy's."""


class Stateful(Protocol):
    """Anything that can give its state and take it back, into the very object. An adapter does so for another object,
    and what it gives shares nothing with that."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class GeneratorAdapter:
    """One of the `GENERATORS`."""

    def __init__(self, name: str, generator: Any) -> None:
        """Raises UsageError for one that has no state."""
        self._name, self._generator = name, generator
        if isinstance(generator, random.SystemRandom):
            raise UsageError(
                f"{name} is a {type(generator).__name__}, which draws from the operating system and cannot be resumed: "
                "use random.Random(seed)"
            )

    def state_dict(self) -> dict[str, Any]:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"kind": _TORCH, "state": generator.get_state(), "device": generator.device.type}
        if isinstance(generator, random.Random):
            return {"kind": _PYTHON, "state": generator.getstate()}
        if isinstance(generator, np.random.RandomState):
            return {"kind": _OLD_NUMPY, "state": generator.get_state(legacy=False)}
        bits = _bits_of(generator)
        return {"kind": _NUMPY, "state": bits.state, "seeds": _seed_sequence(bits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        generator, now = self._generator, self.state_dict()
        check_kind(self._name, state, now["kind"])
        if isinstance(generator, torch.Generator):
            if (there := state.get("device", now["device"])) != now["device"]:
                raise MismatchError(
                    f"{self._name}: the checkpoint holds a generator on {there}, this one is on {now['device']}; make "
                    f"it with torch.Generator(device={there!r})"
                )
            generator.set_state(state["state"])
        elif isinstance(generator, random.Random):
            generator.setstate(state["state"])
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state["state"])
        else:
            self._load_bits(state)

    def _load_bits(self, state: dict[str, Any]) -> None:
        bits = _bits_of(self._generator)
        there, here = state["state"]["bit_generator"], type(bits).__name__
        if there != here:
            raise MismatchError(f"{self._name}: the checkpoint holds a {there}, this generator's bits come from {here}")
        bits.state = state["state"]
        if (seeds := state["seeds"]) not in (None, _seed_sequence(bits)):
            # The interrupted process has spawned from them, or they came from the operating system.
            bits.__setstate__((bits.state, np.random.SeedSequence(**seeds)))


def generator_adapter(name: str, target: object) -> GeneratorAdapter | None:
    """None: it is no random generator."""
    return GeneratorAdapter(name, target) if isinstance(target, GENERATORS) else None


def _bits_of(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def with_state(live: object, state: dict[str, Any], name: str) -> object:
    """`live` with a generator's `state`; a new generator where it is none of that kind (a list that has grown)."""
    adapter = generator_adapter(name, live)
    if adapter is None:
        live = _made(state, name)
        adapter = generator_adapter(name, live)
        assert adapter is not None
    adapter.load_state_dict(state)
    return live


def _made(state: dict[str, Any], name: str) -> object:
    kind = state["kind"]
    if kind == "torch.Generator":
        return torch.Generator(device=state["device"])
    if kind == "random.Random":
        return random.Random()
    if kind == "numpy.random.RandomState":
        return np.random.RandomState()
    bits = getattr(np.random, state["state"]["bit_generator"], None)
    if isinstance(bits, type) and issubclass(bits, np.random.BitGenerator):
        return np.random.Generator(bits())
    raise MismatchError(f"{name}: the checkpoint holds a random generator of numpy, and the program has none there")


def check_kind(name: str, state: Any, kind: str) -> None:
    there = state.get("kind") if isinstance(state, dict) else None
    if there != kind:
        raise MismatchError(
            f"{name}: this is a {kind}, and the checkpoint holds the state of {there or 'another type'}"
        )


def _seed_sequence(bits: Any) -> dict[str, Any] | None:
    """What `spawn` of a numpy generator counts; None where there is no such sequence (older numpy, own types)."""
    seeds = getattr(bits, "seed_seq", None)
    if not isinstance(seeds, np.random.SeedSequence):
        return None
    state: dict[str, Any] = dict(seeds.state)
    if not isinstance(state["entropy"], (int, type(None))):
        state["entropy"] = [int(word) for word in state["entropy"]]
    return state
