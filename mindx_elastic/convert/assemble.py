"""One whole tensor from the parts that ranks hold.

Two kinds of formats: those that say where each part is in the whole (`TensorPart`: DCP's chunks), and those with a
`Layout` over ranks that may stand in for one another (`assemble`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.core.layout import Box, Layout
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, MismatchError, UsageError

__all__ = ["ReadPart", "Size", "TensorPart", "assemble", "check_parts", "first_healthy", "put_together"]

Size = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor, and what reads it."""

    offsets: Size
    sizes: Size
    read: Callable[[], torch.Tensor]


def check_parts(name: str, shape: Size, parts: Sequence[TensorPart]) -> None:
    """Raise ValueError unless the parts fill the tensor, without overlap."""
    filled = [part for part in parts if math.prod(part.sizes)]
    for part in filled:
        inside = len(part.offsets) == len(part.sizes) == len(shape)
        if not inside or not all(o + s <= n for o, s, n in zip(part.offsets, part.sizes, shape, strict=True)):
            raise ValueError(f"{name!s:.80}: a part outside of its tensor")
    there = sum(math.prod(part.sizes) for part in filled)
    if there != math.prod(shape) or not _disjoint(filled):
        raise ValueError(
            f"{name!s:.80}: its parts do not make up a tensor of {list(shape)} ({there} of {math.prod(shape)} elements)"
        )


def _disjoint(parts: Sequence[TensorPart]) -> bool:
    """Sorted along the first dimension, so that rows of an FSDP job are compared with their neighbours only."""
    active: list[TensorPart] = []
    for part in sorted(parts, key=lambda p: p.offsets):
        if not part.offsets:
            return len(parts) == 1
        active = [other for other in active if other.offsets[0] + other.sizes[0] > part.offsets[0]]
        for other in active:
            pairs = zip(part.offsets, part.sizes, other.offsets, other.sizes, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in pairs):
                return False
        active.append(part)
    return True


def put_together(shape: Size, dtype: torch.dtype, parts: Sequence[TensorPart], scratch: Scratch) -> torch.Tensor:
    """The whole tensor of parts that `check_parts` has accepted, copied: what `TensorPart.read` gives may go."""
    whole = scratch.empty(shape, dtype)
    for part in parts:
        if math.prod(part.sizes):
            whole[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))] = part.read()
    return whole


ReadPart = Callable[[int], torch.Tensor | None]
"""The part of one tensor that a rank's file holds; None: no file, or the tensor is not in it. Raises CheckpointError
for a damaged one."""


def first_healthy(name: str, ranks: list[int], read: ReadPart, shard: str = "") -> torch.Tensor:
    """The tensor of the lowest readable rank among ranks that hold the same. Raises CorruptCheckpointError."""
    problems = []
    for rank in ranks:
        try:
            part = read(rank)
        except CheckpointError as error:
            problems.append(f"rank {rank}: {error}")
        else:
            if part is not None:
                return part
            problems.append(f"rank {rank}: no file has it")
    why = listed(problems, 4, "; ")
    raise CorruptCheckpointError(f"{name}: {shard}cannot be read from any file ({why})", tensor=name)


def assemble(name: str, layout: Layout, shape: Size, read: ReadPart, scratch: Scratch) -> torch.Tensor:
    """The whole tensor, of `shape`; each part comes from the lowest rank that has it.

    Raises CorruptCheckpointError where a part is in no file, MismatchError where a part does not have the size that the
    layout gives it.
    """
    parts: list[tuple[Box, torch.Tensor]] = []
    for number, holders in enumerate(layout.holders):
        try:
            box = layout.box(shape, number)
        except UsageError as error:
            raise MismatchError(f"{name}: {error}") from None
        wanted = tuple(stop - start for start, stop in box)
        if 0 in wanted:
            continue
        part = first_healthy(name, list(holders), read, f"part {number + 1} of {layout.num_shards} ")
        if tuple(part.shape) != wanted or (parts and parts[0][1].dtype != part.dtype):
            raise MismatchError(
                f"{name}: part {number + 1} of {layout.num_shards} is {part.dtype} {list(part.shape)}, and {layout} of "
                f"{list(shape)} makes it {list(wanted)}: the files and the layout do not belong together"
            )
        parts.append((box, part))
    if not parts:  # empty on every rank
        return first_healthy(name, sorted(layout.ranks), read).new_empty(shape)
    if layout.num_shards == 1:
        return parts[0][1]
    whole = scratch.empty(shape, parts[0][1].dtype)  # bounded: all its parts are there
    for box, part in parts:
        whole[tuple(slice(start, stop) for start, stop in box)] = part
    return whole
