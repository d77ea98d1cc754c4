"""Foresees the objects of a rank that the forward is the last to touch: generators, dicts, lists that are named, and
how an epoch's order arises."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.plain_component import AdaptedComponent, GoesThroughData, PlainComponent

__all__ = ["Forecast"]

_MOST_BYTES, _ITEM = 1 << 18, 64
"""An object is read at each forward as long as it is about this small; each item of a container counts as 64 bytes."""


class Forecast:
    """What is read at the end of a forward (`look`) is what the boundary has, if nothing changes it in between.

    `check` finds that out at each boundary. An object that it finds changed is not foreseen any more in this process,
    so a job without objects that last from forward to boundary pays for one step only. A loader is read in an epoch's
    first step only: from then on the boundaries have what its order arises from. Training thread.
    """

    def __init__(self, components: Iterable[PlainComponent]) -> None:
        known = list(components)
        self._foreseen = {component.name: component for component in known if isinstance(component, AdaptedComponent)}
        self._loaders = [(c.name, c.target) for c in known if isinstance(c.target, GoesThroughData) and c.target.draws]
        self._seen: dict[str, Any] = {}
        self.is_used = bool(self._foreseen or self._loaders)
        """Without any there is nothing to look at."""
        self._beginnings: dict[str, object] = dict.fromkeys(name for name, _ in self._loaders)
        """What the epoch of each loader arises from, as of the last boundary."""
        self.epochs: dict[str, Any] = {}
        """The state, as `look` found it, of each loader whose epoch no boundary has seen yet."""

    def look(self) -> dict[str, Any]:
        """The state now of each object that has always come out as it was foreseen."""
        self._seen = {}
        for name, component in list(self._foreseen.items()):
            try:
                state = None if component.is_heavy else component.look()
            except Exception:  # it cannot be read in mid-step; where it never can be, the boundary says so
                state = None
            if state is None or _size(state) > _MOST_BYTES:
                del self._foreseen[name]
            else:
                self._seen[name] = state
        for name, loader in self._loaders:
            if loader.beginning is not self._beginnings[name]:
                self.epochs[name] = loader.state_dict()
        return self._seen

    def check(self) -> None:
        """Call it at a boundary. Stop forecasting objects that differ from what `look` has seen."""
        for name, state in self._seen.items():
            if not same_tree(state, self._foreseen[name].seen):
                del self._foreseen[name]
        self._seen = {}
        if self.epochs:
            self._beginnings, self.epochs = {name: loader.beginning for name, loader in self._loaders}, {}


def _size(state: Any) -> int:
    """About the bytes that it takes; more than the limit for what is on a device, which a look would wait for."""
    if isinstance(state, torch.Tensor):
        return state.nbytes if state.device.type == "cpu" else _MOST_BYTES + 1
    if isinstance(state, dict):
        return sum(_ITEM + _size(item) for item in state.values())
    if isinstance(state, (list, tuple, deque, set, frozenset)):
        return sum(_ITEM + _size(item) for item in state)
    nbytes = getattr(state, "nbytes", 0)  # a numpy array
    return int(nbytes) if isinstance(nbytes, int) else len(state) if isinstance(state, (str, bytes)) else 0
