"""Updates with gradients that nothing has reduced: the last forward in front of them was under ``no_sync()``, and no
collective was called in the step, with which a program would average them itself, or Lightning's manual optimization.

Each rank has its own state from then on (local SGD), while a job with DDP is taken for one whose ranks have the
same: of what they share one rank's is kept. A program may begin that at any step, so each update is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from mindx_elastic.capture.ddp_order import DdpModules
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["UnreducedUpdates"]


class UnreducedUpdates:
    """One per entered guard. Training thread."""

    def __init__(self, ddp: DdpModules, unmanaged: Unmanaged) -> None:
        self._ddp, self._unmanaged = dict(ddp), unmanaged
        self._updated: list[str] = []
        self._before = _collectives()  # as the step began

    def at_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Before an optimizer steps."""
        # DDP sets that in each forward: whether it reduces what the backward brings.
        unreduced = [name for name, module in self._ddp.items() if not module.require_forward_param_sync]
        if not unreduced or optimizer is None or self._before != _collectives():
            return
        changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._updated += [name for name in unreduced if any(id(p) in changed for p in self._ddp[name].parameters())]

    def at_boundary(self) -> None:
        for name in self._updated:
            self._unmanaged.risk(
                f"{name}: updates are made with gradients that DDP has not reduced (under no_sync()), nor the program: "
                "each rank has its own state (local SGD), and of a job with DDP one rank's is kept",
                "Make the last backward in front of an update outside of no_sync(). For local SGD train the module "
                "without DDP: then each rank's state is kept",
            )
            self._ddp.pop(name, None)
        self._updated.clear()
        self._before = _collectives() if self._ddp else ()


def _collectives() -> Sequence[int]:
    """How many collectives each group has seen."""
    world: Any = c10d._world
    try:
        return [group._get_sequence_number_for_group() for group in world.pg_map]
    except RuntimeError:  # a backend that does not count
        return []
