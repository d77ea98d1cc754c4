"""Reserves at the start what the last save of a dying process needs: at its limit it gets no thread and no memory.

* the ring of blocks that a file is written through, with its pages: 16 MiB
* the thread that writes them
* room for what Python allocates during the save (the state's tree, the file's header): 4 MiB and 12 KiB a parameter,
  returned to the system when the save begins
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from functools import partial

import torch

from mindx_elastic.core.pinned import PinnedMemory
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.persist.direct_io import BLOCK_BYTES, NUM_BLOCKS

__all__ = ["Reserve", "keep_reserve", "take_reserve"]

_LEAST_BYTES = 4 << 20
_BYTES_PER_PARAMETER = 12 << 10  # measured with AdamW: a peak of 7 to 10 KiB, whatever the size of the tensors
_TOUCH_S = 5.0  # it takes milliseconds; in a forked child, where the thread is missing, for ever


_kept: list[Reserve] = []


def take_reserve(num_parameters: int, *, device: torch.device | None = None) -> Reserve:
    """The reserve that was kept for this moment, or a new one. Main thread; raises what `Reserve` raises."""
    while _kept:
        found = _kept.pop()
        if found.num_parameters >= num_parameters and found.device == device and found.is_whole:
            return found
        found.close()
    return Reserve(num_parameters, device=device)


def keep_reserve(reserve: Reserve) -> None:
    """Keep it for `take_reserve`: getting its memory anew takes as long as entering a guard. Main thread."""
    _kept.append(reserve)


class Reserve:
    """One per guard, for one save at a time. Any thread."""

    def __init__(self, num_parameters: int, *, device: torch.device | None = None) -> None:
        """`device`: a CUDA device that the state is on; the ring is page-locked then. To get such memory may wait for
        the device, which need not come to an end when the process dies. Raises OSError or RuntimeError when there is no
        room already at the start."""
        self.num_parameters, self.device = num_parameters, device
        ring = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)
        self._room: mmap.mmap | None = mmap.mmap(-1, _LEAST_BYTES + _BYTES_PER_PARAMETER * num_parameters)
        for memory in (ring, self._room):
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
        self._blocks: torch.Tensor | None = torch.frombuffer(ring, dtype=torch.uint8)
        self._in_use = threading.Lock()
        self.writer = ReadyThread("mindx-persist-write")
        # Beside the start: the kernel takes 15 ms to allocate and clear the pages.
        self._touched = self.writer.submit(partial(_touch, ring, self._room))
        self._pin: PinnedMemory | None = None
        if device is not None and self._touched.done.wait(_TOUCH_S):
            self._pin = PinnedMemory(self._blocks.data_ptr(), len(ring), device)

    @property
    def is_whole(self) -> bool:
        """Whether no save has used its room."""
        return self._room is not None

    @property
    def nbytes(self) -> int:
        """How much memory is held."""
        return sum(len(memory) for memory in (self._blocks, self._room) if memory is not None)

    def release(self) -> None:
        """Return the reserved room to the system. Call it when the save begins."""
        room, self._room = self._room, None
        # While its pages are being written to it cannot be closed; it then goes with the last reference.
        if room is not None and self._touched.done.wait(_TOUCH_S):
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
        """End the thread and let go of the memory: an ended guard may live on in a variable of the program."""
        self.release()
        if self._pin is not None:
            self._pin.close()
        self.writer.close()
        self._blocks = None


def _touch(*memories: mmap.mmap) -> None:
    """Have the kernel allocate the pages of new memory now."""
    for memory in memories:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        ctypes.memset(view, 0, len(memory))  # without the GIL
        del view  # or the memory could not be closed
