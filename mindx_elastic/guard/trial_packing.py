"""Packs the state for trial at some boundaries: what no checkpoint can hold is found there, and not at the stop."""

from __future__ import annotations

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import OptimizerComponent, PlainComponent
from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.flatten import flatten

__all__ = ["pack_for_trial"]


def pack_for_trial(collector: Collector, unmanaged: Unmanaged, *, refuses: bool) -> None:
    """Make all of a file but its bytes: nothing is copied or written.

    `refuses`: raises UnmanagedStateError with the place of what cannot be stored, or warns, as the guard is told to.
    Else it warns: to refuse late would throw away the steps that were done.
    """
    try:
        for component in collector.components.values():
            if isinstance(component, (OptimizerComponent, PlainComponent)):
                component.check()
        with collector.devices.reading():
            flatten(collector.state())
        collector.layout()
    except UnsupportedStateError as error:
        if refuses:
            remedy = 'With unmanaged="warn" the training goes on, and no step of it can be saved'
            unmanaged.certain(f"no checkpoint can hold {error}", remedy)
        else:
            remedy = "Take it out of what the guard keeps, or keep it as tensors, numbers and texts"
            unmanaged.risk(f"no step can be saved any more: no checkpoint can hold {error}", remedy)
