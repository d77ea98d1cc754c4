"""The newest steps and losses of one rank, in a ring of memory that outlives the process: the worker writes, its agent
reads, and neither waits.

A file below the agent's private folder, mapped by the worker; fixed 8-byte words, one writer. The count of all entries
so far is written after the entry, so a reader sees an entry whole or not at all; what may have been written over while
it read is left out. At most one entry in `LEAST_GAP_S`, so a reader that looks in each `LOOK_AGAIN_S` misses none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.core.posix import new_map, open_regular

__all__ = ["LEAST_GAP_S", "LOOK_AGAIN_S", "Point", "ProgressRing", "RingReader", "ring_path"]

LEAST_GAP_S = 0.02
CAPACITY = 1024
LOOK_AGAIN_S = LEAST_GAP_S * CAPACITY / 2
_MAGIC = 0x6D696E6478706731  # "mindxpg1"
_HEAD_WORDS, _WORDS = 4, 4
_HEAD = struct.Struct("=4q")
_ENTRY = struct.Struct("=3qd")
_BYTES = _HEAD.size + CAPACITY * _ENTRY.size


@dataclass(frozen=True, slots=True)
class Point:
    """A boundary that was passed."""

    step: int
    clock_ns: int
    """`time.monotonic_ns`."""
    loss: float | None
    """As the program gave it for this step; None: it gave none. It need not be finite."""


def ring_path(agent_dir: Path, rank: int) -> Path:
    """The file of global rank `rank`."""
    return agent_dir / f"rank_{rank}.progress"


class ProgressRing:
    """The worker's side. Training thread."""

    def __init__(self, path: Path) -> None:
        """Create the file, replacing an older one of the same rank. Raises OSError."""
        self._map = new_map(path, _BYTES)
        self._num = 0
        self._words = memoryview(self._map).cast("q")
        self._reals = memoryview(self._map).cast("d")
        self._words[1] = os.getpid()
        self._words[0] = _MAGIC

    def add(self, point: Point) -> None:
        at = _HEAD_WORDS + self._num % CAPACITY * _WORDS
        words = self._words
        words[at], words[at + 1], words[at + 2] = point.step, point.clock_ns, point.loss is not None
        self._reals[at + 3] = 0.0 if point.loss is None else point.loss
        self._num += 1
        words[2] = self._num


class RingReader:
    """The agent's side, of one rank. It keeps the file open, so that nothing is lost when a new process of the rank
    replaces it. One thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._taken = 0

    def take(self) -> list[tuple[int, Sequence[Point]]]:
        """What is new since the last call, by process, the oldest first: process id and points."""
        found = []
        if self._fd >= 0:
            found.append(self._read())
        if self._is_replaced():
            self.close()
            try:
                self._fd = open_regular(self._path)
            except OSError:
                return [each for each in found if each[1]]
            found.append(self._read())
        return [each for each in found if each[1]]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._taken = -1, 0

    def _is_replaced(self) -> bool:
        try:
            now = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return self._fd < 0 or not os.path.samestat(os.fstat(self._fd), now)

    def _read(self) -> tuple[int, list[Point]]:
        before = self._head()
        if before is None or before[2] <= self._taken:
            return 0, []
        data = os.pread(self._fd, _BYTES, 0)
        after = self._head()
        if len(data) != _BYTES or after is None:
            return 0, []
        first = max(self._taken, after[2] - CAPACITY + 1)  # the entry that is being written may be this one's place
        points = []
        for number in range(first, before[2]):
            step, clock_ns, has_loss, loss = _ENTRY.unpack_from(data, _HEAD.size + number % CAPACITY * _ENTRY.size)
            points.append(Point(step, clock_ns, loss if has_loss else None))
        self._taken = before[2]
        return before[1], points

    def _head(self) -> tuple[int, int, int] | None:
        data = os.pread(self._fd, _HEAD.size, 0)
        if len(data) != _HEAD.size:
            return None
        magic, pid, num, _ = _HEAD.unpack(data)
        return (magic, pid, num) if magic == _MAGIC else None
