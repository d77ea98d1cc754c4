"""Splits the state of each object of the job into a stable and a volatile part, and puts it back.

A component has three methods: `copy` its volatile part at a boundary (training thread, every step, microseconds),
`state` = live stable part + that copy (any thread, holding the update gate), and `load` (at the start).

* a module: parameters are stable and read in place; buffers (BatchNorm changes them in forward) and extra state are
  copied
* an optimizer: its state is stable; the options of its groups (learning rate) are copied, schedulers change them
  between
* everything else with ``state_dict``, or with an adapter (`capture.adapters`): copied whole
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from mindx_elastic.capture.adapters import adapted
from mindx_elastic.capture.module_component import ModuleComponent, unwrap_module
from mindx_elastic.capture.optimizer_component import OptimizerComponent, unwrap_optimizer
from mindx_elastic.capture.plain_component import PlainComponent, Stateful
from mindx_elastic.errors import UsageError

__all__ = [
    "Component",
    "ModuleComponent",
    "OptimizerComponent",
    "PlainComponent",
    "Stateful",
    "component_for",
    "unwrap_module",
    "unwrap_optimizer",
]


class Component(Protocol):
    """One object of the job; see the module."""

    KEPT_IN: str
    """The attribute with its copied state, buffers apart."""

    def copy(self) -> None: ...
    def state(self) -> Any: ...
    def load(self, state: Any) -> None: ...


def component_for(name: str, target: object) -> Component:
    """The component for `target`. Raises UsageError when it has neither ``state_dict`` nor an adapter."""
    if isinstance(target, nn.Module):
        return ModuleComponent(name, target)
    if isinstance(target, torch.optim.Optimizer):
        return OptimizerComponent(name, target)
    if isinstance(target, Stateful):
        return PlainComponent(name, target)
    if (adapter := adapted(name, target)) is not None:
        return PlainComponent(name, target, adapter)
    raise UsageError(
        f"{name} is a {type(target).__name__} without state_dict() and load_state_dict(); its state could not be "
        "resumed: give it both methods, or leave it out"
    )
