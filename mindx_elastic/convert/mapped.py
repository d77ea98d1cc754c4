"""Tensors in mapped files, so that a checkpoint may be larger than the memory of the machine that converts it.

A tensor of a safetensors file is a mapping of the file: its bytes are read when they are written elsewhere, and the
kernel drops them when memory is short. A tensor that is assembled from parts goes to an unnamed scratch file next to
the destination, for the same reason.

Each tensor gets a storage of exactly its own bytes. One storage for the whole file would be simpler, and `torch.save`
of a single tensor would then write all of it.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from mindx_elastic.core.posix import open_regular
from mindx_elastic.errors import CheckpointError, CorruptCheckpointError, SaveError, StrPath
from mindx_elastic.persist.direct_io import preallocate
from mindx_elastic.persist.storage import check_free_space

__all__ = ["MappedFile", "Scratch", "open_source"]

_IN_MEMORY_BYTES = 1 << 20  # smaller tensors are assembled in memory: a mapping costs more


def open_source(path: StrPath) -> int:
    """Open a file that the user has named for reading and return its descriptor. Follows a link.

    Raises CheckpointError when it cannot be opened, CorruptCheckpointError for a pipe, a device or a folder.
    """
    try:
        return open_regular(path, follow_link=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CorruptCheckpointError(f"{path}: is not a regular file", path=path) from None
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}", path=path) from error


class MappedFile:
    """A file mapped into memory. Writes to its tensors stay in memory and never reach the file."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        fd = open_source(path)
        try:
            self.size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.size, access=mmap.ACCESS_COPY) if self.size else None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped: {error}", path=path) from error
        finally:
            os.close(fd)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Bytes [start, end) of the file. Raises CorruptCheckpointError where they are not there."""
        if not 0 <= start <= end <= self.size:
            raise CorruptCheckpointError(f"{self.path}: bytes {start} to {end} of {self.size}", path=self.path)
        if start == end or self._map is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        raw = torch.from_numpy(np.frombuffer(self._map, np.uint8, end - start, start))
        return raw.view(dtype).reshape(tuple(shape))


class Scratch:
    """Makes room for assembled tensors, in unnamed files of `folder` that the kernel removes with the last user."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. Raises SaveError where the disk is full."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes < _IN_MEMORY_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        try:
            fd, name = tempfile.mkstemp(".mindx-tmp", ".convert.", self.folder)
            try:
                # A write to a mapped page that has no block on the disk would kill the process (SIGBUS).
                if not preallocate(fd, nbytes):
                    check_free_space(self.folder, nbytes)
                    os.ftruncate(fd, nbytes)
                storage = torch.UntypedStorage.from_file(name, True, nbytes)
            finally:
                os.close(fd)
                os.unlink(name)
        except (OSError, RuntimeError) as error:
            message = f"{self.folder}: no room to assemble a tensor of {nbytes:,} bytes there: {error}"
            raise SaveError(message, path=self.folder) from error
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
