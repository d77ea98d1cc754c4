"""Measures the file system of the checkpoint directory by writing to it as a save does."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import torch

from mindx_elastic.doctor.saving import Disk
from mindx_elastic.persist.direct_io import BlockWriter, preallocate
from mindx_elastic.persist.storage import free_space

__all__ = ["existing_part", "measure"]

_PIECE_BYTES = 32 << 20
_MOST_BYTES = 4 << 30
_FREE_PART = 10


def existing_part(directory: Path) -> Path:
    """`directory`, or the nearest folder above it that exists."""
    path = directory.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def measure(folder: Path, for_s: float, *, page_cache: bool = False) -> Disk:
    """Write to an existing folder for about `for_s` seconds, as saves do. `page_cache`: as in `SavingSettings`. Raises
    OSError. Blocks.

    At most a tenth of the free room is used, and 4 GiB. The file has no name, so nothing remains however this
    process ends.
    """
    data = torch.frombuffer(bytearray(os.urandom(_PIECE_BYTES)), dtype=torch.uint8)  # file systems may compress
    most = min(_MOST_BYTES, free_space(folder) // _FREE_PART)
    with (
        tempfile.TemporaryFile(dir=folder) as file,
        contextlib.closing(BlockWriter(fd := file.fileno(), 0, cached=page_cache)) as writer,
    ):
        pieces = max(1, most // _PIECE_BYTES)
        if most < _PIECE_BYTES:
            data = data[: max(1, most // 4096) * 4096]
        preallocate(fd, pieces * data.nbytes)  # as a save does
        began = time.monotonic()
        written = 0
        for _ in range(pieces):
            writer.put(data)
            written += data.nbytes
            if time.monotonic() - began > for_s:
                break
        writer.finish()
        os.fsync(fd)
        way = "direct I/O" if writer.direct else "the page cache"
        return Disk(written / max(time.monotonic() - began, 1e-6), written, way)
