"""What the planner must answer, worked out the slow way: element by element.

Shares no code with ``mindx_elastic.start``. A tensor's elements are numbered, every rank's part is the list of its
numbers, and a step can be resumed from when each element that a new rank needs is in some usable file that it can see.
A spread says in which order the splits happen, so that what a ``_StridedShard`` means is checked, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Moment = tuple[str, int, int]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
DYING = ("breakpoint", "ttp", "request_exit", "snapshot")
NEAR_STEPS = 2


@dataclass(frozen=True)
class Spread:
    """How a tensor lies on ranks."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    """Row by row."""
    splits: tuple[tuple[int, int], ...] = ()
    """(mesh dimension, tensor dimension), in the order in which they are made."""


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    spread: Spread


@dataclass(frozen=True)
class File:
    number: int
    rank: int
    moment: Moment
    world_size: int
    kind: str
    created: float
    describes: frozenset[str]
    """Names of tensors."""
    seen_by: frozenset[int] | None = None


@dataclass(frozen=True)
class Case:
    """Everything that the planner is told."""

    world_size: int
    tensors: tuple[Tensor, ...]
    files: tuple[File, ...]
    new_size: int
    faults: frozenset[int] = frozenset()
    own_states: Mapping[Moment, frozenset[int]] = field(default_factory=dict)
    target: Mapping[str, Spread] | None = None
    """Of every tensor; None: as it was."""


# --- who holds what ---


def chunk(numbers: Numbers, parts: int) -> list[Numbers]:
    """As ``torch.chunk``, filled up with empty pieces: all of ``ceil(n / parts)`` but the last."""
    size = math.ceil(len(numbers) / parts)
    cuts = [min(size * i, len(numbers)) for i in range(1, parts)]
    return np.split(numbers, cuts)


def rows_of(shape: tuple[int, ...], spread: Spread, rank: int) -> list[Numbers] | None:
    """For each dimension the indices that `rank` holds; None: it has no part in the tensor."""
    if rank not in spread.ranks:
        return None
    coordinate = np.unravel_index(spread.ranks.index(rank), spread.mesh)
    held = [np.arange(size) for size in shape]
    for mesh_dim, dim in spread.splits:
        held[dim] = chunk(held[dim], spread.mesh[mesh_dim])[int(coordinate[mesh_dim])]
    return held


def part(shape: tuple[int, ...], spread: Spread, rank: int) -> Numbers | None:
    """The numbers of the elements in the memory of `rank`, in its shape."""
    rows = rows_of(shape, spread, rank)
    if rows is None:
        return None
    whole = np.arange(math.prod(shape)).reshape(shape)
    return whole[np.ix_(*rows)] if shape else whole


def elements(shape: tuple[int, ...], spread: Spread, rank: int) -> set[int]:
    held = part(shape, spread, rank)
    return set() if held is None else set(held.ravel().tolist())


# --- which step ---


def answers(case: Case) -> set[Moment | None]:
    """The step to choose; None: refuse. Two, where it is a matter of taste whether empty parts were laid out again."""
    return {_choose(case, taste) for taste in ((False, True) if case.target is not None else (False,))}


def _choose(case: Case, empty_parts_count: bool) -> Moment | None:
    for moment in _in_order(case):
        if not resumable(case, moment, empty_parts_count):
            continue
        if not _lonely(case, moment, empty_parts_count):
            return moment
        for back in range(1, NEAR_STEPS + 1):
            near = (moment[0], moment[1], moment[2] - back)
            exact = not _lonely(case, near, empty_parts_count) and not _laid_out_anew(case, near, empty_parts_count)
            if exact and resumable(case, near, empty_parts_count):
                return near
        return moment
    return None


def _in_order(case: Case) -> list[Moment]:
    newest: dict[str, float] = {}
    for file in case.files:
        newest[file.moment[0]] = max(file.created, newest.get(file.moment[0], 0.0))
    return sorted({f.moment for f in case.files}, key=lambda m: (-newest[m[0]], m[0], -m[1], -m[2]))


def usable(case: Case, moment: Moment) -> list[File]:
    """What a faulty rank wrote while the job was dying in its run's last attempt is not believed."""
    last = max((f.moment[1] for f in case.files if f.moment[0] == moment[0]), default=0)
    of_it = [f for f in case.files if f.moment == moment]
    return [f for f in of_it if not (f.rank in case.faults and f.kind in DYING and moment[1] == last)]


def _known(case: Case, files: list[File]) -> list[Tensor]:
    return [t for t in case.tensors if any(t.name in f.describes for f in files)]


def resumable(case: Case, moment: Moment, empty_parts_count: bool) -> bool:
    files = usable(case, moment)
    if not files or len({f.world_size for f in files}) > 1 or files[0].world_size != case.world_size:
        return False
    tensors = _known(case, files)
    for rank in range(case.world_size):
        if not any(f.rank == rank for f in files) and not any(rank in t.spread.ranks for t in tensors):
            return False  # nothing says what it held
    for tensor in tensors:  # of everything that there was, even if nobody needs it any more
        held = set().union(*(elements(tensor.shape, tensor.spread, f.rank) for f in files))
        if held != set(range(math.prod(tensor.shape))):
            return False
    anew = _laid_out_anew(case, moment, empty_parts_count)
    return all(_can_read(case, files, tensors, reader, anew) for reader in range(case.new_size))


def _can_read(case: Case, files: list[File], tensors: list[Tensor], reader: int, anew: bool) -> bool:
    """It sees a file that has all that it wants, or all parts of all tensors, whether it wants them or not."""
    seen = [f for f in files if f.seen_by is None or reader in f.seen_by]
    if anew:
        spreads = [(t.spread, case.target[t.name] if case.target is not None else t.spread) for t in tensors]
        sizes = (case.world_size, case.new_size)
        if all(
            not _splitting(each) and len(each.ranks) == size
            for pair in spreads
            for each, size in zip(pair, sizes, strict=True)
        ):
            return bool(seen)
    elif any(f.rank == reader or all(_shard(t, f.rank) == _shard(t, reader) for t in tensors) for f in seen):
        return True
    for tensor in tensors:
        held = set().union(*(elements(tensor.shape, tensor.spread, f.rank) for f in seen))
        if held != set(range(math.prod(tensor.shape))):
            return False
    return bool(seen)


def _splitting(spread: Spread) -> list[int]:
    return [mesh_dim for mesh_dim, _ in spread.splits if spread.mesh[mesh_dim] > 1]


def _shard(tensor: Tensor, rank: int) -> tuple[int, ...] | None:
    """Which part it is, whatever is in it; None: none."""
    spread = tensor.spread
    if rank not in spread.ranks:
        return None
    place = np.unravel_index(spread.ranks.index(rank), spread.mesh)
    return tuple(int(place[mesh_dim]) for mesh_dim in _splitting(spread))


def _lonely(case: Case, moment: Moment, empty_parts_count: bool) -> bool:
    """Not exact, because a rank has neither its own file nor its own random numbers; of unchanged layouts only."""
    if _laid_out_anew(case, moment, empty_parts_count):
        return False
    own = {f.rank for f in usable(case, moment) if f.seen_by is None or f.rank in f.seen_by}
    return any(rank not in own and rank not in case.own_states.get(moment, ()) for rank in range(case.new_size))


def _laid_out_anew(case: Case, moment: Moment, empty_parts_count: bool) -> bool:
    if case.target is None:
        return False
    if case.new_size != case.world_size:
        return True
    for tensor in _known(case, usable(case, moment)):
        old, new = tensor.spread, case.target[tensor.name]
        for rank in range(case.new_size):
            before, after = part(tensor.shape, old, rank), part(tensor.shape, new, rank)
            if (before is None) != (after is None):
                return True
            if before is None or after is None:
                continue
            if before.ravel().tolist() != after.ravel().tolist():
                return True
            if empty_parts_count and _rows(tensor.shape, old, rank) != _rows(tensor.shape, new, rank):
                return True
    return False


def _rows(shape: tuple[int, ...], spread: Spread, rank: int) -> list[list[int]]:
    """Which ones of each dimension, also where another dimension has none."""
    return [each.tolist() for each in rows_of(shape, spread, rank) or ()]
