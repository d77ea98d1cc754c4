"""The code around the steps of an epoch.

A run that is resumed in mid-epoch enters the loop at that epoch, so the code at its head runs once more: ``if epoch ==
30: group["lr"] *= 0.1``, ``prune(...)``, ``add_param_group(...)``, ``meter.reset()``. The boundary has all of that
already. When the first batch is fetched, whatever has been touched since the state was loaded is loaded once more
(`LoopHead`).

The rest is what `Collector.loop` says of the code after an epoch (the *tail*); `guard.loops.epoch_tail` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mindx_elastic.capture.components import Component, ModuleComponent, OptimizerComponent, PlainComponent
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.plain_component import GoesThroughData
from mindx_elastic.core.looks import asked

__all__ = [
    "CHANGES_WEIGHTS",
    "FRONT",
    "OVER",
    "VALUES",
    "LoopHead",
    "front_of",
    "names_of_tail_values",
    "tail_values_in",
    "without_end",
    "without_step",
]

OVER, VALUES, FRONT = "epoch_is_over", "tail_values", "in_front_of_tail"
"""The keys in `Collector.loop`."""
CHANGES_WEIGHTS = "changes_weights"
"""A key in what `FRONT` has."""

_Marks = list[tuple[torch.Tensor, int]]


class LoopHead:
    """Make it when the state has been loaded. Training thread."""

    def __init__(self, components: Mapping[str, Component]) -> None:
        self._components = {name: c for name, c in components.items() if not _is_loader(c)}
        self.begin()
        self._adding = [_AddedGroups(c) for c in components.values() if isinstance(c, OptimizerComponent)]

    def begin(self) -> None:
        """Everything is as it was loaded."""
        self._marks = {name: _marks_of(component) for name, component in self._components.items()}

    def touched(self) -> list[str]:
        """The objects that are not as they were loaded."""
        return [name for name, component in self._components.items() if self._is_touched(name, component)]

    def end(self) -> None:
        """The first boundary is near: from here on nothing is undone."""
        for adding in self._adding:
            adding.end()
        self._marks = {}  # they hold the optimizers' tensors of the start

    def _is_touched(self, name: str, component: Component) -> bool:
        now, then = _marks_of(component), self._marks[name]
        if len(now) != len(then) or any(a is not b or v != w for (a, v), (b, w) in zip(now, then, strict=True)):
            return True
        if isinstance(component, ModuleComponent):
            return component.structure.has_changed() or not same_tree(component.look(), component.extras)
        if isinstance(component, OptimizerComponent):
            return component.has_changed() or not same_tree(component.look(), component.groups)
        return isinstance(component, PlainComponent) and not same_tree(component.look(), component.seen)


class _AddedGroups:
    """Passes over an `add_param_group` for a group that a start has made again from the checkpoint."""

    def __init__(self, component: OptimizerComponent) -> None:
        self._optimizer = component.optimizer if component.added else None
        self._added = [frozenset(map(id, parameters)) for parameters in component.added]
        if self._optimizer is not None:
            self._original: Callable[[dict[str, Any]], None] = self._optimizer.add_param_group
            self._own = vars(self._optimizer).get("add_param_group")  # of the program, as a rule None
            vars(self._optimizer)["add_param_group"] = self._add

    def _add(self, group: dict[str, Any]) -> None:
        parameters = group["params"]
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        plain = [p[1] if isinstance(p, tuple) else p for p in listed]  # or with their names
        if frozenset(map(id, plain)) not in self._added:
            self._original({**group, "params": listed})

    def end(self) -> None:
        if self._optimizer is not None:
            vars(self._optimizer).pop("add_param_group", None)
            if self._own is not None:
                vars(self._optimizer)["add_param_group"] = self._own
            self._optimizer = None


def _is_loader(component: Component) -> bool:
    """Loaders keep their own position, and are what asks for all this. An object of the program that has a loader
    is none."""
    target = getattr(component, "target", None)
    return isinstance(target, GoesThroughData) or asked(target, "on_iterator_ready", target) is not target


def _marks_of(component: Component) -> _Marks:
    if isinstance(component, ModuleComponent):
        return _versions([*component.module.parameters(), *component.module.buffers()])
    if isinstance(component, OptimizerComponent):
        states = (state for state in component.local.state.values() if isinstance(state, dict))
        return _versions(t for state in states for t in state.values() if isinstance(t, torch.Tensor))
    return []


def _versions(tensors: Iterable[torch.Tensor]) -> _Marks:
    return [(t, -1 if t.is_inference() else t._version) for t in tensors]


def without_end(loop: Mapping[str, Any]) -> dict[str, Any]:
    """`Collector.loop` as a new epoch begins."""
    return {key: value for key, value in loop.items() if key not in (OVER, VALUES, FRONT)}


def without_step(loop: dict[str, Any]) -> dict[str, Any]:
    """The same as another step has ended."""
    if VALUES not in loop and FRONT not in loop:
        return loop
    return {key: value for key, value in loop.items() if key not in (VALUES, FRONT)}


def front_of(loop: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of a boundary that was copied again after the tail, where there are other ranks: the small state in front of it
    (`Collector.copy_of_small`). None: any other boundary."""
    found = loop.get(FRONT)
    return found if isinstance(found, Mapping) else None


def tail_values_in(loop: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What `loop` has for a tail that comes without a batch, see `epoch_tail.EpochValues`."""
    found = loop.get(VALUES)
    return dict(found) if isinstance(found, Mapping) and OVER not in loop else {}


def names_of_tail_values(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of what `tail_values_in` has found: variables, and attributes of objects."""
    return [
        f"{owner}.{name}" if owner else name
        for owners in values.values()
        for owner, names in owners.items()
        for name in names
    ]
