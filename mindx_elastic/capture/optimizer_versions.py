"""Whether the state of optimizers was changed since a boundary without one of their steps, by version counters.

A program may do so by hand: decay the momentum, clear it for a warm restart. Torch's optimizers change their state in
place and keep its tensors, so these are collected once, and a boundary only reads their counters. Each look begins with
the state of the first and the last parameter: where it has other tensors, all are collected again. Of an optimizer
whose steps make new tensors only these two are looked at: to hold the others would double its memory in each step.

Rejected: to count on what an update adds, and to read the counters at few boundaries (a third of a boundary's time).
Where a program changes what an update adds (it freezes a layer, decays the momentum of one by hand), the state is then
taken for a changed one at every stop and snapshot until the next reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
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
        self._replaces = False
        self._num_states = 0
        self._ends: list[Any] = []
        self._collect(self._look())
        self._versions = list(map(_version_of, self._tensors))

    def _look(self) -> list[Any]:
        """The state of the first and of the last parameter that have one."""
        entries = self._optimizer.state.values()
        if not entries:
            return []
        first, last = next(iter(entries)), next(reversed(entries))
        return [*first.values(), *last.values()] if isinstance(first, dict) and isinstance(last, dict) else []

    def _collect(self, ends: list[Any]) -> None:
        """Others than before. `ends`: as `_look` has just found them."""
        before, now = _tensors(self._ends), _tensors(ends)
        # At first there is none, and then more. A counter that is a number is another object after each step.
        self._replaces |= len(before) == len(now) and list(map(id, before)) != list(map(id, now))
        self._ends, self._ids = ends, list(map(id, ends))
        every = [] if self._replaces else [each for each in self._optimizer.state.values() if isinstance(each, dict)]
        self._tensors = now if self._replaces else _tensors(chain(*map(dict.values, every)))

    def note(self) -> bool:
        """A boundary is passed. Returns whether the optimizer has the state of more parameters than ever before."""
        ends, before = self._look(), self._num_states
        if list(map(id, ends)) != self._ids:
            self._num_states = max(before, len(self._optimizer.state))
            self._collect(ends)
        self._versions = list(map(_version_of, self._tensors))
        return self._num_states > before

    def num_changed(self) -> int:
        """How many tensors were changed or replaced since the boundary."""
        if list(map(id, self._look())) != self._ids:
            return max(1, len(self._ids))
        now = list(map(_version_of, self._tensors))
        return 0 if now == self._versions else sum(map(ne, now, self._versions))


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors with a counter: those of inference mode have none."""
    return [value for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]
