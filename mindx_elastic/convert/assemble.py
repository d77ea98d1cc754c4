"""One whole tensor from the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.core.layout import Box, Layout, local_places
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, MismatchError, UsageError

__all__ = ["ReadPart", "assemble", "first_healthy"]

ReadPart = Callable[[int], torch.Tensor | None]
"""The part of one tensor that a rank's file holds; None: no file, or the tensor is not in it. Raises CheckpointError
for a damaged one."""


def first_healthy(name: str, ranks: list[int], read: ReadPart, shard: str = "") -> torch.Tensor:
    """Of ranks that hold the same, the lowest one's that can be read. Raises CorruptCheckpointError."""
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


def assemble(
    name: str, layout: Layout, shape: tuple[int, ...] | None, read: ReadPart, scratch: Scratch
) -> torch.Tensor:
    """The whole tensor; each part comes from the lowest rank that has it.

    shape: of the whole; None: it is not known because a part is missing. Raises CorruptCheckpointError where a part is
    in no file, MismatchError where a part does not have the size that the layout gives it.
    """
    parts: list[torch.Tensor | None] = []
    for number, holders in enumerate(layout.holders):
        if shape is not None and 0 in _local_shape(name, layout, shape, number):
            parts.append(None)
            continue
        part = first_healthy(name, list(holders), read, f"part {number + 1} of {layout.num_shards} ")
        if shape is None:
            parts.append(part)
            continue
        wanted = _local_shape(name, layout, shape, number)
        if tuple(part.shape) != wanted or (parts and parts[0] is not None and parts[0].dtype != part.dtype):
            raise MismatchError(
                f"{name}: part {number + 1} of {layout.num_shards} is {part.dtype} {list(part.shape)}, and {layout} of "
                f"{list(shape)} makes it {list(wanted)}: the files and the layout do not belong together"
            )
        parts.append(part)
    first = next((part for part in parts if part is not None), None)
    if shape is None:
        raise MismatchError(f"{name}: the shape of the whole is not known")
    if first is None:  # empty on every rank
        return first_healthy(name, sorted(layout.ranks), read).new_empty(shape)
    if len(parts) == 1:
        return first
    whole = scratch.empty(shape, first.dtype)  # bounded: all its parts are there
    for number, found in enumerate(parts):
        if found is not None:
            for box, local in local_places(layout.segments(shape, number)):
                whole[_slices(box)] = found[_slices(local)]
    return whole


def _local_shape(name: str, layout: Layout, shape: tuple[int, ...], shard: int) -> tuple[int, ...]:
    try:
        return layout.local_shape(shape, shard)
    except UsageError as error:
        raise MismatchError(f"{name}: {error}") from None


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
