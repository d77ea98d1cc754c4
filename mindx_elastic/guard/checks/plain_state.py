"""Finds state in plain containers and arrays that a training changes: replay buffers, averages of weights in a dict.

Whether the training reads it, nothing here can tell: what is found is a risk. Lists and dicts cannot be referred to
weakly, so one is known again by its id and its name from one look to the next.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.printable import listed
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.core.tensor_memory import memory_of
from mindx_elastic.guard.checks.movements import Movement, TensorsLook
from mindx_elastic.guard.checks.surroundings import Found

__all__ = ["PlainState"]

_MOVES = 2
_MOST = 256
_MOST_BYTES = 1 << 22
_MOST_ELEMENTS = 1024
_NEAR = 0.5

_Weights = Sequence[Mapping[str, torch.Tensor]]


@dataclass
class _Growing:
    length: int
    last: int
    elements: Sequence[weakref.ref[Any]]
    """Of a list that is not too long."""
    moves: int = 0
    replaced: bool = False
    """In the last move."""
    is_told: bool = False


@dataclass
class _Average:
    look: TensorsLook
    moves: int = 0


@dataclass
class _Ring:
    numbers: Mapping[str, int]
    arrays: Mapping[str, weakref.ref[Any]]
    digests: Mapping[str, str]
    moves: int = 0


class PlainState:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], _Growing | _Average | _Ring] = {}

    def forget(self) -> None:
        """What has changed until the next look does not count."""
        self._before = {}

    @property
    def changing(self) -> set[int]:
        """By `id`: the averages and ring buffers that have changed up to the last look."""
        return {k[0] for k, state in self._before.items() if isinstance(state, (_Average, _Ring)) and state.moves}

    def look(
        self, found: Iterable[Found], weights: _Weights, is_kept: Callable[[torch.Tensor], bool]
    ) -> Iterator[tuple[str, str]]:
        """What is known against each of `found`, and what to write. `weights`: those of the named modules."""
        before, self._before = self._before, {}
        for one in found:
            if len(self._before) >= _MOST:
                return
            key = id(one.value), one.name
            state, told = self._look_at(one, before.get(key), weights, is_kept)
            if state is not None:
                self._before[key] = state
            if told is not None:
                yield told

    def _look_at(
        self, found: Found, before: object, weights: _Weights, is_kept: Callable[[torch.Tensor], bool]
    ) -> tuple[_Growing | _Average | _Ring | None, tuple[str, str] | None]:
        value = found.value
        if type(value) not in (list, dict, deque):
            return _look_at_ring(found, before)
        if average := _average_of(value, weights, is_kept):
            return _look_at_average(found, before, average)
        last = id(value[-1]) if type(value) in (list, deque) and value else 0
        now = _Growing(len(value), last, _elements_of(value) if type(value) is list else ())
        if isinstance(before, _Growing):
            replaced = _are_replaced(before.elements, value)
            if replaced or _has_grown(before, now, value):
                now.moves, now.replaced = before.moves + 1, replaced
            now.is_told = before.is_told
        if now.moves < _MOVES or now.is_told:
            return now, None
        now.is_told = True
        if now.replaced:
            return now, (
                f"{found} gets other tensors or arrays from step to step, and is not kept",
                f"If the training reads it (a pool of images), write {_line_of(found)}",
            )
        return now, (
            f"{found} grows from step to step, holds tensors or arrays, and is not kept",
            f"If the training reads it (a replay buffer), write {_line_of(found)}",
        )


def _line_of(found: Found) -> str:
    """The line that keeps it: with whatever else the object has that it is in, a count of updates or a place; such an
    object can be named as it is. The program's own trainer has more than that."""
    owner, dot, _ = found.name.rpartition(".")
    name = owner if dot and "[" not in owner and owner.rpartition(".")[2] != "self" else found.name
    last = "".join(c for c in name.rpartition(".")[2] if c.isalnum() or c == "_") or "state"
    key = f"own_{last}" if last in RESERVED_NAMES else last
    return f'Guard(stateful={{"{key}": {name}}}, ...)'


def _elements_of(value: Sequence[Any]) -> list[weakref.ref[Any]]:
    if len(value) > _MOST_ELEMENTS or not all(isinstance(one, (torch.Tensor, np.ndarray)) for one in value):
        return []
    return [weakref.ref(one) for one in value]


def _are_replaced(before: Sequence[weakref.ref[Any]], value: Sequence[Any]) -> bool:
    """Whether some are others, and some the same: a list that is filled anew in each step is none that is carried."""
    if not before or len(before) != len(value):
        return False
    same = sum(old() is new for old, new in zip(before, value, strict=True))
    return 0 < same < len(value)


def _has_grown(before: _Growing, now: _Growing, value: Any) -> bool:
    """Whether something was added; a full deque stays as long as it is and gets another end."""
    if now.length > before.length:
        return True
    return type(value) is deque and now.length == value.maxlen and now.last != before.last


# --- averages ---


def _average_of(value: Any, weights: _Weights, is_kept: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """The tensors of a container that has the names or shapes of a named module's weights and is close to them."""
    whole = list(value.values()) if type(value) is dict else list(value)
    if not whole or len(whole) > 10_000 or not all(isinstance(t, torch.Tensor) for t in whole):
        return []
    for named in weights:
        tensors, own = _by_name(value, named) if type(value) is dict else (whole, _matching(whole, [*named.values()]))
        if own and all(one is not None and one.shape == t.shape for one, t in zip(own, tensors, strict=True)):
            if any(is_kept(tensor) for tensor in tensors):
                return []
            return tensors if _are_near(tensors, [one for one in own if one is not None]) else []
    return []


def _by_name(
    value: Mapping[Any, torch.Tensor], named: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Those of `value` that may be averages, and the weight of each: all, or of a copied `state_dict()`, which has
    buffers as well, those of the weights."""
    keys = list(named) if len(value) > len(named) and all(key in value for key in named) else list(value)
    return [value[key] for key in keys], [named.get(key) for key in keys]


def _matching(tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not all(tensor.ndim for tensor in tensors):
        return []  # losses
    for some in (weights, [w for w in weights if w.requires_grad]):
        if len(some) == len(tensors):
            return some
    return []


def _are_near(tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
    def values(some: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
        sample = TensorsLook.at(some).sample
        return np.array([value for row in sample for value in row], dtype=np.complex128)

    one, other = values(tensors), values(weights)
    if one.shape != other.shape or not one.size:
        return False
    return bool(np.abs(one - other).sum() < _NEAR * np.abs(other).sum())


def _look_at_average(
    found: Found, before: object, tensors: list[torch.Tensor]
) -> tuple[_Average, tuple[str, str] | None]:
    now = _Average(TensorsLook.at(tensors))
    if isinstance(before, _Average) and before.look.movement(now.look) is Movement.MOVED:
        now.moves = before.moves + 1
    if now.moves < _MOVES:
        return now, None
    return now, (
        f"{found} looks like an average of the weights, changes in the training, and is not kept",
        f"Write {_line_of(found)}, or use torch.optim.swa_utils.AveragedModel",
    )


# --- ring buffers ---


def _look_at_ring(found: Found, before: object) -> tuple[_Ring | None, tuple[str, str] | None]:
    """An object that writes into arrays of its own, at places that it counts."""
    attributes = attributes_of(found.value)
    arrays = {
        n: v for n, v in attributes.items() if isinstance(v, (np.ndarray, torch.Tensor)) and v.ndim and len(v) > 1
    }
    most = max((len(array) for array in arrays.values()), default=0)
    numbers = {n: v for n, v in attributes.items() if type(v) is int and 0 <= v <= most}
    if not arrays or not numbers:
        return None, None
    digests = {name: _digest(array, numbers.values()) for name, array in arrays.items()}
    now = _Ring(numbers, {name: weakref.ref(array) for name, array in arrays.items()}, digests)
    if not isinstance(before, _Ring):
        return now, None
    written = [
        name
        for name, array in arrays.items()
        if name in before.arrays and before.arrays[name]() is array and before.digests[name] != digests[name]
    ]
    counted = [name for name, value in numbers.items() if before.numbers.get(name, value) != value]
    now.moves = before.moves + 1 if written and counted else before.moves
    if now.moves < _MOVES:
        return now, None
    return now, (
        f"{found} writes into {listed(written or sorted(arrays), 2)} from step to step and is not kept",
        f"If the training reads it (a replay buffer), write {_line_of(found)}",
    )


def _digest(array: Any, places: Iterable[int]) -> str:
    """Of the whole, or of the rows around `places` where that would take long."""
    rows = array
    nbytes = array.nbytes if isinstance(array, np.ndarray) else array.numel() * array.element_size()
    if nbytes > _MOST_BYTES:
        wanted = sorted({(place + offset) % len(array) for place in places for offset in (-1, 0)})[:8]
        rows = array[wanted]
    if isinstance(rows, torch.Tensor):
        if rows.is_meta or rows.layout is not torch.strided:
            return ""
        return xxhash.xxh3_64_hexdigest(memory_of(rows.detach().resolve_conj().resolve_neg().cpu().contiguous()))
    if rows.dtype == object:
        return ""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(rows).tobytes())
