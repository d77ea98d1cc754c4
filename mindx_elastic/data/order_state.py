"""State of a sampler, a loader or an iterable data set that decides its order, as values a checkpoint can hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture_part", "restore_part"]


def capture_part(part: Any, *, own_state: bool = True) -> dict[str, Any]:
    """The random generators among the attributes of `part`, its ``epoch`` and (`own_state`) its ``state_dict()``."""
    found: dict[str, Any] = {
        "rngs": {name: _rng_state(value) for name, value in _attributes(part).items() if _is_rng(value)}
    }
    epoch = _attributes(part).get("epoch")
    if isinstance(epoch, int):
        found["epoch"] = epoch
    if own_state and _keeps_state(part):
        found["state"] = copy.deepcopy(part.state_dict())
    return found


def restore_part(part: Any, found: Mapping[str, Any]) -> None:
    """Put back what `capture_part` found; what is no longer there is left out."""
    if "state" in found and _keeps_state(part):
        part.load_state_dict(copy.deepcopy(found["state"]))
    if "epoch" in found and isinstance(_attributes(part).get("epoch"), int):
        if hasattr(part, "set_epoch"):
            part.set_epoch(found["epoch"])
        else:
            part.epoch = found["epoch"]
    for name, state in found.get("rngs", {}).items():
        rng = _attributes(part).get(name)
        if _is_rng(rng):
            _set_rng_state(rng, state)


def _attributes(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {})


def _keeps_state(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _is_rng(value: Any) -> bool:
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def _rng_state(rng: Any) -> Any:
    if isinstance(rng, torch.Generator):
        return rng.get_state()
    if isinstance(rng, np.random.Generator):
        return rng.bit_generator.state
    if isinstance(rng, np.random.RandomState):
        return rng.get_state()
    return rng.getstate()


def _set_rng_state(rng: Any, state: Any) -> None:
    if isinstance(rng, torch.Generator):
        rng.set_state(state)
    elif isinstance(rng, np.random.Generator):
        rng.bit_generator.state = state
    elif isinstance(rng, np.random.RandomState):
        rng.set_state(state)
    else:
        rng.setstate(state)
