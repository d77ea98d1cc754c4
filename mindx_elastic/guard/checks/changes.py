"""Tells what changed in mid-run so that a start cannot make it again, at the first boundary after it.

The model, the parameter groups and the schedulers are built by the program, each time in the same way. What the program
does to them later is made again from the checkpoint where it can be (flags, masks, groups); the rest is refused when it
happens, not when somebody needs the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp_order import DdpModules
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.checks.comm_hooks import CommHooks
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
        self, targets: Mapping[str, Any], collector: Collector, unmanaged: Unmanaged, *, ddp: DdpModules
    ) -> None:
        """`ddp`: the DDP modules and their paths."""
        self._collector, self._unmanaged = collector, unmanaged
        self._schedulers = {
            name: t for name, t in targets.items() if isinstance(attributes_of(t).get("lr_lambdas"), list)
        }
        self._num_lambdas = {name: len(t.lr_lambdas) for name, t in self._schedulers.items()}
        self._hooks, self._num_boundaries = CommHooks(targets, ddp, unmanaged), 0
        self.is_looking = bool(self._hooks.watched)
        """Else `at_boundary` has something to do only where `Collector.structure_is_new`."""

    def at_boundary(self) -> None:
        """A boundary was copied. Raises UnmanagedStateError for what a start cannot make again."""
        collector = self._collector
        if self.is_looking:
            self._num_boundaries += 1
            self.is_looking = self._num_boundaries < _LOOKS[-1]
            if self._num_boundaries in _LOOKS:
                self._hooks.look()
        if collector.structure_is_new:
            collector.structure_is_new = False
            for problem in collector.problems:
                self._unmanaged.certain(f"{problem} since the guard was entered", _MODEL)
            self._tell_of_lambdas()

    def _tell_of_lambdas(self) -> None:
        for name, scheduler in self._schedulers.items():
            if len(scheduler.lr_lambdas) != self._num_lambdas[name]:
                self._unmanaged.certain(
                    f"{name} has got a function for a new parameter group in mid-run, and functions are not saved",
                    "Give the scheduler one function for each group when it is made, with an empty group "
                    '({"params": []}) for those to come, or set that group\'s lr by hand',
                )
