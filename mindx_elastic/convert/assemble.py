"""One whole tensor from the parts that ranks hold.

Each part comes from the lowest rank that has it, by the `Layout` of the tensor over ranks that may stand in for one
another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindx_elastic.convert.mapped import Scratch
from mindx_elastic.core.layout import Box, Layout
from mindx_elastic.core.printable import listed
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, MismatchError, UsageError

__all__ = ["ReadPart", "Size", "assemble", "first_healthy"]

Size = tuple[int, ...]


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
