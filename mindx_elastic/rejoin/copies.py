"""The boundary in the shared memory of every node, before any rank closes its guard.

A recovery in place that goes wrong after that point ends in a restart from shared memory, and each node can read its
own only. So on each node with a whole rank one of them copies the boundary (`sources`), not the donor alone. A node
without one gets the donor's file over the process group, with what the donor's boundary ring holds, and keeps it as a
snapshot of its own. The donor gives its word when all nodes have theirs.

Keys of the board, beside those of `board`:

======================  ================================================================================================
``{g}/take/{node}``     the rank that takes the donor's file for its node
``{g}/copy/{node}``     where the boundary lies in that node's shared memory
======================  ================================================================================================
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import xxhash

from mindx_elastic.core.fields import Between, read
from mindx_elastic.errors import ArenaError
from mindx_elastic.memory.arena import bytes_of
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE
from mindx_elastic.memory.folders import read_owner
from mindx_elastic.rejoin.protocol import Verdict

__all__ = ["DONOR_RING", "Parcel", "Receive", "send", "sources", "take"]

DONOR_RING = "donor_boundaries"
"""Name of the donor's ring in the folder of the rank that has taken its file."""
_PIECE_BYTES = 64 << 20
_MOST_RING_BYTES = 1 << 30
_LENGTH = struct.Struct("<Q")

Receive = Callable[["Parcel", Callable[[mmap.mmap], None]], Path]
"""Keeps a parcel as a snapshot of this rank: makes room, calls the function with it, returns the file."""


def sources(verdict: Verdict, nodes: Mapping[int, int]) -> dict[int, int]:
    """By node: the rank that copies the boundary there; nodes without a whole rank are missing. `nodes`: of the living
    ranks. Pure."""
    found: dict[int, int] = {nodes[verdict.donor]: verdict.donor}
    for rank, node in sorted(nodes.items()):
        if rank not in verdict.needy:
            found.setdefault(node, rank)
    return found


@dataclass(frozen=True)
class Parcel:
    """What a rank of another node must know of the donor's file."""

    directory: Path
    """The checkpoint directory, which names the job's folder in shared memory."""
    attempt: int
    step: int
    nbytes: int
    header_bytes: int
    digest: str
    """xxh3-128 of the file."""
    ring_bytes: Annotated[int, Between(0, _MOST_RING_BYTES)]
    ring_digest: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "directory": str(self.directory)}

    @classmethod
    def from_json(cls, content: object) -> Parcel:
        """Raises ValueError for anything else."""
        found = read(cls, content)
        if not 8 < found.header_bytes <= found.nbytes:
            raise ValueError(f"a header of {found.header_bytes} of {found.nbytes} bytes")
        return found

    @classmethod
    def of(cls, path: Path, verdict: Verdict) -> Parcel:
        """Of the donor's own file. Raises OSError, ValueError, KeyError."""
        directory = Path(str(read_owner(path.parent.parent)["directory"]))
        ring = _read_ring(path)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header_bytes = _LENGTH.unpack(data[: _LENGTH.size])[0] + _LENGTH.size
            digest = xxhash.xxh3_128_hexdigest(data)
            return cls(
                directory,
                verdict.attempt,
                verdict.step,
                len(data),
                header_bytes,
                digest,
                len(ring),
                xxhash.xxh3_128_hexdigest(ring),
            )


def send(path: Path, ring_bytes: int, to: int, timeout_s: float) -> None:
    """Send the donor's file at `path`, and its ring, to the rank `to`. The training thread, over the default group.
    Raises RuntimeError, OSError."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    _exchange(dist.isend, whole, to, timeout_s)
    ring = bytearray(_read_ring(path))[:ring_bytes]
    if len(ring) != ring_bytes:
        raise OSError(f"the boundary ring beside {path} has changed")
    if ring:
        _exchange(dist.isend, torch.frombuffer(ring, dtype=torch.uint8), to, timeout_s)


def take(parcel: Parcel, donor: int, receive: Receive, timeout_s: float) -> Path:
    """Get the file that `send` sends, and keep it as a snapshot of this rank: returns its path here. Raises
    RuntimeError, OSError (ArenaError among it)."""

    def fill(memory: mmap.mmap) -> None:
        _exchange(dist.irecv, bytes_of(memory), donor, timeout_s)  # which may write there after its time-out
        if xxhash.xxh3_128_hexdigest(memory) != parcel.digest:
            raise ArenaError("the donor's state was damaged on its way")

    path = receive(parcel, fill)
    ring_file = path.parent / DONOR_RING
    ring_file.unlink(missing_ok=True)
    if parcel.ring_bytes:
        ring = torch.empty(parcel.ring_bytes, dtype=torch.uint8, device="cpu")
        _exchange(dist.irecv, ring, donor, timeout_s)
        content = ring.numpy().tobytes()
        if xxhash.xxh3_128_hexdigest(content) != parcel.ring_digest:
            raise ArenaError("the donor's boundary ring was damaged on its way")
        fd = os.open(ring_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
    return path


def _exchange(begin: Callable[..., Any], tensor: torch.Tensor, other: int, timeout_s: float) -> None:
    for start in range(0, tensor.numel(), _PIECE_BYTES):
        work = begin(tensor[start : start + _PIECE_BYTES], other)
        if work is None or not work.wait(timedelta(seconds=timeout_s)):
            raise RuntimeError(f"rank {other} has not moved the donor's state within {timeout_s:g} s")


def _read_ring(path: Path) -> bytes:
    with suppress(FileNotFoundError):
        return (path.parent / BOUNDARIES_FILE).read_bytes()
    return b""
