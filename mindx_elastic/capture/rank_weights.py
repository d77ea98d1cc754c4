"""Weights that no optimizer of the job updates: averages of the weights, frozen copies. Each rank may have its own.

Where every rank holds the same weights, those of a killed rank are taken from another one. That is right for what DDP
makes the same, and wrong for an average that rank 0 alone updates. So small ones are copied at each boundary, as part
of the small state that a rank keeps for itself. Of larger ones, and of those on a device, it is only noted that they
have changed: where they did so on one rank and not on another, the start that takes another rank's says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindx_elastic.capture.module_component import ModuleComponent
from mindx_elastic.capture.tensor_copy import TensorCopy

__all__ = ["RankWeights"]

_MOST_BYTES = 256 << 10
"""For all modules together: what takes about 0.1 ms a step to copy and to write into memory."""


class RankWeights:
    """Training thread; what `kept` and `moves` give is never changed in place."""

    def __init__(self, modules: Mapping[str, ModuleComponent], updated: set[int]) -> None:
        """`updated`: ids of the parameters that optimizers have."""
        self._copies: dict[str, dict[str, TensorCopy]] = {}
        self._others: dict[str, list[torch.Tensor]] = {}
        left = _MOST_BYTES
        for name, module in modules.items():
            own = dict(module.named)
            if not own or module.is_sharded or not updated.isdisjoint(map(id, own.values())):
                continue
            nbytes = sum(t.nbytes for t in own.values())
            if nbytes <= left and all(t.device.type == "cpu" and not t.is_inference() for t in own.values()):
                self._copies[name] = {place: TensorCopy(t) for place, t in own.items()}
                left -= nbytes
            else:
                self._others[name] = [t for t in own.values() if not t.is_inference()]
        self.kept: dict[str, dict[str, torch.Tensor | None]] = {}
        """The boundary's copies, by module and place."""
        self.moves: dict[str, int] = {}
        """For modules that are not copied: a number that changes with each change."""
        self.copy()

    def __contains__(self, name: str) -> bool:
        """Whether the module's weights are copied."""
        return name in self._copies

    def copy(self) -> None:
        """This is a boundary."""
        for copies in self._copies.values():
            for each in copies.values():
                each.renew()
        self.kept = {name: {place: c.value for place, c in copies.items()} for name, copies in self._copies.items()}
        self.moves = {name: sum(t._version for t in tensors) for name, tensors in self._others.items()}

    def part(self) -> dict[str, Any]:
        """Its part of the rank's small state, see `Collector.volatile`."""
        return {key: value for key, value in (("weights", self.kept), ("moves", self.moves)) if value}
