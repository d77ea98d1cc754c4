"""Whether tensors were changed since a boundary outside of updates, by their version counters.

A counter moves by as much in each step: by one for an update of SGD, by two for a mean of Adam's. So once two steps in
a row were alike, the counters are read at *close* boundaries only (`close_looks`), and what they are at the others is
worked out. After a step in which other optimizers have updated they are read.

Where one is not as worked out (a layer is left out in some steps, weights are clipped now and then), all are read at
every boundary from then on. Up to then, for 48 steps at most, such tensors look as if they had been changed since the
boundary, so a step that is cut off in its middle is not saved. A save at the boundary itself reads them first. The
other way round nothing goes wrong: what is as worked out has not been changed.

Rejected: to read all at each boundary. After a step the processor's caches have none of what is around a counter, and
it takes a third of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add, attrgetter, ne, sub
from typing import Any

import torch

__all__ = ["VersionCounters", "state_tensors"]

_version_of = attrgetter("_version")


class VersionCounters:
    """Those of the tensors that `tensors` gives. Training thread, or the holder of the update gate."""

    def __init__(self, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._moves: list[int] | None = None  # by how much each one has moved in the last step that was looked at
        self.updates = 0
        """Of that step, as `look` is told them."""
        self.is_regular = False
        """In the step before they moved so, too: after a step like them no `look` is needed, but `steps` counts it."""
        self.steps = 0
        """Since they were read."""
        self._is_irregular = False  # they were regular, and moved otherwise: read at each boundary
        self.read()

    def read(self) -> None:
        """They count as they are now."""
        tensors = self._tensors()
        # By identity: to hold the tensors would double the memory of an optimizer whose steps make new ones.
        self._ids, self._read = [*map(id, tensors)], [*map(_version_of, tensors)]
        self.steps = 0

    def look(self, updates: int) -> None:
        """A step has ended. `updates`: the sum of numbers of the optimizers that have updated in it, each as often as
        it has, in whatever order; 0: none has."""
        ids, before, moves, was_regular = self._ids, self._read, self._moves, self.is_regular
        if self.steps:
            before = self.versions
        self.read()
        if not updates or self._is_irregular or (was_regular and updates != self.updates):
            return
        self._moves = [*map(sub, self._read, before)] if ids == self._ids else None
        self.is_regular = self._moves is not None and self._moves == moves and updates == self.updates
        self._is_irregular = was_regular and not self.is_regular
        self.updates = updates

    @property
    def versions(self) -> list[int]:
        """What they were at the boundary."""
        if not self.steps or self._moves is None:
            return self._read
        steps = self.steps
        return [*map(add, self._read, [steps * move for move in self._moves])]

    def num_changed(self) -> int:
        """How many tensors were changed or replaced since the boundary."""
        tensors = self._tensors()
        ids = [*map(id, tensors)]
        if ids != self._ids:
            count = max(1, len({*ids} - {*self._ids}))
        else:
            count = sum(map(ne, map(_version_of, tensors), self.versions))
        if count and self.steps:  # whichever it was
            self.is_regular, self._is_irregular = False, True
        return count


def state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """What an optimizer keeps by parameter. Tensors of inference mode have no counter."""
    return [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    ]
