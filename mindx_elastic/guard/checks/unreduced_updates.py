"""Updates with gradients that nothing has reduced: the last forward in front of them was under ``no_sync()``, and no
collective was called since, with which a program would average them itself.

Each rank has its own state from then on (local SGD), while a job with DDP is taken for one whose ranks have the
same: of what they share one rank's is kept. A program may begin that at any step, so each update is looked at. DDP
decides in its forward whether it will reduce what the backward brings. What it begins with counts: Lightning's manual
optimization, whose backwards and updates are inside of the forward, tells the reducer of each by itself, and keeps DDP
from doing so in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.ddp_order import DdpModules
from mindx_elastic.capture.replicas import outermost_replicas
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["UnreducedUpdates"]

_Inside = list[tuple[str, DistributedDataParallel]]


class UnreducedUpdates:
    """One per entered guard. Training thread; `stack` removes the hooks in the end."""

    def __init__(self, stack: ExitStack, targets: Mapping[str, Any], ddp: DdpModules, unmanaged: Unmanaged) -> None:
        self._unmanaged = unmanaged
        self._unreduced: dict[str, tuple[DistributedDataParallel, Sequence[int]]] = {}
        """The modules, by path, whose last forward with gradients was one that DDP does not reduce, and `_collectives`
        as it began."""
        self._updated: list[str] = []
        self._told: set[str] = set()
        for module in outermost_replicas(targets, ddp):
            parts = {id(part) for part in module.modules()}
            inside = [(name, each) for name, each in ddp if id(each) in parts]
            stack.callback(module.register_forward_pre_hook(partial(self._at_forward, inside)).remove)

    def _at_forward(self, inside: _Inside, module: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        for name, ddp in inside:
            if ddp.require_backward_grad_sync or name in self._told:
                self._unreduced.pop(name, None)
            else:
                self._unreduced[name] = ddp, _collectives()

    def at_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Before an optimizer steps."""
        if not self._unreduced or optimizer is None:
            return
        changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        now = _collectives()
        for name, (ddp, before) in list(self._unreduced.items()):
            if any(id(p) in changed for p in ddp.parameters()):
                del self._unreduced[name]
                if before == now:
                    self._told.add(name)
                    self._updated.append(name)

    def at_boundary(self) -> None:
        for name in self._updated:
            self._unmanaged.risk(
                f"{name}: updates are made with gradients that DDP has not reduced (under no_sync()), nor the program: "
                "each rank has its own state (local SGD), and of a job with DDP one rank's is kept",
                "Make the last backward in front of an update outside of no_sync(). For local SGD train the module "
                "without DDP: then each rank's state is kept",
            )
        self._updated.clear()


def _collectives() -> Sequence[int]:
    """How many collectives each group has seen."""
    world: Any = c10d._world
    try:
        return [group._get_sequence_number_for_group() for group in world.pg_map]
    except RuntimeError:  # a backend that does not count
        return []
