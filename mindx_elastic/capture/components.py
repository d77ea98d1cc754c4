"""Splits the state of each object of the job into a stable and a volatile part, and puts it back.

A component has these methods: `copy` its volatile part at a boundary (training thread, every step, microseconds),
`state` = live stable part + that copy (any thread, holding the update gate), and `load` (at the start). `kept` gives
the last copy, which is never changed in place, and `go_back` makes an older one count, where the devices lag
the program (`capture.device_progress`).

* a module: parameters are stable and read in place; buffers (BatchNorm changes them in forward) and extra state are
  copied
* an optimizer: its state is stable; the options of its groups (learning rate) are copied, schedulers change them
  between
* an optimizer around others whose state has another form: by its own two methods, its tensors in place; one without a
  its own state: what it holds, each by itself, and what it counts
* everything else with ``state_dict``, or with an adapter (`capture.adapters`): copied whole
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import nn

from mindx_elastic.capture.adapters import NO_STATE, adapted
from mindx_elastic.capture.copying import tensors_in
from mindx_elastic.capture.extra_state import OwnAttributes
from mindx_elastic.capture.module_component import ModuleComponent, unwrap_module
from mindx_elastic.capture.names import optimizers_inside
from mindx_elastic.capture.optimizer_component import OptimizerComponent, has_state_of_torch
from mindx_elastic.capture.plain_component import (
    AdaptedComponent,
    PlainComponent,
    ScalerComponent,
    Stateful,
    WrapperComponent,
    is_plain_scaler,
    is_stateful,
)
from mindx_elastic.core.looks import attributes_of, defines, has_attributes, has_method, items_of
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import MismatchError, UsageError

__all__ = [
    "AdaptedComponent",
    "Component",
    "ModuleComponent",
    "OptimizerComponent",
    "PlainComponent",
    "Stateful",
    "WrapperComponent",
    "component_for",
    "unwrap_module",
]

_LIVES_BY_ITSELF = re.compile(r"(model|optimizer|loader)(_\d+)?")
"""Names of what is more than its attributes: without its own `state_dict` it is refused."""


class Component(Protocol):
    """One object of the job; see the module."""

    def copy(self) -> None: ...
    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...
    def kept(self) -> Any: ...
    def go_back(self, kept: Any) -> None: ...


def _has_state_of_torch(name: str, target: torch.optim.Optimizer) -> bool:
    try:
        return has_state_of_torch(target)
    except Exception as error:  # some wrappers of before torch 2 never call Optimizer.__init__
        kind = type(target)
        raise UsageError(
            f"{name}: state_dict() of {kind.__module__}.{kind.__qualname__} fails by itself ({error}): use a version "
            f"of it that fits torch {torch.__version__}, or give its class the two methods"
        ) from error


def component_for(name: str, target: object, others: Collection[int] = ()) -> Component:
    """The component for `target`. Raises UsageError when it has neither ``state_dict`` nor an adapter.

    others: ids of the objects that have their own components.
    """
    if isinstance(target, nn.Module):
        return ModuleComponent(name, target)
    if isinstance(target, torch.optim.Optimizer) and _has_state_of_torch(name, target):
        return OptimizerComponent(name, target)
    if is_plain_scaler(target):
        return ScalerComponent(name, target)
    if _wraps_optimizers(name, target):
        return WrapperComponent(
            name, target, None if _has_own_state(target) else _ByParts(name, target, others), others
        )
    if is_stateful(target):
        return PlainComponent(name, target, others=others)
    if not _LIVES_BY_ITSELF.fullmatch(name) and (adapter := adapted(name, target, others)) is not None:
        return AdaptedComponent(name, target, adapter)
    raise UsageError(
        f"{name} is a {type(target).__name__} without state_dict() and load_state_dict(); its state could not be "
        f"resumed: {_instead(name, target)}"
    )


class _ByParts:
    """An optimizer wrapper without its own state (Noam's): what it holds, each by itself, and what it counts in
    plain attributes."""

    def __init__(self, name: str, wrapper: Any, others: Collection[int]) -> None:
        self._name = name
        held = [
            (f"{key}.{place}" if place is not None else key, each)
            for key, value in attributes_of(wrapper).items()
            for place, each in items_of(value) or [(None, value)]
            if has_attributes(each) and id(each) not in others and not isinstance(each, (torch.Tensor, *NO_STATE))
        ]
        self._parts = {place: component_for(f"{name}.{place}", each, others) for place, each in held}
        self._own = OwnAttributes(is_stable=True)
        self._own.set_owners({"": wrapper})

    def state_dict(self) -> dict[str, Any]:
        self._own.copy()
        for part in self._parts.values():
            part.copy()
        states = {place: part.state() for place, part in self._parts.items()}
        return {"parts": states, "own": self._own.state(tensor for _, tensor in tensors_in(states))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if differ := state["parts"].keys() ^ self._parts.keys():
            raise MismatchError(
                f"the checkpoint does not fit {self._name}: {listed(sorted(differ), 3)} is in only one of them"
            )
        for place, part in self._parts.items():
            part.load(state["parts"][place])
        self._own.load(state["own"])


def _wraps_optimizers(name: str, target: Any) -> bool:
    """Also one that is one of torch's and has a state of another form."""
    if isinstance(target, torch.optim.Optimizer):
        return True
    steps = has_method(target, "step") and (name.startswith("optimizer") or has_method(target, "zero_grad"))
    return steps and bool(optimizers_inside(target))


def _has_own_state(wrapper: Any) -> bool:
    """Whether its state is more than that of an optimizer inside, which it hands on."""
    if not defines(wrapper, "state_dict", "load_state_dict"):
        return False
    state = wrapper.state_dict()
    return not (isinstance(state, dict) and state.keys() == {"state", "param_groups"})


def _instead(name: str, target: object) -> str:
    inner = [key for key, value in attributes_of(target).items() if isinstance(value, nn.Module)]
    if not inner or not name.startswith("model"):
        return "give its class both methods, or name the object inside that has them"
    content = f"model.{inner[0]}" if name == "model" else f"[..., model.{inner[0]}, ...]"
    return f"give what it wraps, Guard(model={content}, ...), or its class both methods"
