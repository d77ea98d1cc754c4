"""What DDP does not keep alike or at all: the state of its communication hooks, and updates that nothing has reduced.

The state of hooks (PowerSGD's error feedback, counters of local SGD) is in no module, and never saved unless it is
named in `stateful`: what was given to ``register_comm_hook`` is refused when it changes. What a hook has elsewhere, in
an object whose method it is or in its closure, is for the comparison of the next resume.

DDP has not reduced an update where the last forward in front of it was under ``no_sync()``. Then each rank has its own
state (local SGD), while a job with DDP is taken for one whose ranks have the same, and a killed rank gets another's. A
program may begin that at any step, so each update is looked at. Where no collective was called in the step, it is told.
Where one was, it may have averaged the gradients (by hand, or in Lightning's manual optimization), or only a loss for
the log: from there on digests of some elements of the weights go into this rank's files and into its ring, by step, and
the start that gives a killed rank another one's file compares those of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from mindx_elastic.capture.adapters import adapted
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.ddp import DdpModules
from mindx_elastic.capture.weight_samples import sample_of
from mindx_elastic.core.looks import has_method
from mindx_elastic.errors import MindxError
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["CommHooks", "UnreducedUpdates"]

_MOST_SAMPLES = 4
"""That are kept: of two steps in a row at least one shows weights that are averaged every second step, or seldom."""

_KNOWN = ("PowerSGDState", "PostLocalSGDState")
"""torch's own; by name, importing them takes long."""


class CommHooks:
    """The communication hooks of all DDP modules among the guard's objects. Training thread."""

    def __init__(self, targets: Mapping[str, Any], ddp: DdpModules, unmanaged: Unmanaged) -> None:
        """Raises UnmanagedStateError for a hook of torch's with state that is not named."""
        self._unmanaged = unmanaged
        self.watched: list[tuple[str, Any, Any]] = []
        """Place, state of a kind that may be none, and what it was."""
        named = {id(target) for target in targets.values()}
        for place, module in ddp:
            for _, state in module._comm_hooks:
                if state is None or isinstance(state, ProcessGroup) or id(state) in named:
                    continue
                if any(kind.__name__ in _KNOWN for kind in type(state).__mro__):
                    self._refuse(place, state)
                elif (seen := _look(state)) is not None:
                    self.watched.append((place, state, seen))

    def look(self) -> None:
        """Whether the state of a hook of the program's own changes."""
        for place, state, seen in list(self.watched):
            now = _look(state)
            if now is None or not same_tree(now, seen):
                self.watched.remove((place, state, seen))
                self._refuse(place, state)

    def _refuse(self, place: str, state: object) -> None:
        kind = type(state).__name__
        self._unmanaged.certain(
            f"{place}: its DDP has a communication hook with state ({kind}) that is not named",
            f'Name that object: Guard(stateful={{"comm_hook": state}}, ...), with the {kind} that was given to '
            "register_comm_hook",
        )


def _look(state: object) -> Any:
    """A copy of what a state holds; None where it cannot be told."""
    if has_method(state, "state_dict"):
        return None
    try:
        adapter = adapted("comm_hook", state)
        return None if adapter is None else adapter.state_dict()
    except MindxError:
        return None


class UnreducedUpdates:
    """One per entered guard. Training thread."""

    def __init__(self, ddp: DdpModules, unmanaged: Unmanaged, samples: dict[str, int]) -> None:
        """`samples`: gets the digests, see `Collector.weight_samples`."""
        self._ddp, self._unmanaged, self._samples = dict(ddp), unmanaged, samples
        self._updated: list[str] = []
        self._may_differ: dict[str, torch.nn.Module] = {}
        self._before = _collectives()  # as the step began

    def at_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Before an optimizer steps."""
        # DDP sets that in each forward: whether it reduces what the backward brings.
        unreduced = [name for name, module in self._ddp.items() if not module.require_forward_param_sync]
        if not unreduced or optimizer is None:
            return
        changed = {id(p) for group in optimizer.param_groups for p in group["params"]}
        updated = [name for name in unreduced if any(id(p) in changed for p in self._ddp[name].parameters())]
        if self._before == _collectives():
            self._updated += updated
        else:
            self._may_differ |= {name: self._ddp[name] for name in updated}

    def at_boundary(self, step: int, *, closely: bool) -> None:
        """`closely`: at this one the weights are looked at, which waits for their device."""
        if self._may_differ and closely:
            weights = [p for module in self._may_differ.values() for p in module.parameters()]
            self._samples[f"weights_{step}"] = int(sample_of(weights).digest(), 16) >> 1  # of 63 bits
            for oldest in list(self._samples)[:-_MOST_SAMPLES]:
                del self._samples[oldest]
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
