"""The order in which DDP's gradients become ready, recorded so that a resumed process reduces in the same order.

DDP lays out its buckets again after the first backward, in the order in which gradients arrived. A resumed process
would do its first step with the initial layout, sum in another order, and diverge at three and more ranks. The order
is recorded during the first backward of a fresh run and travels in the checkpoint; see `start.ddp_warmup`.

Not with ``static_graph=True``, which counts in the first backward and lays out its buckets in the order of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DdpModules", "GradientOrder"]

DdpModules = Sequence[tuple[str, DistributedDataParallel]]
"""DDP modules and their paths."""


class GradientOrder:
    """Records, once, the order of gradient arrival for one DDP module. Indices count the parameters with gradients."""

    def __init__(self, module: DistributedDataParallel, known: Sequence[int] = ()) -> None:
        """`known`: what has been recorded before."""
        self.module = module
        self.order = list(known)
        """What has been recorded so far."""
        self._handles: list[Any] = []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.module.module.parameters() if p.requires_grad]

    def record(self) -> None:
        """Listen to the next backward. Call `finish` at the boundary after it."""
        for index, parameter in enumerate(self.parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index)))

    def finish(self) -> bool:
        """At a boundary: stop listening once all has been seen. True when there is nothing left to record."""
        if self._handles and self.order:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        return not self._handles

    def _note(self, index: int) -> None:
        # Only the first arrival counts, as in DDP: an accumulation window brings each gradient several times.
        if index not in self.order:
            self.order.append(index)
