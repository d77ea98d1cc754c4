"""Tells of an object around a named optimizer with a state of its own, which only its own state_dict has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from mindx_elastic.core.looks import attributes_of, has_method
from mindx_elastic.guard.checks.surroundings import program_frames
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["tell_of_wrappers"]

_OF_TORCH = {"state", "param_groups"}


def tell_of_wrappers(
    optimizers: Mapping[str, torch.optim.Optimizer],
    targets: Mapping[str, object],
    frame: FrameType | None,
    unmanaged: Unmanaged,
) -> None:
    """optimizers: the named ones. targets: what the guard was given. frame: where the program entered it.

    One of torch's optimizers shows when it steps (`strangers`); this is about classes that are none.
    """
    kept = set(map(id, targets.values()))
    inner = {id(optimizer): name for name, optimizer in optimizers.items()}
    for variable, value in _variables(frame):
        if id(value) in kept or isinstance(value, torch.optim.Optimizer):
            continue
        if not has_method(value, "step", "zero_grad", "state_dict", "load_state_dict"):
            continue
        name = next((inner[id(held)] for held in attributes_of(value).values() if id(held) in inner), None)
        state = value.state_dict() if name is not None else None
        if isinstance(state, dict) and not state.keys() <= _OF_TORCH:
            unmanaged.risk(
                f'"{variable}" ({type(value).__name__}) is around {name} and has a state of its own, which is not kept',
                f"Name it in place of the inner one: Guard(optimizer={variable}, ...)",
            )


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    for each in program_frames(frame):
        for name, value in [*each.f_locals.items()]:
            yield name, value
            if name == "self":
                yield from ((f"self.{key}", item) for key, item in attributes_of(value).items())
