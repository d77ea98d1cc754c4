"""Tells what changed in mid-run so that a start cannot make it again, at the first boundary after it.

The model, the parameter groups and the schedulers are built by the program, each time in the same way. What the program
does to them later is made again from the checkpoint where it can be (flags, masks, groups); the rest is refused when it
happens, not when somebody needs the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.living import living_objects
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.checks.comm_hooks import CommHooks
from mindx_elastic.guard.replicas import DdpModules
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Changes"]

_LOOKS = (1, 2, 4, 8)
"""Boundaries of the process."""
_MODEL = (
    "A resumed program builds the first model again and cannot load this. Build all parts before the guard is entered "
    "and switch them on by requires_grad or a flag of your own, or train the next phase under a guard with its own "
    "directory"
)


class Changes:
    """One per guard. Make it when the state is back. Training thread."""

    def __init__(
        self,
        targets: Mapping[str, Any],
        collector: Collector,
        unmanaged: Unmanaged,
        *,
        ddp: DdpModules,
        world_size: int,
    ) -> None:
        """`ddp`: the DDP modules and their paths."""
        self._collector, self._unmanaged = collector, unmanaged
        self._ddp = [(name, module, _reduced(module)) for name, module in ddp] if world_size > 1 else []
        self._schedulers = {
            name: t for name, t in targets.items() if isinstance(attributes_of(t).get("lr_lambdas"), list)
        }
        self._num_lambdas = {name: len(t.lr_lambdas) for name, t in self._schedulers.items()}
        self._hooks, self._num_boundaries = CommHooks(targets, ddp, unmanaged), 0
        collector.has_new_flags()  # those that the start has set are no news

    def at_boundary(self) -> None:
        """A boundary was copied. Raises UnmanagedStateError for what a start cannot make again."""
        collector = self._collector
        if self._num_boundaries < _LOOKS[-1]:
            self._num_boundaries += 1
            if self._num_boundaries in _LOOKS:
                self._hooks.look()
        if collector.at_first_boundary is not None:
            collector.leave_head()
        if collector.structure_is_new:
            collector.structure_is_new = False
            self._tell_of_ddp()
            for problem in collector.problems:
                self._unmanaged.certain(f"{problem} since the guard was entered", _MODEL)
            self._tell_of_lambdas()
        elif collector.has_new_flags():
            self._tell_of_ddp()

    def _tell_of_ddp(self) -> None:
        """Parameters that are trained now and that DDP does not reduce."""
        for name, module, reduced in self._ddp:
            if reduced is None:
                continue
            ignored = module.parameters_to_ignore
            extra = [
                place
                for place, p in module.module.named_parameters()
                if p.requires_grad and id(p) not in reduced and place not in ignored
            ]
            if not extra:
                continue
            other = _other_wrapper(module)
            what = f"{name}: {listed(extra, 3)} is trained now, but its DDP was built without it"
            if other is None:
                self._unmanaged.risk(
                    f"{what}: its gradient is not averaged over the ranks",
                    "Build DDP while all parameters require a gradient, with find_unused_parameters=True, and freeze "
                    "them afterwards",
                )
            else:
                self._unmanaged.certain(
                    f"{what}, and another DDP was made for it, which a resumed program does not have",
                    "Build one DDP before the guard is entered, while all parameters require a gradient, with "
                    "find_unused_parameters=True, and freeze them afterwards",
                )

    def _tell_of_lambdas(self) -> None:
        for name, scheduler in self._schedulers.items():
            if len(scheduler.lr_lambdas) != self._num_lambdas[name]:
                self._unmanaged.certain(
                    f"{name} has got a function for a new parameter group in mid-run, and functions are not saved",
                    "Give the scheduler one function for each group when it is made, with an empty group "
                    '({"params": []}) for those to come, or set that group\'s lr by hand',
                )


def _reduced(module: DistributedDataParallel) -> frozenset[int] | None:
    """The ids of the parameters whose gradients DDP averages; None: unknown.

    They are those that required one when it was built, of which it only tells the number.
    """
    parameters = [p for n, p in module.module.named_parameters() if n not in module.parameters_to_ignore]
    count = module._get_ddp_logging_data().get("num_parameter_tensors")
    for candidate in (parameters, [p for p in parameters if p.requires_grad]):
        if len(candidate) == count:
            return frozenset(map(id, candidate))
    return None


def _other_wrapper(module: DistributedDataParallel) -> nn.Module | None:
    """Another DDP around the same module. Looks at every object of the process, so only after a change."""
    living = living_objects(DistributedDataParallel)
    return next((found for found in living if found is not module and found.module is module.module), None)
