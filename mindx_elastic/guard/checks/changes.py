"""Tells what changed in mid-run so that a start cannot make it again, at the first boundary after it.

The model, the parameter groups and the schedulers are built by the program, each time in the same way. What the program
does to them later is made again from the checkpoint where it can be (flags, masks, groups); the rest is refused when it
happens, not when somebody needs the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Changes"]

_MODEL = (
    "A resumed program builds the first model again and cannot load this. Build all parts before the guard is entered "
    "and switch them on by requires_grad or a flag of your own, or train the next phase under a guard with its own "
    "directory"
)


class Changes:
    """One per guard. Make it when the state is back. Training thread."""

    def __init__(self, targets: Mapping[str, Any], collector: Collector, unmanaged: Unmanaged) -> None:
        self._collector, self._unmanaged = collector, unmanaged
        self._schedulers = {
            name: t for name, t in targets.items() if isinstance(attributes_of(t).get("lr_lambdas"), list)
        }
        self._num_lambdas = {name: len(t.lr_lambdas) for name, t in self._schedulers.items()}

    def tell(self) -> None:
        """A boundary was copied, and `Collector.structure_is_new`. Raises UnmanagedStateError for what a start cannot
        make again."""
        self._collector.structure_is_new = False
        for problem in self._collector.problems:
            self._unmanaged.certain(f"{problem} since the guard was entered", _MODEL)
        for name, scheduler in self._schedulers.items():
            if len(scheduler.lr_lambdas) != self._num_lambdas[name]:
                self._unmanaged.certain(
                    f"{name} has got a function for a new parameter group in mid-run, and functions are not saved",
                    "Give the scheduler one function for each group when it is made, with an empty group "
                    '({"params": []}) for those to come, or set that group\'s lr by hand',
                )
