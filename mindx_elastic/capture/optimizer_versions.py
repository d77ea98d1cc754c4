"""Whether the state of optimizers was changed since a boundary without one of their steps, by version counters.

A program may do so by hand: decay the momentum, clear it for a warm restart. That mostly concerns all of its
parameters, so at a boundary only the state of the first and the last one that have some is looked at: which objects are
in it, and their counters. Where weights are looked at for hidden changes (`hidden_changes`), so are the states of all
parameters; once a program was seen to change single ones (momentum of dead neurons), at every boundary.

Rejected: to read all counters at each boundary, which took half of its time (2 of 52 parameters: 1 us in place of 40).
"""

from __future__ import annotations

from operator import attrgetter, ne
from typing import Any

import torch

__all__ = ["OptimizerVersions"]

_version_of = attrgetter("_version")


class OptimizerVersions:
    """The version counters of one optimizer. `note` belongs to the training thread, `num_changed` to the holder of the
    gate."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._num_states = 0
        self._values: list[Any] = []
        self._ids: list[int] = []
        self._tensors: list[torch.Tensor] = []
        self._all: list[tuple[int, int]] | None = None
        self._reads_all = False
        self._read()

    def _look(self) -> list[Any]:
        """The state of the first and of the last parameter that have one."""
        entries = self._optimizer.state.values()
        if not entries:
            return []
        first, last = next(iter(entries)), next(reversed(entries))
        return [*first.values(), *last.values()] if isinstance(first, dict) and isinstance(last, dict) else []

    def _read(self) -> None:
        values = self._look()
        if (ids := list(map(id, values))) != self._ids:  # a counter that is a number is another one after each step
            self._values, self._ids = values, ids
            # Tensors of inference mode have no counter.
            self._tensors = [each for each in values if isinstance(each, torch.Tensor) and not each.is_inference()]
        self._versions = list(map(_version_of, self._tensors))
        self._all = self._look_at_all() if self._reads_all else None

    def _look_at_all(self) -> list[tuple[int, int]]:
        # By identity: to hold the tensors would double the memory of an optimizer whose steps make new ones.
        return [
            (id(value), value._version)
            for state in self._optimizer.state.values()
            if isinstance(state, dict)
            for value in state.values()
            if isinstance(value, torch.Tensor) and not value.is_inference()
        ]

    def note_all(self) -> None:
        """Look at the states of all parameters from the boundary that was just passed to the next one."""
        self._all = self._all or self._look_at_all()

    def note(self) -> bool:
        """A boundary is passed. Returns whether the optimizer has the state of more parameters than ever before."""
        self._read()
        before = self._num_states
        self._num_states = max(before, len(self._optimizer.state))
        return self._num_states > before

    def num_changed(self) -> int:
        """How many of these were changed or replaced since the boundary."""
        if list(map(id, self._look())) != self._ids:
            return max(1, len(self._ids))
        if self._all is None or (now := self._look_at_all()) == self._all:
            return sum(map(ne, map(_version_of, self._tensors), self._versions))
        self._reads_all = True
        return max(1, len(set(now) - set(self._all)))
