"""Tells of a module that is not named whether each step sets it from a named one before it uses it: nothing is carried.

``old.load_state_dict(model.state_dict())`` at the head of a step is exact; at its end or in each tenth step it is not.
In the steps after the first looks, some elements are compared at the module's first call: equal to the named module's,
and not so at the boundary before, it was set for this step. Else it is carried, which one such step shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mindx_elastic.capture.weight_samples import WeightSample, same_elements, sample_of
from mindx_elastic.guard.checks.movements import is_sharded_in_part

__all__ = ["RefreshedModules"]

_MOST = 32


@dataclass
class _Step:
    """The step that is looked at."""

    module: weakref.ref[nn.Module]
    handle: RemovableHandle
    named: WeightSample
    """Elements of the named module, at the boundary before."""
    is_set: bool | None = None
    """None: the module has not been called."""


class RefreshedModules:
    """One per guard. Training thread; a module may be called in another one."""

    def __init__(self) -> None:
        self.steps: dict[int, _Step] = {}
        """The steps that are watched now, by `id` of the module."""
        self._set: set[int] = set()
        self._carried: set[int] = set()

    def is_set(self, module: nn.Module) -> bool:
        """Whether each step sets it before it uses it, as far as was seen."""
        return id(module) in self._set - self._carried

    def watch(self, modules: Iterable[nn.Module | None], named: Iterable[object]) -> None:
        """Call it at a boundary. Watch the step that follows. `modules`: those that are not named; `named`: what is."""
        known = [one for one in named if isinstance(one, nn.Module)]
        for module in list(modules)[:_MOST]:
            if module is None or id(module) in self._carried or is_sharded_in_part(module):
                continue
            if isinstance(module, torch.jit.ScriptModule) or any(n == "_orig_mod" for n, _ in module.named_children()):
                continue  # the latter: a hook would compile it again
            shapes = [parameter.shape for parameter in module.parameters()]
            like = next((one for one in known if shapes and [p.shape for p in one.parameters()] == shapes), None)
            if like is None or same_elements(named_before := _elements(like), _elements(module)):
                continue
            step = _Step(weakref.ref(module), module.register_forward_pre_hook(_at_call), named_before)
            self.steps[id(module)] = _called[id(module)] = step

    def at_boundary(self) -> None:
        """A step has ended: conclude."""
        for key, step in self.steps.items():
            if step.module() is not None and step.is_set is not None:
                (self._set if step.is_set else self._carried).add(key)
        self.leave()

    def leave(self) -> None:
        """This step, or the training, is left: conclude nothing."""
        for key, step in self.steps.items():
            step.handle.remove()
            _called.pop(key, None)
        self.steps.clear()


_called: dict[int, _Step] = {}


def _at_call(module: nn.Module, args: Any) -> None:
    """A function of this module: a model that is copied or saved in that step can take it along."""
    step = _called.get(id(module))
    if step is not None and step.is_set is None and step.module() is module:
        step.is_set = same_elements(_elements(module), step.named)


def _elements(module: nn.Module) -> WeightSample:
    return sample_of(list(module.parameters()))
