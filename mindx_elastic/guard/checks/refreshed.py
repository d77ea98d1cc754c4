"""Tells of a module that is not named whether each step sets it from a named one before it uses it: nothing is carried.

``old.load_state_dict(model.state_dict())`` at the head of a step is exact; at its end, behind ``step_end()`` or in each
tenth step it is not. Two elements of each tensor are compared, in the steps behind the first looks, at these moments:

==================================  ===================================================================================
at the boundary                     equal to the named module: set at the end of the step
when the next batch is asked for    changed since: set behind ``step_end()``
at the first call of the module     equal to the named module as it was at the boundary: set for this step. Else it is
                                    carried, which one such step shows
==================================  ===================================================================================

Where one of the moments is not seen, it is not known.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mindx_elastic.guard.checks.movements import is_sharded_in_part

__all__ = ["RefreshedModules"]

_MOST = 32
_Sample = list[torch.Tensor]


@dataclass
class _Step:
    """The step that is looked at."""

    module: weakref.ref[nn.Module]
    handle: RemovableHandle
    named: weakref.ref[nn.Module]
    parameters: _Sample
    buffers: _Sample
    """Those of the named module, at the boundary in front."""
    own: _Sample
    has_begun: bool = False
    """Whether the module was still as at the boundary when the next batch was asked for."""
    is_set: bool | None = None
    has_buffers: bool = False


@dataclass
class RefreshedModules:
    """One per guard. Training thread; a module may be called in another one."""

    steps: dict[int, _Step] = field(default_factory=dict)
    """Those that are looked at now, by `id` of the module."""
    _set: set[int] = field(default_factory=set)
    _buffers_set: set[int] = field(default_factory=set)
    _carried: set[int] = field(default_factory=set)

    def are_set(self, module: nn.Module) -> tuple[bool, bool]:
        """Whether each step sets its parameters before it uses them, and its buffers, as far as was seen."""
        key = id(module)
        is_set = key in self._set and key not in self._carried
        return is_set, is_set and key in self._buffers_set

    def watch(self, modules: Iterable[nn.Module | None], named: Iterable[object]) -> None:
        """At a boundary: look at the step that follows. `modules`: those that are not named; `named`: what is."""
        known = [one for one in named if isinstance(one, nn.Module)]
        for module in list(modules)[:_MOST]:
            if module is None or is_sharded_in_part(module):
                continue
            own = _sample(module.parameters())
            if id(module) in self._carried or not own or isinstance(module, torch.jit.ScriptModule):
                continue
            if any(name == "_orig_mod" for name, _ in module.named_children()):
                continue  # a hook would compile it anew
            shapes = _shapes(module)
            like = next((one for one in known if _shapes(one) == shapes), None)
            if like is None:
                continue
            parameters, buffers = _sample(like.parameters()), _sample(like.buffers())
            if _same(own, parameters):
                continue
            handle = module.register_forward_pre_hook(_at_call)
            step = _Step(weakref.ref(module), handle, weakref.ref(like), parameters, buffers, own)
            self.steps[id(module)] = _called[id(module)] = step

    def at_next_batch(self) -> None:
        """The next batch is asked for."""
        for step in self.steps.values():
            module = step.module()
            step.has_begun = module is not None and _same(_sample(module.parameters()), step.own)

    def at_boundary(self) -> None:
        """A step has ended: conclude."""
        steps = dict(self.steps)
        self.leave()
        for key, step in steps.items():
            if step.module() is None or step.is_set is None:
                continue
            if not step.is_set:
                self._carried.add(key)
            elif step.has_begun:
                self._set.add(key)
                self._buffers_set.discard(key)
                if step.has_buffers:
                    self._buffers_set.add(key)

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
    if step is None or step.is_set is not None or step.module() is not module:
        return
    step.is_set = _same(_sample(module.parameters()), step.parameters)
    named, own = step.named(), _sample(module.buffers())
    # A forward of the named module in this step has changed its buffers already.
    step.has_buffers = _same(own, step.buffers) or (named is not None and _same(own, _sample(named.buffers())))


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


@torch.no_grad()
def _sample(tensors: Iterable[torch.Tensor]) -> _Sample:
    """The first and the last element of each, by device and type."""
    groups: dict[tuple[torch.device, torch.dtype], _Sample] = {}
    for tensor in tensors:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if own.layout is torch.strided and not own.is_meta and own.numel() and not own.is_quantized:
            first, last = own[(0,) * own.ndim], own[(-1,) * own.ndim]
            groups.setdefault((own.device, own.dtype), []).extend((first.reshape(1), last.reshape(1)))
    return [torch.cat(group) for group in groups.values()]


def _same(one: _Sample, other: _Sample) -> bool:
    """Bit for bit, so that nan equals nan."""
    return [a.shape for a in one] == [b.shape for b in other] and all(
        a.device == b.device and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
