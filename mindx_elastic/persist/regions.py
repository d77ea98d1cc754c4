"""Reads a box of elements of a stored tensor, and few bytes besides it.

A box consists of runs of consecutive bytes, one for each index of the outer dimensions, and is read run by run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from mindx_elastic.core.layout import Box
from mindx_elastic.core.tensor_memory import memory_of
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.entries import TensorEntry
from mindx_elastic.persist.format import Header

__all__ = ["read_box", "read_into"]

_PIECE_BYTES = 1 << 20  # little memory besides the part itself
_READ_BYTES = 8 << 20


def read_box(fd: int, header: Header, entry: TensorEntry, box: Box, out: torch.Tensor, path: Path) -> None:
    """Fill `out` (any strides) with the elements of `box` of tensor `entry`.

    fd: of `path`, whose header was checked. Raises CorruptCheckpointError when bytes are missing or the medium fails;
    digests are not checked here. Any thread.
    """
    if not out.numel():
        return
    shape, item = entry.shape, entry.nbytes // max(1, math.prod(entry.shape))
    start = header.data_start + entry.start
    inner = _inner(shape, box)
    strides = [math.prod(shape[i + 1 :]) * item for i in range(len(shape))]
    base = start + sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    for outer in product(*(range(stop - begin) for begin, stop in box[:inner])):
        offset = base + sum(index * stride for index, stride in zip(outer, strides, strict=False))
        _fill(out[outer], fd, offset, entry, path)


def _inner(shape: Sequence[int], box: Box) -> int:
    """The number of outer dimensions to iterate over: the remaining dimensions are one run."""
    inner = len(shape)
    while inner > 0 and all(
        (begin, stop) == (0, n) for (begin, stop), n in zip(box[inner:], shape[inner:], strict=True)
    ):
        inner -= 1
    return inner


def _fill(place: torch.Tensor, fd: int, offset: int, entry: TensorEntry, path: Path) -> None:
    """Fill `place` from consecutive bytes; through a small buffer where its own memory is not consecutive."""
    if place.is_contiguous() and place.reshape(-1).stride() == (1,):  # one element may have any strides
        read_into(fd, memory_of(place), offset, entry, path)
    elif place.ndim and place.nbytes > _PIECE_BYTES:
        for index in range(place.shape[0]):
            _fill(place[index], fd, offset + index * (place.nbytes // place.shape[0]), entry, path)
    else:
        buffer = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        read_into(fd, memory_of(buffer), offset, entry, path)
        place.copy_(buffer)


def read_into(fd: int, view: memoryview, offset: int, entry: TensorEntry, path: Path) -> None:
    """Fill `view` with bytes of tensor `entry`. Raises CorruptCheckpointError when bytes are missing or the medium
    fails. Any thread."""
    while view:
        try:
            count = os.preadv(fd, [view[:_READ_BYTES]], offset)
        except OSError as error:  # the medium fails: report a damaged file
            problem = f"{path}: tensor {entry.name} cannot be read: {error.strerror}"
            raise CorruptCheckpointError(problem, path=path, tensor=entry.name) from error
        if count == 0:
            problem = f"{path}: tensor {entry.name} is cut off; the file was truncated while it was read"
            raise CorruptCheckpointError(problem, path=path, tensor=entry.name)
        view, offset = view[count:], offset + count
