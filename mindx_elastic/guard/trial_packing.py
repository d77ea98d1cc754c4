"""Packs the state for trial at some boundaries: what no checkpoint can hold is found there, and not at the stop."""

from __future__ import annotations

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import OptimizerComponent, PlainComponent
from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.flatten import flatten

__all__ = ["TrialPacking"]


class TrialPacking:
    """One per entered guard. Training thread.

    All of a file is made but its bytes: nothing is copied or written. At the first boundary; again where an optimizer
    has got its state, which most have from their first step on; then at the later looks, for what comes later.
    """

    def __init__(self, collector: Collector, unmanaged: Unmanaged) -> None:
        self._collector, self._unmanaged = collector, unmanaged
        components = collector.components.values()
        self._optimizers = [c for c in components if isinstance(c, OptimizerComponent)]
        self._plain = [c for c in components if isinstance(c, PlainComponent)]
        self.num_empty = len(self._optimizers) + 1
        """The optimizers without state at the last trial, and one more before the first; 0: no more trials."""

    def at_boundary(self, *, is_later: bool) -> None:
        """Call it while `num_empty` says so, and at looks behind the first ones (`is_later`).

        In the first steps raises UnmanagedStateError with the place of what cannot be stored, or warns, as the guard
        is told to. Later it warns: to refuse would throw away the steps that were done."""
        num_empty = sum(not optimizer.local.state for optimizer in self._optimizers)
        is_first = num_empty != self.num_empty
        if not is_first and not is_later:
            return
        self.num_empty = num_empty
        collector = self._collector
        try:
            for plain in self._plain:
                plain.check()
            for optimizer in self._optimizers:
                optimizer.check()
            with collector.devices.reading():
                flatten(collector.state())
            collector.layout()
        except UnsupportedStateError as error:
            if is_first:
                remedy = 'With unmanaged="warn" the training goes on, and no step of it can be saved'
                self._unmanaged.certain(f"no checkpoint can hold {error}", remedy)
            else:
                remedy = "Take it out of what the guard keeps, or keep it as tensors, numbers and texts"
                self._unmanaged.risk(f"no step can be saved any more: no checkpoint can hold {error}", remedy)
