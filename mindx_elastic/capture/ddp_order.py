"""The order in which DDP's gradients become ready, recorded so that a resumed process reduces in the same order.

DDP lays out its buckets again after the first backward, in the order in which gradients arrived. A resumed process
would do its first step with the initial layout, sum in another order, and diverge at three and more ranks. The order
is recorded during the first backward of a fresh run and travels in the checkpoint; see `start.ddp_warmup`.

With ``static_graph=True`` DDP counts in the first backward how often each gradient arrives, and lays out its buckets in
the order of the second one. So both are recorded, one after the other, without the gradients that never arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DdpModules", "GradientOrder", "split_backwards"]

DdpModules = Sequence[tuple[str, DistributedDataParallel]]
"""DDP modules and their paths."""


class GradientOrder:
    """Records, once, the order of gradient arrival for one DDP module. Indices count the parameters with gradients."""

    def __init__(self, module: DistributedDataParallel, known: list[int] | None = None) -> None:
        """`known`: what has been recorded before; with a static graph its second backward may be missing."""
        self.module = module
        self._num_backwards = 2 if module.static_graph else 1
        self._backwards = split_backwards(known or [])
        self._handles: list[Any] = []

    @property
    def order(self) -> list[int]:
        """What has been recorded so far."""
        return [index for backward in self._backwards for index in backward]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.module.module.parameters() if p.requires_grad]

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to record."""
        return len(self._backwards) >= self._num_backwards

    @property
    def is_even(self) -> bool:
        """Whether both backwards have the same gradients. They have not where one arrives several times in a backward:
        parts that are computed again in their own backward (reentrant checkpoints) use it twice."""
        return len({frozenset(backward) for backward in self._backwards}) <= 1

    def record(self) -> None:
        """Listen to the next backward. Call `finish` at the boundary after it."""
        for index, parameter in enumerate(self.parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index)))

    def finish(self) -> bool:
        """At a boundary: stop listening once all has been seen. True when there is nothing left to record."""
        if self._handles and self.is_complete:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return not self._handles

    def _note(self, index: int) -> None:
        if not self.module.require_backward_grad_sync and self.module.static_graph:
            return  # under no_sync(): DDP counts only the backwards that it reduces
        if not self._backwards or (index in self._backwards[-1] and not self.is_complete):
            self._backwards.append([])
        # Only the first arrival counts, as in DDP: an accumulation window brings each gradient several times.
        if index not in self._backwards[-1]:
            self._backwards[-1].append(index)


def split_backwards(order: list[int]) -> list[list[int]]:
    """An order as recorded, one list a backward: a gradient that arrives again begins the next one."""
    backwards: list[list[int]] = []
    for index in order:
        if not backwards or index in backwards[-1]:
            backwards.append([])
        backwards[-1].append(index)
    return backwards
