"""Measures the file system of the checkpoint directory by writing to it as a save does."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mindx_elastic.doctor.saving import Disk
from mindx_elastic.persist.direct_io import BlockWriter, preallocate
from mindx_elastic.persist.disk_choice import DiskChoice
from mindx_elastic.persist.storage import free_space, nameless_file

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


def measure(folder: Path, measure_s: float, page_cache: str = "auto") -> Disk:
    """Write to an existing folder for about `measure_s` seconds, as saves do: around the page cache and through it, the
    faster way counts (`persist.disk_choice`). `page_cache`: as in `SavingSettings`. Raises OSError. Blocks.

    At most a tenth of the free room is used, and 4 GiB. The file has no name, so nothing is left behind however this
    process ends.
    """
    data = torch.frombuffer(bytearray(os.urandom(_PIECE_BYTES)), dtype=torch.uint8)  # file systems may compress
    ways = {"auto": (False, True), "always": (True,), "never": (False,)}[page_cache]
    through = "through the page cache"
    found: list[_Written] = []
    for cached in ways:
        found.append(_write(folder, data, measure_s / len(ways), cached=cached))
        if not cached and not found[0].is_direct:
            break  # the file system knows the other way only
    best = found[-1]
    if len(found) == 2:
        if not DiskChoice(found[0].s_per_byte, best.s_per_byte, 0.0).is_cached:
            best = found[0]
        through += ", which is faster here"
    return Disk(
        bytes_per_s=1 / best.s_per_byte,
        measured_bytes=best.nbytes,
        way="direct I/O" if best.is_direct else through,
    )


@dataclass(frozen=True)
class _Written:
    nbytes: int
    took_s: float
    is_direct: bool

    @property
    def s_per_byte(self) -> float:
        return max(self.took_s, 1e-6) / self.nbytes


def _write(folder: Path, data: torch.Tensor, for_s: float, *, cached: bool) -> _Written:
    most = min(_MOST_BYTES, free_space(folder) // _FREE_PART)
    with nameless_file(folder) as fd, contextlib.closing(BlockWriter(fd, 0, cached=cached)) as writer:
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
        return _Written(written, time.monotonic() - began, writer.direct)
