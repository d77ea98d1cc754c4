"""The arena of a rank: its files in shared memory, which outlive a killed process.

::

    {base}/mindx-elastic-{uid}/                              this user's, see `memory.folders`
    {base}/mindx-elastic-{uid}/{directory's digest}/         one job: a checkpoint directory on one machine
        owner.json                                           directory, run id, when
        rank_{r}/lock                                        locked for as long as the rank's process lives
        rank_{r}/slot_0.safetensors, slot_1.safetensors      snapshots, laid out as finished checkpoint files
        rank_{r}/commit                                      what is true of the two slots
        rank_{r}/boundaries                                  the volatile state of the last boundaries (`BoundaryRing`)
        rank_{r}/steps                                       a little of each of the last steps (`prove.kept_steps`)
        rank_{r}/copy                                        the rank lives on another node: `mirror` keeps copies here

A kill at any instant leaves one good slot: a slot's record is wiped before its first byte is touched and written again
after its last one. Stores of one process reach shared memory in program order as far as a later process can see, a kill
loses none of them; the record has its own digest, so that half a record does not count.

A name is a function of the checkpoint directory, so that the next start with the same command finds it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import struct
import time
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from mindx_elastic.core.pinned import PinnedMemory
from mindx_elastic.core.posix import open_regular, read_small
from mindx_elastic.errors import ArenaError
from mindx_elastic.memory.folders import (
    OWNER_FILE,
    job_folder,
    make_private,
    make_user_folder,
    rank_folders,
    remove_rank,
)

__all__ = [
    "COMMIT_FILE",
    "COPY_FILE",
    "SLOT_FILES",
    "STEPS_FILE",
    "ArenaFile",
    "RankArena",
    "SlotRecord",
    "SlotState",
    "bytes_of",
    "ranks_here",
    "read_records",
]

NUM_SLOTS = 2
SLOT_FILES = ("slot_0.safetensors", "slot_1.safetensors")
STEPS_FILE, COMMIT_FILE, COPY_FILE = "steps", "commit", "copy"
_RECORD = struct.Struct("<QqqQQQ")  # state, attempt, step, sequence, file bytes, header bytes
_RECORD_ROOM = 64  # a record and its digest, one cache line
_PREDECESSOR_S = 5.0
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
_PAGES_PIECE = 64 << 20


class SlotState(IntEnum):
    EMPTY = 0
    COPIED = 1
    """All bytes are there; the header is a draft without digests."""
    SEALED = 2
    """A finished checkpoint file."""


class SlotRecord(NamedTuple):
    """What the commit file says about one slot."""

    state: SlotState = SlotState.EMPTY
    attempt: int = 0
    step: int = -1
    sequence: int = 0
    """Counts the snapshots of the rank; the newest is the highest."""
    nbytes: int = 0
    """Size of the file."""
    header_bytes: int = 0

    def pack(self) -> bytes:
        body = _RECORD.pack(self.state, self.attempt, self.step, self.sequence, self.nbytes, self.header_bytes)
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def unpack(cls, data: bytes) -> SlotRecord:
        body, digest = data[: _RECORD.size], data[_RECORD.size : _RECORD.size + 8]
        if xxhash.xxh3_64_digest(body) != digest:
            return cls()
        state, *rest = _RECORD.unpack(body)
        return cls(SlotState(state), *rest) if state in (1, 2) else cls()


def read_records(folder: Path) -> list[SlotRecord]:
    """What the commit file in a rank's folder says of its slots, whether or not a process uses them; empty where it
    cannot be read."""
    try:
        data = read_small(folder / COMMIT_FILE, NUM_SLOTS * _RECORD_ROOM)
    except OSError:
        return []
    return [SlotRecord.unpack(data[start : start + _RECORD_ROOM]) for start in range(0, len(data), _RECORD_ROOM)]


def ranks_here(job: Path) -> dict[int, Path]:
    """Rank -> folder, without those that hold copies of a rank of another node."""
    return {rank: folder for rank, folder in rank_folders(job).items() if not (folder / COPY_FILE).exists()}


class ArenaFile:
    """A file of shared memory that is mapped for writing. Its room is reserved, so that a store never fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map: mmap.mmap | None = None
        self.size = 0
        self._present = 0  # bytes from the start whose pages are mapped
        self._pin: PinnedMemory | None = None

    def resize(self, nbytes: int) -> mmap.mmap:
        """Make the file exactly `nbytes` long and map it. Raises ArenaError when there is no room."""
        if self.map is not None and self.size == nbytes:
            return self.map
        fd = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)  # no page is missing later: a store without room would be a SIGBUS
            return self._remap(fd, nbytes)
        except OSError as error:
            self.close()
            os.ftruncate(fd, 0)
            if error.errno == errno.EFBIG:
                most = "the limit of this process for the size of a file (ulimit -f) is smaller"
                raise ArenaError(f"{self.path}: no snapshot of {nbytes:,} bytes: {most}", path=self.path) from error
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise ArenaError(_no_room(self.path, nbytes), path=self.path) from error
            raise
        finally:
            os.close(fd)

    def pin(self, device: torch.device) -> bool:
        """Page-lock it for copies from a CUDA device, until it is mapped again. Returns whether CUDA has done it; where
        it has not, copies take longer."""
        if self._pin is None and self.map is not None:
            anchor = ctypes.c_char.from_buffer(self.map)
            self._pin = PinnedMemory(ctypes.addressof(anchor), self.size, device)
        return self._pin is not None and self._pin.is_pinned

    def _unpin(self) -> None:
        pin, self._pin = self._pin, None
        if pin is not None:
            pin.close()

    def _remap(self, fd: int, nbytes: int) -> mmap.mmap:
        self._unpin()
        if self.map is not None:
            try:
                self.map.resize(nbytes)  # keeps the pages that are mapped: a header may grow by a line now and then
                self._present = min(self._present, nbytes)
            except (BufferError, SystemError):  # a tensor looks at it; a system that cannot
                self.close()
        if self.map is None:
            self.map, self._present = mmap.mmap(fd, nbytes), 0
        self.size = nbytes
        return self.map

    def bring_in(self) -> None:
        """Map the pages ahead of the first store; what they hold stays.

        One by one, by page faults, it takes up to 20 times as long as the copy that causes them. Any thread; the
        interpreter's lock is not held.
        """
        assert self.map is not None
        madvise = _libc().madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        anchor = ctypes.c_char.from_buffer(self.map)
        while self._present < self.size:
            # In pieces, also because other threads of this process that map memory have to wait for each.
            start = self._present - self._present % mmap.PAGESIZE
            count = min(_PAGES_PIECE, self.size - start)
            if madvise(ctypes.addressof(anchor) + start, count, _MADV_POPULATE_WRITE) != 0:
                return  # a kernel before 5.14; then page faults do it
            self._present = start + count

    def close(self) -> None:
        """Unmap. A view that still exists keeps the memory until it goes."""
        self._unpin()
        if self.map is not None:
            with suppress(BufferError):  # a tensor looks at it; unmapped when that goes
                self.map.close()
            self.map = None


def bytes_of(memory: mmap.mmap) -> torch.Tensor:
    """`memory` as a tensor, live, which keeps it mapped. By way of a memoryview: `torch.frombuffer` itself keeps the
    object alive, but not its buffer, so that a `close` or a `resize` would unmap what the tensor looks at."""
    return torch.frombuffer(memoryview(memory), dtype=torch.uint8)


@cache
def _libc() -> Any:
    """Once: each opening of a library makes a class."""
    return ctypes.CDLL(None)


def _no_room(path: Path, nbytes: int) -> str:
    status = os.statvfs(path.parent)
    return (
        f"{path}: no room for a snapshot of {nbytes:,} bytes in shared memory ({status.f_bavail * status.f_frsize:,} "
        "free, a rank needs twice its state). Enlarge it (docker --shm-size; Kubernetes: emptyDir, medium: Memory), "
        "name another place in MINDX_ARENA_DIR, or --snapshot-every 0"
    )


class RankArena:
    """One rank's arena, open for writing. Used by one process at a time, which holds the lock; one thread."""

    def __init__(self, base: Path, directory: Path, rank: int, *, is_copy: bool = False) -> None:
        """Create or adopt it. `is_copy`: the rank lives on another node. Raises ArenaError when it is in use, or the
        place belongs to another user."""
        self._place = base, directory
        self.job, self.folder, self._lock = _open_locked(base, directory, rank, 0.0 if is_copy else _PREDECESSOR_S)
        self.slots = [ArenaFile(self.folder / name) for name in SLOT_FILES]
        self._commit = ArenaFile(self.folder / COMMIT_FILE)
        try:
            self._records = self._commit.resize(NUM_SLOTS * _RECORD_ROOM)
            if is_copy:
                os.close(open_regular(self.folder / COPY_FILE, os.O_RDWR | os.O_CREAT))
        except OSError:
            self.close()
            raise

    def of_neighbour(self, rank: int) -> RankArena:
        """The arena beside this one for copies of a rank of another node. Raises OSError."""
        return RankArena(*self._place, rank, is_copy=True)

    def describe(self, directory: Path, run_id: str) -> None:
        """Write ``owner.json``."""
        path, temp = self.job / OWNER_FILE, self.folder / OWNER_FILE
        with open(open_regular(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump({"directory": str(directory), "run_id": run_id, "created": time.time()}, file)
        os.replace(temp, path)

    def record(self, index: int) -> SlotRecord:
        start = index * _RECORD_ROOM
        return SlotRecord.unpack(self._records[start : start + _RECORD_ROOM])

    def set_record(self, index: int, record: SlotRecord) -> None:
        data = record.pack()
        start = index * _RECORD_ROOM
        self._records[start : start + len(data)] = data

    def keep(self, attempt: int, step: int) -> None:
        """The job goes on from this snapshot: it is the last one to be overwritten.

        Other ranks may have nothing else: their newer one was torn, and this rank's newer one is worth nothing alone.
        """
        for index in range(NUM_SLOTS):
            record = self.record(index)
            if record.state is not SlotState.EMPTY and (record.attempt, record.step) == (attempt, step):
                self.set_record(index, record._replace(sequence=self.newest().sequence + 1))

    def oldest(self) -> int:
        """The slot to write next."""
        return min(range(NUM_SLOTS), key=lambda index: self.record(index).sequence)

    def newest(self) -> SlotRecord:
        return max((self.record(index) for index in range(NUM_SLOTS)), key=lambda record: record.sequence)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that another process could use. Never raises: False where it cannot be seen."""
        try:
            there = {path.name for path in self.folder.iterdir()}
        except OSError:
            return False
        files = there - {"lock", COMMIT_FILE, COPY_FILE, STEPS_FILE, *(slot.path.name for slot in self.slots)}
        return not files and all(self.record(index).state is SlotState.EMPTY for index in range(NUM_SLOTS))

    def remove(self) -> None:
        """The job has ended well: take everything away, see `remove_rank`."""
        remove_rank(self.folder, self.close)

    def close(self) -> None:
        """Give the lock back and leave the content to the next process."""
        for file in (*self.slots, self._commit):
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _open_locked(base: Path, directory: Path, rank: int, patience_s: float) -> tuple[Path, Path, int]:
    """Make the folders of the job and the rank, and lock the latter: both, and the descriptor.

    A job that ends at this moment, this one's predecessor or another one, may take a folder away in between.
    """
    end = time.monotonic() + patience_s
    folder = job_folder(base, directory) / f"rank_{rank}"
    while True:
        try:
            make_user_folder(base)
            job = make_private(folder.parent)
            make_private(folder)
            fd = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
            _lock_soon(fd, folder, end)
            if os.fstat(fd).st_nlink:
                return job, folder, fd
            os.close(fd)  # `mindx-elastic clean`, or the process before this one, has just removed it
        except FileNotFoundError as error:
            if not base.is_dir() or time.monotonic() > end:
                raise ArenaError(f"{folder}: cannot be created: {error.strerror}", path=folder) from error


def _lock_soon(fd: int, folder: Path, end: float) -> None:
    """The process before this one may still be on its way out."""
    while True:
        try:
            # Not flock: a forked loader worker would hold it for seconds after the rank was killed.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > end:
                os.close(fd)
                raise ArenaError(
                    f"{folder} is in use by another process: is a second job writing to the same checkpoint directory?",
                    path=folder,
                ) from error
            time.sleep(0.001)  # a recovery in place waits for a dying process
