"""Tells which optimizers step that the guard was not given, and whether their state is carried from step to step.

Programs make optimizers for a moment, too (the inner loop of a meta-learner, an attack on the inputs): one that is made
anew, or set back, in each step leaves nothing for a checkpoint. And wrappers (Lookahead, LARC, ZeRO) step an optimizer
inside whose state is theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mindx_elastic.capture.copying import map_tensors
from mindx_elastic.core.looks import has_method, text_of

__all__ = ["Strangers", "storage_of"]

_MOST = 256
_PATIENCE = 8
_MOST_DEPTH = 4


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of its memory; None where it has none of its own."""
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
    options: str
    steps: int


class Strangers:
    """`note` runs in the thread that updates, which may be one of autograd's; all else in the training thread."""

    def __init__(self, named: Iterable[Optimizer]) -> None:
        self.expected: set[int] = set()
        """By `id`: optimizers whose steps need no further look."""
        self.stepped: set[int] = set()
        """By `id`: the named ones that have stepped."""
        self.waiting: dict[int, weakref.ref[Optimizer]] = {}
        """By `id`: those that have stepped since the last boundary."""
        self._named = {id(optimizer) for optimizer in named}
        self._covered: dict[int, weakref.ref[Optimizer]] = {}
        self._carried: dict[int, _Carried] = {}

    def note(self, optimizer: Optimizer) -> None:
        """`optimizer`, which is not in `expected`, has stepped."""
        key = id(optimizer)
        if key in self._named:
            self.stepped.add(key)
            self.expected.add(key)
        else:
            self.waiting[key] = weakref.ref(optimizer)

    def covered_ids(self) -> set[int]:
        """By `id`: those that are part of a named one."""
        return {key for key, reference in self._covered.items() if reference() is not None}

    def at_boundary(self, named: Iterable[Optimizer], others: Iterable[Any] = ()) -> list[Optimizer]:
        """A step has ended: the optimizers that have carried state into it and are part of none of `named`, nor in the
        ``state_dict()`` of one of `others`."""
        waiting, self.waiting = self.waiting, {}
        owners, found = list(named), []
        more = [other for other in others if not isinstance(other, Optimizer) and has_method(other, "state_dict")]
        for key, reference in waiting.items():
            optimizer = reference()
            if optimizer is None:
                self._carried.pop(key, None)
            elif _is_part_of(optimizer, owners) or any(_gives(other, optimizer) for other in more):
                self._covered[key] = weakref.ref(optimizer, lambda _, key=key: self._forget(key))  # type: ignore[misc]
                self.expected.add(key)
            elif self._carries(key, optimizer):
                found.append(optimizer)
        for key in [key for key, carried in self._carried.items() if carried.optimizer() is None]:
            del self._carried[key]
        return found

    def look_again(self) -> None:
        """Ask again about those that had no state for many steps."""
        self.expected -= {key for key in self._carried if key not in self._covered}

    def _forget(self, key: int) -> None:
        self._covered.pop(key, None)
        self.expected.discard(key)  # another optimizer may get its id

    def _carries(self, key: int, optimizer: Optimizer) -> bool:
        before = self._carried.get(key)
        if before is not None and before.optimizer() is not optimizer:
            before = None
        if before is None and len(self._carried) >= _MOST:
            return False
        now = self._carried[key] = _look(optimizer, 1 if before is None else before.steps + 1)
        if before is None:
            return False
        if _is_empty(now.state):
            if before.options != now.options and _is_empty(before.state):
                return True
            if now.steps >= _PATIENCE:
                self.expected.add(key)  # until `look_again`
                weakref.finalize(optimizer, self.expected.discard, key)
            return False
        assert before.parameter is None or now.parameter is not None
        same = before.parameter is not None and now.parameter is not None and before.parameter() is now.parameter()
        return same and before.state is now.state


def _look(optimizer: Optimizer, steps: int) -> _Carried:
    state = optimizer.state
    tensors = [key for key in state if isinstance(key, torch.Tensor)]
    smallest = min(tensors, key=lambda tensor: tensor.numel(), default=None)
    options = [{k: text_of(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return _Carried(
        weakref.ref(optimizer),
        None if smallest is None else weakref.ref(smallest),
        None if smallest is None else state[smallest],
        repr(options),
        steps,
    )


def _is_empty(state: object) -> bool:
    return not isinstance(state, Mapping) or all(value is None for value in state.values())


def _is_part_of(optimizer: Optimizer, named: Iterable[Optimizer]) -> bool:
    """Whether the state of `optimizer` is what a named one gives to a checkpoint."""
    owners = list(named)
    if any(optimizer.state is owner.state for owner in owners):
        return True
    shares = any(
        len(owner.param_groups) >= len(optimizer.param_groups) > 0
        and all(any(mine is theirs for theirs in owner.param_groups) for mine in optimizer.param_groups)
        for owner in owners
    )
    own = _tensors_of(dict(optimizer.state))
    if not own:
        return shares and all(_is_empty(state) for state in optimizer.state.values())
    kept = {storage_of(tensor) for owner in owners for tensor in _tensors_of(_state_of(owner))}
    return all(storage_of(tensor) in kept for tensor in own)


def _gives(owner: Any, optimizer: Optimizer) -> bool:
    """Whether what a checkpoint gets of `owner`, a wrapper or trainer of the program's own, has the ``state_dict()`` of
    `optimizer` in it."""
    own = {storage_of(tensor) for tensor in _tensors_of(dict(optimizer.state))}
    for state in _optimizer_states(owner.state_dict()):
        kept = {storage_of(tensor) for tensor in _tensors_of(state["state"])}
        if own <= kept and list(map(_shown, state["param_groups"])) == list(map(_shown, optimizer.param_groups)):
            return True
    return False


def _shown(group: Mapping[str, Any]) -> str:
    """The options of a parameter group, and how many parameters it has."""
    return text_of([(key, len(value) if key == "params" else value) for key, value in sorted(group.items())])


def _optimizer_states(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping) and isinstance(value.get("param_groups"), list) and "state" in value:
        yield value
    elif depth < _MOST_DEPTH and isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizer_states(item, depth + 1)


def _state_of(owner: Optimizer) -> Any:
    """What a checkpoint gets of it, and where that cannot be asked for here what it has: a ZeroRedundancyOptimizer has
    to be consolidated first."""
    try:
        return owner.state_dict()
    except RuntimeError:
        return dict(owner.state)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return [tensor for tensor in found if tensor.numel()]
