"""Tells which optimizers step that the guard was not given, and whether their state is carried from step to step.

Programs make optimizers for a moment, too (the inner loop of a meta-learner, an attack on the inputs): one that is made
again, or set back, in each step leaves nothing for a checkpoint. And wrappers (Lookahead, LARC, ZeRO) step an optimizer
inside whose state is theirs. One without state (plain SGD) has nothing but its options, and is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mindx_elastic.capture.copying import tensors_in
from mindx_elastic.core.looks import attributes_of, has_method

__all__ = ["UnnamedOptimizers", "storage_of"]

_MOST = 256


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of its memory; None where it has no memory of its own."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    try:
        with torch._C.DisableTorchFunctionSubclass():  # a tensor class of the program may have code there
            return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


@dataclass
class _Carried:
    """What an optimizer had at the end of a step in which it has stepped."""

    optimizer: weakref.ref[Optimizer]
    parameter: weakref.ref[torch.Tensor] | None
    state: Any
    """The state of its smallest parameter: the object itself, since a dict cannot be referred to weakly."""


class UnnamedOptimizers:
    """`note` runs in the thread that updates, which may be one of autograd's; all else in the training thread."""

    def __init__(self, named: Iterable[Optimizer]) -> None:
        self.expected: set[int] = set()
        """The `id` of optimizers whose steps need no further look."""
        self.waiting: dict[int, weakref.ref[Optimizer]] = {}
        """The optimizers that have stepped since the last boundary, by `id`."""
        self._named = {id(optimizer) for optimizer in named}
        self._covered: set[int] = set()
        self._carried: dict[int, _Carried] = {}

    def note(self, optimizer: Optimizer) -> None:
        """`optimizer`, which is not in `expected`, has stepped."""
        key = id(optimizer)
        if key in self._named:
            self.expected.add(key)
        else:
            self.waiting[key] = weakref.ref(optimizer)

    def covered_ids(self) -> set[int]:
        """The `id` of the optimizers that are part of a named one."""
        return self._covered

    def at_boundary(self, owners: Sequence[Any]) -> list[Optimizer]:
        """A step has ended: the optimizers that have carried state into it, which is in the ``state_dict()`` of none of
        `owners`."""
        waiting, self.waiting = self.waiting, {}
        found = []
        for key, reference in waiting.items():
            optimizer = reference()
            if optimizer is None:
                self._carried.pop(key, None)
            elif _is_part_of(optimizer, owners):
                self._covered.add(key)
                self.expected.add(key)
                weakref.finalize(optimizer, self._forget, key)
            elif self._carries(key, optimizer):
                found.append(optimizer)
        for key in [key for key, carried in self._carried.items() if carried.optimizer() is None]:
            del self._carried[key]
        return found

    def _forget(self, key: int) -> None:
        self._covered.discard(key)
        self.expected.discard(key)  # another optimizer may get its id

    def _carries(self, key: int, optimizer: Optimizer) -> bool:
        before = self._carried.get(key)
        if before is None and len(self._carried) >= _MOST:
            return False
        now = self._carried[key] = _look(optimizer)
        if before is None or before.optimizer() is not optimizer or _is_empty(now.state):
            return False
        same = before.parameter is not None and now.parameter is not None and before.parameter() is now.parameter()
        return same and before.state is now.state


def _look(optimizer: Optimizer) -> _Carried:
    state = optimizer.state
    tensors = [key for key in state if isinstance(key, torch.Tensor)]
    smallest = min(tensors, key=lambda tensor: tensor.numel(), default=None)
    if smallest is None:
        return _Carried(weakref.ref(optimizer), None, None)
    return _Carried(weakref.ref(optimizer), weakref.ref(smallest), state[smallest])


def _is_empty(state: object) -> bool:
    return not isinstance(state, Mapping) or all(value is None for value in state.values())


def _is_part_of(optimizer: Optimizer, owners: Sequence[Any]) -> bool:
    """Whether the state of `optimizer` is in what a checkpoint gets of named optimizers, wrappers and trainers."""
    if any(optimizer.state is attributes_of(owner).get("state") for owner in owners):
        return True
    own = {storage_of(tensor) for tensor in _tensors_of(dict(optimizer.state))}
    return bool(own) and own <= {storage_of(tensor) for owner in owners for tensor in _tensors_of(_state_of(owner))}


def _state_of(owner: Any) -> Any:
    """What a checkpoint gets of it, and where that cannot be asked for here what it has: a ZeroRedundancyOptimizer has
    to be consolidated first."""
    if not has_method(owner, "state_dict"):
        return None
    try:
        return owner.state_dict()
    except RuntimeError:
        return dict(owner.state) if isinstance(owner, Optimizer) else None


def _tensors_of(value: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensors_in(value) if tensor.numel()]
