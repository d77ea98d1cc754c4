"""Says what the named objects of a guard keep: which of the program's objects and tensors are in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from mindx_elastic.capture.adapters import Attributes
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent
from mindx_elastic.capture.generators import GENERATORS
from mindx_elastic.capture.structure import buffers_of, parameters_of
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.checks.program_variables import inner_schedulers, kind_of, reachable
from mindx_elastic.guard.checks.unnamed_optimizers import storage_of

__all__ = ["NamedState"]


class NamedState:
    """What the named objects keep, as far as it can be told without running the program's code."""

    def __init__(
        self,
        targets: Mapping[str, Any],
        loaders: Iterable[Any],
        collector: Collector,
        others: Iterable[Any] = (),
        but: Collection[Any] = (),
    ) -> None:
        """`others`: kept by somebody else, but for those of `but` that hang on them."""
        self._objects: set[int] = set()
        self._loaders, self._in_loaders = tuple(loaders), set[int]()
        self._held: list[torch.Tensor | None] = []
        self._storages: set[int | None] | None = None
        for name, target in targets.items():
            self._add_target(target, collector.components.get(name))
        for other in others:
            self._add_target(other, None, but)
        self.tensors = set(map(id, self._held))

    def _add_target(self, target: Any, component: object, but: Collection[Any] = ()) -> None:
        self._objects.add(id(target))
        if isinstance(target, Attributes):
            held = attributes_of(target.target)
            for name in target.names:
                self._add_target(held.get(name), None, but)
        elif isinstance(target, nn.Module):
            for module in target.modules():
                self._objects.add(id(module))
                self._held += [t for table in (parameters_of(module), buffers_of(module)) for t in table.values()]
                if isinstance(component, ModuleComponent) and component.keeps_attributes:
                    self._add_generators(module)
            if isinstance(component, ModuleComponent) and component.is_sharded:
                self._held += component.named.values()
        elif isinstance(target, torch.optim.Optimizer):
            if isinstance(component, OptimizerComponent):
                self._objects |= {id(component.optimizer), id(component.local)}
                self._add_generators(component.optimizer)
        elif (kind := kind_of(type(target))) in ("scheduler", "scaler"):
            self._objects |= inner_schedulers(target).keys()  # it has an optimizer, and does not keep its state
        else:
            found = reachable(target, models=kind != "loader", but=but)
            self._objects |= found.keys()
            self._held += [
                cast(torch.Tensor, value) for value in found.values() if issubclass(type(value), torch.Tensor)
            ]

    def _add_generators(self, owner: object) -> None:
        """Those in its attributes: see `OwnAttributes`."""
        self._objects |= {id(each) for each in attributes_of(owner).values() if issubclass(type(each), GENERATORS)}

    def has_object(self, value: object) -> bool:
        """Whether it is part of a named object, or hangs on a loader, whose business it is."""
        if id(value) in self._objects:
            return True
        for loader in self._loaders:  # only now: such a search takes hundreds of calls
            self._in_loaders |= reachable(loader, models=False).keys()
        self._loaders = ()
        return id(value) in self._in_loaders

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a named object has it, or its memory."""
        if id(tensor) in self.tensors:
            return True
        if self._storages is None:
            self._storages = {storage_of(held) for held in self._held if held is not None} - {None}
        return storage_of(tensor) in self._storages

    def missing(self, module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters and buffers of `module` that no named object keeps."""
        parameters: list[torch.Tensor] = [p for p in module.parameters() if not self.has(p)]
        return parameters, [buffer for buffer in module.buffers() if not self.has(buffer)]
