"""Whether the state of optimizers was changed since a boundary without one of their steps, by version counters.

A program may do so by hand: decay the momentum, clear it for a warm restart. Torch's optimizers change their state in
place, keep its tensors, and change each one equally often in every update. So the tensors are collected once, and their
counters are read in the first steps and at one boundary in 26; at the others they are *counted on*: known are the
counters of the last reading and what an update adds. A boundary reads them nevertheless where

* the parameters have not changed as in the update before (no update, or one that leaves some out)
* the state of the first or of the last parameter has other tensors, or their counters are not as counted on
* the counters were once not as counted on: from then on always

So a change by hand that leaves alone the parameters, and the state of the first and the last one, may be seen at up to
25 boundaries after its own: a save between two steps is refused once, and no changed state is taken for a boundary's.
Of an optimizer whose steps make new tensors only the first and the last parameter's are looked at: to hold the others
would double its memory in each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import add, attrgetter, ne, sub
from typing import Any

import torch

__all__ = ["OptimizerVersions"]

_MOST_PASSED = 25
_version_of = attrgetter("_version")


class OptimizerVersions:
    """The version counters of one optimizer. `note` belongs to the training thread, `num_changed` to the holder of the
    gate."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._replaces = self._is_uneven = False
        self._ends: list[Any] = []
        self._ids: list[int] = []  # of `_ends`
        self._collect(self._look())

    def _look(self) -> list[Any]:
        """The state of the first and of the last parameter that have one."""
        entries = self._optimizer.state.values()
        if not entries:
            return []
        first, last = next(iter(entries)), next(reversed(entries))
        return [*first.values(), *last.values()] if isinstance(first, dict) and isinstance(last, dict) else []

    def _collect(self, ends: list[Any]) -> None:
        """Others than before. `ends`: as `_look` has just found them."""
        before, self._tensors_at_ends = _tensors(self._ends), _tensors(ends)
        # At first there is none, and then more. A counter that is a number is another object after each step.
        is_same_number = len(before) == len(self._tensors_at_ends)
        self._replaces |= is_same_number and list(map(id, before)) != list(map(id, self._tensors_at_ends))
        self._ends, self._ids = ends, list(map(id, ends))
        every = [] if self._replaces else [each for each in self._optimizer.state.values() if isinstance(each, dict)]
        self._tensors = self._tensors_at_ends if self._replaces else _tensors(chain(*map(dict.values, every)))
        self._versions, self._at_ends = self._read()
        self._added: list[int] = []  # by the last update that was read
        self._added_at_ends: list[int] = []
        self._num_passed = 0  # updates since the reading
        self._is_counted_on = False

    def _read(self) -> tuple[list[int], list[int]]:
        return list(map(_version_of, self._tensors)), list(map(_version_of, self._tensors_at_ends))

    def _counted_on(self, num_updates: int) -> list[int]:
        if not num_updates:
            return self._versions
        return [version + num_updates * added for version, added in zip(self._versions, self._added, strict=True)]

    def note(self, *, as_usual: bool) -> None:
        """A boundary is passed. `as_usual`: the parameters have changed as in the update before."""
        ends = self._look()
        if list(map(id, ends)) != self._ids:
            self._collect(ends)
            return
        if as_usual and self._is_counted_on and self._num_passed < _MOST_PASSED:
            at_ends = list(map(_version_of, self._tensors_at_ends))
            if at_ends == list(map(add, self._at_ends, self._added_at_ends)):
                self._at_ends = at_ends
                self._num_passed += 1
                return
        now, at_ends = self._read()
        if as_usual and self._is_counted_on:
            self._is_counted_on = now == self._counted_on(self._num_passed + 1)
            self._is_uneven = not self._is_counted_on
        elif as_usual and not self._is_uneven:
            before, self._added = self._added, list(map(sub, now, self._versions))
            self._added_at_ends = list(map(sub, at_ends, self._at_ends))
            self._is_counted_on = before == self._added
        self._versions, self._at_ends, self._num_passed = now, at_ends, 0

    def num_changed(self) -> int:
        """How many tensors were changed or replaced since the boundary."""
        if list(map(id, self._look())) != self._ids:
            return max(1, len(self._ids))
        now, then = list(map(_version_of, self._tensors)), self._counted_on(self._num_passed)
        if now == then:
            return 0
        self._is_counted_on, self._is_uneven = False, True
        return sum(map(ne, now, then))


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors with a counter: those of inference mode have none."""
    return [value for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]
