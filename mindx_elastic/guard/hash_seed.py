"""The seed of Python's string hashes, which orders sets of strings. It is fixed when the interpreter starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["COORDINATE", "own_hash_seed", "tell_of_hash_seed"]

COORDINATE = "hash_seed"
"""In a file's coordinates; absent where each process had another one."""


def own_hash_seed() -> int | None:
    """This interpreter's; None: random. A program that sets ``PYTHONHASHSEED`` in `os.environ` changes nothing."""
    if not sys.flags.hash_randomization:
        return 0
    if sys.flags.ignore_environment:
        return None
    try:
        began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    value = next((entry.partition(b"=")[2] for entry in began_with if entry.startswith(b"PYTHONHASHSEED=")), b"")
    return int(value) if value.isdigit() else None


def tell_of_hash_seed(coordinates: Mapping[str, int], unmanaged: Unmanaged) -> None:
    """`coordinates`: of the file that this start goes on from."""
    there, here = coordinates.get(COORDINATE), own_hash_seed()
    if there is not None and there != here:
        unmanaged.risk(
            f"the run had PYTHONHASHSEED={there} and this process has {'none' if here is None else here}, so sets of "
            "strings are iterated in another order",
            f"Start it with PYTHONHASHSEED={there}, if the training depends on such an order",
        )
