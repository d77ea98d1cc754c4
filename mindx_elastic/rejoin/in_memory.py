"""Finds out what of a rank is in shared memory, for `protocol`."""

from __future__ import annotations

from pathlib import Path

from mindx_elastic.memory.memory_files import passed_boundaries, snapshots_of
from mindx_elastic.rejoin.protocol import InMemory

__all__ = ["find_in_memory"]


def find_in_memory(arenas: Path, rank: int) -> InMemory:
    """What `rank` has in `arenas`, the job's folder. While no process writes there: it is dead, or asks for itself."""
    return InMemory(tuple(sorted(snapshots_of(arenas, rank))), tuple(sorted(passed_boundaries(arenas, rank))))
