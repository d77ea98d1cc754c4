"""Reads parts of a stored tensor: a box of its elements, and no more bytes than it takes.

A box is runs of consecutive bytes, one for each index of the outer dimensions. Long runs are read one by one straight
into a buffer; where they are short (a slice of columns) the rows around them are read in pieces and sliced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.format import Header, TensorEntry

__all__ = ["read_box"]

_LONG_RUN_BYTES = 16 << 10  # a system call costs a few microseconds, as much as copying so many bytes
_FEW = 4  # rows that are so many times a run are not read for its sake
_PIECE_BYTES = 1 << 20  # of rows that are sliced: little memory beside the part itself
_READ_BYTES = 8 << 20

Box = Sequence[tuple[int, int]]


def read_box(fd: int, header: Header, entry: TensorEntry, box: Box, out: torch.Tensor, path: Path) -> int:
    """Fill `out` (any strides) with the elements of `box` of tensor `entry`; returns the bytes read.

    fd: of `path`, whose header was checked. Raises CorruptCheckpointError when bytes are missing or the medium fails;
    digests are not checked here. Any thread.
    """
    if not out.numel():
        return 0
    shape, item = entry.shape, entry.nbytes // max(1, math.prod(entry.shape))
    start = header.data_start + entry.start
    inner = _inner(shape, box)
    run = math.prod(stop - begin for begin, stop in box[inner:]) * item
    reader = _Reader(fd, entry, path)
    row = math.prod(shape[1:]) * item
    if run >= _LONG_RUN_BYTES or inner == 0 or row > _FEW * run:
        strides = [math.prod(shape[i + 1 :]) * item for i in range(len(shape))]
        for outer in product(*(range(begin, stop) for begin, stop in box[:inner])):
            offset = sum(index * stride for index, stride in zip(outer, strides, strict=False))
            offset += sum(begin * stride for (begin, _), stride in zip(box[inner:], strides[inner:], strict=True))
            place = out[tuple(index - begin for index, (begin, _) in zip(outer, box, strict=False))]
            reader.fill(place, start + offset)
        return reader.num_bytes
    columns = tuple(slice(begin, stop) for begin, stop in box[1:])
    first, last = box[0]
    size = max(1, _PIECE_BYTES // max(1, row))
    buffer = torch.empty((min(size, last - first), *shape[1:]), dtype=entry.torch_dtype)
    for begin in range(first, last, size):
        rows = buffer[: min(size, last - begin)]
        reader.fill(rows, start + begin * row)
        out[begin - first : begin - first + len(rows)].copy_(rows[(slice(None), *columns)])
    return reader.num_bytes


def _inner(shape: Sequence[int], box: Box) -> int:
    """The number of outer dimensions that have to be walked through: what comes after them is one run."""
    inner = len(shape)
    while inner > 0 and all(
        (begin, stop) == (0, n) for (begin, stop), n in zip(box[inner:], shape[inner:], strict=True)
    ):
        inner -= 1
    return inner


class _Reader:
    def __init__(self, fd: int, entry: TensorEntry, path: Path) -> None:
        self._fd, self._entry, self._path = fd, entry, path
        self.num_bytes = 0

    def fill(self, place: torch.Tensor, offset: int) -> None:
        """All of `place` from consecutive bytes; through a buffer where its own memory is not consecutive."""
        straight = place.is_contiguous() and place.reshape(-1).stride() == (1,)  # one element may have any strides
        target = place if straight else torch.empty(place.shape, dtype=place.dtype)
        view = target.reshape(-1).view(torch.uint8).numpy().data if target.numel() else memoryview(b"")
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done : done + _READ_BYTES]], offset + done)
            except OSError as error:
                raise self._error(f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise self._error("is cut off; the file was truncated while it was read")
            done += count
        self.num_bytes += done
        if target is not place:
            place.copy_(target)

    def _error(self, problem: str) -> CorruptCheckpointError:
        name = self._entry.name
        return CorruptCheckpointError(f"{self._path}: tensor {name} {problem}", path=self._path, tensor=name)
