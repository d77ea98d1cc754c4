"""Flags that steer a training and are in no ``state_dict``: `training` of each submodule, `requires_grad` of each
parameter.

Frozen batch norm, gradual unfreezing and an evaluation that does not restore the mode are states of the training. All
are read at close boundaries (`close_looks`), and where the mode of the module itself has changed; names come in when a
file is written. A save in the middle of a step that finds others than at the last look cannot tell whether they changed
before the boundary or after it, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

__all__ = ["Flags"]

_training = itemgetter("training")
_requires_grad = attrgetter("requires_grad")


class Flags:
    """The flags of one module and everything below it. `parameters`: by name, tied ones under each."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, torch.Tensor], wrappers: Iterable[nn.Module]
    ) -> None:
        """`wrappers`: modules around it that are no part of the names (DDP, `torch.compile`); they follow its mode."""
        self._module, self._wrappers = module, list(wrappers)
        self.seen: list[bool] = []
        """As of the boundary that counts, as far as it has been looked at. Never changed in place."""
        self.follow(parameters)

    def follow(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Read those of the modules that there are now, and of `parameters`."""
        self._names = dict(self._module.named_modules())
        self._modules = list(self._names.values())
        self._attributes = [_attributes(child) for child in self._modules]
        self.root = self._attributes[0]
        """Where the mode of the whole module is: ``root["training"]`` is the first of `seen`, if it has not changed."""
        self._parameters = parameters
        self._tensors = list({id(p): p for p in parameters.values()}.values())
        self.copy()

    def copy(self) -> None:
        """Read them as they are now."""
        self.seen = [*map(_training, self._attributes), *map(_requires_grad, self._tensors)]  # `look`, without a call

    def look(self) -> list[bool]:
        """As they are now, in the form of `seen`."""
        return [*map(_training, self._attributes), *map(_requires_grad, self._tensors)]

    def put_back(self, seen: list[bool]) -> None:
        """Set them as `look` has given them."""
        values = iter(seen)
        for module in self._modules:
            _set_training(module, next(values))
        for tensor in self._tensors:
            _set_requires_grad(tensor, next(values))
        self._lead_wrappers()

    def state(self) -> dict[str, Any]:
        """The copied ones, by name: all of them, because a file may hold a part of the model. A frozen parameter that
        an update outside of `torch.no_grad` has made part of a graph requires gradients, and as a leaf it could not be
        updated so again: it is frozen still."""
        training = dict(zip(self._names, self.seen, strict=False))
        trainable = {id(t): flag for t, flag in zip(self._tensors, self.seen[len(self._modules) :], strict=True)}
        named = {name: trainable[id(p)] and p.is_leaf for name, p in self._parameters.items()}
        return {
            "training": [name for name, flag in training.items() if flag],
            "eval": [name for name, flag in training.items() if not flag],
            "trainable": [name for name, flag in named.items() if flag],
            "frozen": [name for name, flag in named.items() if not flag],
        }

    def load(self, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Set what `state` has. Names that this module lacks are passed over. Returns what was changed, by list."""
        changed: dict[str, list[str]] = {}
        for key, wanted in (("training", True), ("eval", False)):
            for name in state.get(key, ()):
                if (module := self._names.get(name)) is not None and _set_training(module, wanted):
                    changed.setdefault(key, []).append(name)
        for key, wanted in (("trainable", True), ("frozen", False)):
            for name in state.get(key, ()):
                if (tensor := self._parameters.get(name)) is not None and _set_requires_grad(tensor, wanted):
                    changed.setdefault(key, []).append(name)
        self._lead_wrappers()
        self.copy()
        return changed

    def _lead_wrappers(self) -> None:
        for wrapper in self._wrappers:
            _set_training(wrapper, self._module.training)


class _Property:
    """A flag of a module that does not keep the flag in its dictionary: `torch.compile`'s wrapper, TorchScript."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self._module, name))


def _attributes(module: nn.Module) -> Any:
    """Where the flag can be read, in half the time of an attribute."""
    return vars(module) if "training" in vars(module) else _Property(module)


def _set_training(module: nn.Module, flag: bool) -> bool:
    """Not `train()`, which sets the modules below as well and may be overridden. Returns whether it changed."""
    if module.training is flag:
        return False
    module.training = flag
    return True


def _set_requires_grad(tensor: torch.Tensor, flag: bool) -> bool:
    if tensor.requires_grad is flag:
        return False
    tensor.requires_grad_(flag)
    return True
