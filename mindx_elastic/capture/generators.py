"""Random generators that a program has: their state, and how it is put back into the very generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from mindx_elastic.errors import MismatchError, UsageError

__all__ = ["GENERATORS", "Stateful", "check_kind", "generator_adapter", "with_state"]

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState)


class Stateful(Protocol):
    """Anything that can give its state and take it back, into the very object. An adapter does so for another object,
    and what it gives shares nothing with that."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class _Generator:
    """One whose state is an object that it gives and takes."""

    def __init__(self, name: str, kind: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._name, self._kind, self._get, self._put = name, kind, get, put

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._kind, "state": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(self._name, state, self._kind)
        self._put(state["state"])


class _TorchGenerator(_Generator):
    def __init__(self, name: str, generator: torch.Generator) -> None:
        super().__init__(name, "torch.Generator", generator.get_state, generator.set_state)
        self._device = generator.device.type

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "device": self._device}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(self._name, state, self._kind)
        if (there := state.get("device", self._device)) != self._device:
            raise MismatchError(
                f"{self._name}: the checkpoint holds a generator on {there}, this one is on {self._device}; make it "
                f"with torch.Generator(device={there!r})"
            )
        super().load_state_dict(state)


def _python_random(name: str, generator: random.Random) -> _Generator:
    try:
        generator.getstate()
    except NotImplementedError:
        raise UsageError(
            f"{name} is a {type(generator).__name__}, which draws from the operating system and cannot be resumed: "
            "use random.Random(seed)"
        ) from None
    return _Generator(name, "random.Random", generator.getstate, generator.setstate)


class _NumpyGenerator:
    """`numpy.random.Generator`, or a bit generator by itself."""

    def __init__(self, name: str, bits: Any) -> None:
        self._name, self._bits = name, bits

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "numpy.random.Generator", "state": self._bits.state, "seeds": _seed_sequence(self._bits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(self._name, state, "numpy.random.Generator")
        there, here = state["state"]["bit_generator"], type(self._bits).__name__
        if there != here:
            raise MismatchError(f"{self._name}: the checkpoint holds a {there}, this generator's bits come from {here}")
        self._bits.state = state["state"]
        if (seeds := state["seeds"]) not in (None, _seed_sequence(self._bits)):
            # The interrupted process has spawned from them, or they came from the operating system.
            self._bits.__setstate__((self._bits.state, np.random.SeedSequence(**seeds)))


def generator_adapter(name: str, target: object) -> Stateful | None:
    if isinstance(target, torch.Generator):
        return _TorchGenerator(name, target)
    if isinstance(target, random.Random):
        return _python_random(name, target)
    if isinstance(target, np.random.Generator):
        return _NumpyGenerator(name, target.bit_generator)
    if isinstance(target, np.random.BitGenerator):
        return _NumpyGenerator(name, target)
    if isinstance(target, np.random.RandomState):
        return _Generator(name, "numpy.random.RandomState", partial(target.get_state, legacy=False), target.set_state)
    return None


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
