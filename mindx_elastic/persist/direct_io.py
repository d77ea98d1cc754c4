"""Writes one file front to back with direct I/O, and computes digests on the way.

The caller and some writing threads share a small ring of aligned blocks: the caller copies tensor bytes into a block
and hashes them while they are in the CPU's cache, the others write full blocks, each its own. memmove, xxh3 and pwrite
all release the GIL, so that the device never waits for the CPU (measured: copy + hash 7 GB/s, device 0.3 to 3 GB/s) and
training goes on meanwhile. Four blocks under way at once took 0.85 to 0.92 of the time of one on a virtual disk.

Where the page cache is faster (``MINDX_PAGE_CACHE=always``), the same threads write through it, and flush what is there
by then after each 64 MiB: an fsync that finds all of it in the end took 1.6 times as long.

Rejected: a mapping of the file (no error code when the disk is full, only SIGBUS); direct I/O from the tensors' own
memory (torch aligns to 64 bytes, devices ask for up to 4096, and each small tensor would need its own request).

The last save of a dying process gets no thread and no memory at its limit, so a `Reserve` has them from the start on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
import xxhash

from mindx_elastic.core.pinned import PinnedMemory
from mindx_elastic.core.ready_thread import ReadyThread, ThreadTask
from mindx_elastic.core.tensor_memory import flat_bytes

__all__ = ["ALIGNMENT", "BlockWriter", "Reserve", "preallocate"]

ALIGNMENT = 4096
BLOCK_BYTES = 4 << 20
NUM_BLOCKS = 4
SYNC_BYTES = 64 << 20  # through the page cache: the device begins while the rest is still being written
NUM_WRITERS = 4  # requests that the device has at once: all blocks, while the caller waits for a free one
_PIECE_BYTES = 256 << 10  # copied, then hashed while it is still in the L2 cache

_MADV_HUGEPAGE = 14  # 8 page faults instead of 4096 before the first byte moves
_MADV_WIPEONFORK = 18  # Linux 4.14; not in Python's mmap
_libc = ctypes.CDLL(None, use_errno=True)
# Measured, whatever the size of the tensors: a save's peak is 0.2 MiB and 1.6 to 1.9 KiB a tensor.
_LEAST_ROOM_BYTES = 1 << 20
_ROOM_BYTES_PER_TENSOR = 2560
_BESIDE_BYTES = 1 << 20  # of a file, for what is not counted in its size: the header, buffers, all small state
_TOUCH_S = 5.0  # it takes milliseconds; in a forked child, where the thread is missing, for ever


def preallocate(fd: int, nbytes: int) -> bool:
    """Reserve disk space, so that a full disk is found before the first byte is written.

    Returns False where the file system cannot do it. Raises OSError (ENOSPC, EFBIG, EDQUOT) when there is no room. Not
    `os.posix_fallocate`: that writes to every block where the system call is missing, which takes minutes over NFS.
    """
    if nbytes == 0:
        return True
    call = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
    if call is None:
        return False
    while call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class BlockWriter:
    """Writes a file: a header of `offset` bytes (a multiple of `ALIGNMENT`), and the data after it. `put` and `finish`
    by one thread only.

    A file of one block needs no other thread: `finish` writes it at once.

    `pinned` allocates the ring in page-locked memory, so that tensors on an accelerator are copied straight into it
    at full speed. `close` ends the writing threads; call it in any case.
    """

    def __init__(
        self, fd: int, offset: int, *, pinned: bool = False, reserve: Reserve | None = None, cached: bool = False
    ) -> None:
        """reserve: take memory and threads from there, unless another save has them; `pinned` is ignored then. cached:
        through the page cache."""
        self._fd = fd
        held = None if reserve is None else reserve.take()
        self._reserve = None if held is None else reserve
        # With a reserve that another save has, this process dies: to get page-locked memory may wait for the device.
        memory = _aligned_memory(NUM_BLOCKS * BLOCK_BYTES, pinned and reserve is None) if held is None else held
        self._blocks = memory.view(-1, BLOCK_BYTES)
        self._views = [memoryview(block.numpy()) for block in self._blocks]
        self._addresses = [block.data_ptr() for block in self._blocks]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(self._blocks)):
            self._free.put(index)
        self._full: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        """Number of a block, bytes, and where they belong in the file; no bytes: flush what is written by now."""
        self._cached, self._unsynced = cached, 0
        self._current, self._header_bytes = self._free.get(), offset
        if offset < BLOCK_BYTES:  # the header goes into the first block
            self._offset, self._fill = 0, offset
            self._views[self._current][:offset] = bytes(offset)
        else:
            self._offset, self._fill = offset, 0
        self._error: BaseException | None = None
        self._direct = _set_direct(fd, not cached)
        self._own_writers: list[ReadyThread] = []
        self._jobs: list[ThreadTask[None]] | None = None

    @property
    def direct(self) -> bool:
        """Whether the file system has accepted direct I/O so far."""
        return self._direct

    def put_tensors(self, tensors: Iterable[tuple[str, torch.Tensor, int]]) -> dict[str, str]:
        """As `put`, of tensors of any type and shape, in the order of the file: name, tensor, bytes. Their digests by
        name."""
        digests: dict[str, str] = {}
        # A state of many small tensors costs as many calls of everything: no view, no digest object, one copy.
        copy, digest_of = ctypes.memmove, xxhash.xxh3_128_hexdigest
        for name, tensor, nbytes in tensors:
            begin = self._fill
            end = begin + nbytes
            if nbytes <= _PIECE_BYTES and end <= BLOCK_BYTES and tensor.is_cpu and tensor.is_contiguous():
                copy(self._addresses[self._current] + begin, tensor.data_ptr(), nbytes)
                self._fill = end
                digests[name] = digest_of(self._views[self._current][begin:end])
            else:
                digests[name] = self.put(flat_bytes(tensor))
        return digests

    def put(self, data: torch.Tensor) -> str:
        """Append the bytes of a flat uint8 tensor on any device; returns their xxh3-128 in hex.

        Raises the writing thread's error when there was one.
        """
        digest = xxhash.xxh3_128()
        size, position = data.numel(), 0
        while position < size:
            if self._fill == BLOCK_BYTES:
                self._submit()
            count = min(size - position, BLOCK_BYTES - self._fill, _PIECE_BYTES if data.is_cpu else BLOCK_BYTES)
            self._copy(data, position, count)
            digest.update(self._views[self._current][self._fill : self._fill + count])
            self._fill += count
            position += count
        return digest.hexdigest()

    def finish(self, header: Callable[[], bytes] = bytes) -> None:
        """Wait until everything is handed to the kernel; the header goes last, or with all else in one block. The file
        may be longer than the data by less than a block."""
        padding = -self._fill % ALIGNMENT
        view = self._views[self._current]
        view[self._fill : self._fill + padding] = bytes(padding)
        self._fill += padding
        if self._offset == 0:
            view[: self._header_bytes] = header()
            self._write(view[: self._fill], 0)
            return
        if self._fill:
            self._submit()
        self._end_writing()
        if self._error is not None:
            raise self._error
        view, text = self._views[0], header()
        for start in range(0, len(text), BLOCK_BYTES):
            piece = text[start : start + BLOCK_BYTES]
            view[: len(piece)] = piece
            self._write(view[: len(piece)], start)

    def _copy(self, data: torch.Tensor, position: int, count: int) -> None:
        if data.device.type == "cpu":
            ctypes.memmove(self._addresses[self._current] + self._fill, data.data_ptr() + position, count)
        else:
            self._blocks[self._current][self._fill : self._fill + count].copy_(data[position : position + count])

    def _submit(self) -> None:
        if self._jobs is None:
            if self._reserve is None:
                self._own_writers = _start_writers()
            writers = self._own_writers if self._reserve is None else self._reserve.writers
            self._jobs = [writer.submit(self._write_blocks) for writer in writers]
        if not self._jobs:  # a dying process may get no thread: it copies and writes in turn
            self._write(self._views[self._current][: self._fill], self._offset)
        else:
            self._full.put((self._current, self._fill, self._offset))
            self._unsynced += self._fill
            if self._cached and self._unsynced >= SYNC_BYTES:
                self._full.put((0, 0, 0))
                self._unsynced = 0
            self._current = self._free.get()
        self._offset += self._fill
        self._fill = 0
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the writing threads after the blocks that they already have; harmless when called again."""
        self._end_writing()
        for writer in self._own_writers:
            writer.close()
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.give_back()

    def _end_writing(self) -> None:
        jobs, self._jobs = self._jobs or [], []
        for _ in jobs:
            self._full.put(None)
        for job in jobs:
            job.done.wait()

    def _write_blocks(self) -> None:
        while (item := self._full.get()) is not None:
            index, count, offset = item
            if self._error is None:
                try:
                    if count:
                        self._write(self._views[index][:count], offset)
                    else:
                        os.fdatasync(self._fd)
                except BaseException as error:  # raised again in the caller's thread
                    self._error = error
            if count:
                self._free.put(index)

    def _write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            was_direct = self._direct  # another thread may switch it off meanwhile
            try:
                count = os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                # Some file systems accept the flag and refuse the first write.
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._direct = _set_direct(self._fd, False)
                continue
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count
            if self._direct and done % ALIGNMENT and done < len(view):
                # A write cut short (the disk is nearly full) left us off the boundary that direct I/O needs.
                self._direct = _set_direct(self._fd, False)


def _start_writers(most: int = NUM_WRITERS) -> list[ReadyThread]:
    """`most`; fewer, or none, where the process is at its limit or the interpreter ends."""
    started: list[ReadyThread] = []
    with contextlib.suppress(RuntimeError):
        while len(started) < most:
            writer = ReadyThread("mindx-persist-write")
            writer.start()
            started.append(writer)
    return started


def _aligned_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    if pinned:
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True, device="cpu")
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]
    anonymous = mmap.mmap(-1, nbytes)
    _advise(anonymous, _MADV_HUGEPAGE)
    return torch.frombuffer(anonymous, dtype=torch.uint8)


def _advise(memory: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # the kernel does not know it
        memory.madvise(advice)


def _set_direct(fd: int, wanted: bool) -> bool:
    """Switch O_DIRECT on or off; returns what holds afterwards."""
    flag: int = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return wanted and flag != 0


class Reserve:
    """What the last save of a dying process needs, reserved at the start. One per guard, for one save at a time. Any
    thread.

    * the ring of blocks that a file is written through, with its pages: those of a small file, and at most 16 MiB
    * a thread for each block, that writes it
    * room for what Python allocates during the save (the state's tree, the file's header): 1 MiB and 2.5 KiB a tensor,
      returned to the system when the save begins
    """

    def __init__(self, num_tensors: int, nbytes: int, *, device: torch.device | None = None) -> None:
        """`num_tensors`: of the state, see `make_room`. `nbytes`: about the size of the file; a longer one takes its
        time. `device`: a CUDA device that the state is on; the ring is page-locked then. To get such memory may wait
        for the device, which need not come to an end when the process dies. Raises OSError or RuntimeError when there
        is no room already at the start."""
        num_blocks = min(NUM_BLOCKS, 1 + nbytes // BLOCK_BYTES)
        ring = mmap.mmap(-1, num_blocks * BLOCK_BYTES)
        _advise(ring, _MADV_HUGEPAGE)
        self._blocks: torch.Tensor | None = torch.frombuffer(ring, dtype=torch.uint8)
        self._in_use = threading.Lock()
        self.writers = _start_writers(num_blocks)
        if not self.writers:
            raise RuntimeError("no thread can be started")
        # In parallel with the start: the kernel takes 15 ms to allocate and clear the pages.
        self._touched = self.writers[0].submit(partial(_touch, ring, nbytes + _BESIDE_BYTES))
        self._rooms: list[mmap.mmap] | None = []
        self.make_room(num_tensors)
        self._pin: PinnedMemory | None = None
        if device is not None and self._touched.done.wait(_TOUCH_S):
            self._pin = PinnedMemory(self._blocks.data_ptr(), len(ring), device)

    def make_room(self, num_tensors: int) -> None:
        """Reserve room for a state of so many tensors: an optimizer gets its own with its steps. One thread. Raises
        OSError when there is no room."""
        rooms = self._rooms
        if rooms is None:
            return  # the save has begun
        nbytes = _LEAST_ROOM_BYTES + _ROOM_BYTES_PER_TENSOR * num_tensors - sum(map(len, rooms))
        if nbytes <= 0:
            return
        # Private: shared memory has no huge pages, and to return 4 MiB page by page takes a millisecond.
        room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Pages that a loader's worker has too are not returned. Not DONTFORK: a child that lets go of the room would
        # unmap what it has at that address by then.
        _advise(room, _MADV_WIPEONFORK)
        _advise(room, _MADV_HUGEPAGE)
        self._touched = self.writers[0].submit(partial(_touch, room, nbytes))
        rooms.append(room)

    def release(self) -> None:
        """Return the reserved room to the system. Call it when the save begins."""
        rooms, self._rooms = self._rooms, None
        # While its pages are being written to it cannot be closed; it then goes with the last reference.
        if rooms and self._touched.done.wait(_TOUCH_S):
            for room in rooms:
                room.close()

    def take(self) -> torch.Tensor | None:
        """Take the ring; None while another save has it, and once it is closed. `give_back` must follow."""
        blocks = self._blocks
        if blocks is None or not self._touched.done.wait(_TOUCH_S):  # zeros are being written to it
            return None
        return blocks if self._in_use.acquire(blocking=False) else None

    def give_back(self) -> None:
        self._in_use.release()

    def close(self) -> None:
        """End the threads and let go of the memory: an ended guard may live on in a variable of the program."""
        self.release()
        if self._pin is not None:
            self._pin.close()
        for writer in self.writers:
            writer.close()
        self._blocks = None


def _touch(memory: mmap.mmap, nbytes: int) -> None:
    """Have the kernel allocate the pages of the first `nbytes` of new memory now."""
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    ctypes.memset(view, 0, min(nbytes, len(memory)))  # without the GIL
    del view  # or the memory could not be closed
