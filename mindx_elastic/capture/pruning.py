"""Masks of `torch.nn.utils.prune`: put on or taken off in mid-run, they rename a parameter, and a start does the same.

A pruned parameter ``weight`` is ``weight_orig`` (the same object) and a buffer ``weight_mask``, and each forward sets
the plain tensor ``weight`` to their product. The next pruning ranks by that tensor, which is older than the last
update, so it is copied at every boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Masks", "original_names"]


class Masks:
    """The pruning masks of one module and everything below it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.copies: dict[str, torch.Tensor] = {}
        """Of the boundary that counts."""
        self.follow()

    def follow(self) -> None:
        """Find the pruned parameters that there are now."""
        self._pruned = _pruned(self._module)
        self.copy()
        self.are_used = bool(self._pruned)
        """Without any there is nothing to copy."""

    @property
    def places(self) -> list[str]:
        """The places of the pruned parameters, by their first names (``fc.weight``)."""
        return list(self._pruned)

    def copy(self) -> None:
        self.copies = {
            place: value.detach().clone()
            for place, (child, name) in self._pruned.items()
            if isinstance(value := vars(child).get(name), torch.Tensor)
        }

    def state(self) -> dict[str, torch.Tensor | None]:
        return {place: self.copies.get(place) for place in self._pruned}

    def apply(self, places: Iterable[str]) -> bool:
        """Prune the parameters at `places` and no others; masks and values come with the state. Returns whether
        something has changed."""
        from torch.nn.utils import prune

        wanted = list(places)
        missing = [place for place in wanted if place not in self._pruned]
        surplus = [place for place in self._pruned if place not in wanted]
        for place in missing:
            child, name = self._find(place)
            parameter = child._parameters.get(name)
            if parameter is not None:  # else another model: loading says so
                prune.custom_from_mask(child, name, torch.ones_like(parameter))
        for place in surplus:
            prune.remove(*self._pruned[place])
        self.follow()
        return bool(missing or surplus)

    def load(self, state: Mapping[str, Any]) -> None:
        """Set the product of parameter and mask to what the last forward had made."""
        for place, value in state.items():
            if value is not None and place in self._pruned:
                child, name = self._pruned[place]
                before = vars(child).get(name)
                setattr(child, name, value.to(before.device) if isinstance(before, torch.Tensor) else value)
        self.copy()

    def _find(self, place: str) -> tuple[nn.Module, str]:
        prefix, _, name = place.rpartition(".")
        try:
            return self._module.get_submodule(prefix), name
        except AttributeError:
            return nn.Module(), name


def original_names(named: Mapping[str, Any], pruned: Iterable[str]) -> dict[str, Any]:
    """`named` by the names that the parameters had before they were pruned."""
    renamed = {f"{place}_orig": place for place in pruned}
    return {renamed.get(name, name): value for name, value in named.items()}


def _pruned(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    found = {}
    for prefix, child in module.named_modules():
        for hook in child._forward_pre_hooks.values():
            # By name: few programs import it.
            if any(c.__name__ == "BasePruningMethod" for c in type(hook).__mro__):
                name = str(getattr(hook, "_tensor_name", ""))
                found[f"{prefix}.{name}" if prefix else name] = (child, name)
    return found
