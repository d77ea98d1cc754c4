"""What a spare does before it is needed, so that it is not done while all others wait.

The ranks write the order in which gradients arrive into the agent's folder, once in an attempt. A spare lays out the
buckets of DDP by it. It takes memory from the kernel, too, for the first step: to touch 30 MB for the first time takes
5 ms and more, which the other ranks have behind them. And it lets torch set up what the first step of a process sets
up. A process that is forked when it is needed has its memory touched by another thread, while the program builds its
objects: the other ranks wait, and do not need the processor.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from mindx_elastic.core.events import logger
from mindx_elastic.rejoin import groups

__all__ = ["get_ready_beside", "grow_heap", "lay_out_buckets", "share_orders", "start_kernels"]

_LARGEST_BLOCK = 24 << 20  # glibc's limit is 32 MiB
_FILE = "gradients.json"
_HEAP_BLOCK, _HEAP_BLOCKS = 512 << 10, 64
_HALF_OF_HEAP = 16 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TOUCHED_AT_ONCE = 512 << 10


def share_orders(folder: Path, attempt: str, orders: Mapping[str, list[int]]) -> None:
    """For the spares of this node that are forked from now on. `attempt`: as of `lay_out_buckets`."""
    path = folder / _FILE
    temp = path.with_suffix(f".{os.getpid()}")
    try:
        temp.write_text(json.dumps([attempt, {name: list(order) for name, order in orders.items()}]))
        temp.replace(path)
    except OSError as error:  # then they are laid out when the rank is known
        logger.debug("%s: %s", path, error)


def lay_out_buckets(ddp: groups.DdpModules, folder: Path, attempt: str) -> dict[str, list[int]]:
    """In a spare: lay out the buckets as the ranks of the attempt have. Returns the order of each module of which that
    has been done, for good: torch does it once."""
    with suppress(OSError, ValueError):
        known, orders = json.loads((folder / _FILE).read_text())
        if known == attempt and orders.keys() == {name for name, _ in ddp}:
            return {
                name: orders[name] for name, module in ddp if not groups.rebuild_buckets(name, module, orders[name])
            }
    return {}


def grow_heap() -> None:
    """Let the C library keep freed memory of usual sizes, and have some of it."""
    _keep_what_is_freed()
    blocks = [torch.zeros(_HEAP_BLOCK, dtype=torch.uint8, device="cpu") for _ in range(_HEAP_BLOCKS)]
    del blocks


def _keep_what_is_freed() -> None:
    block = torch.empty(_LARGEST_BLOCK, dtype=torch.uint8, device="cpu")
    del block  # when a large block is given back, glibc takes all up to its size from the heap, and keeps twice as much


def start_kernels() -> threading.Thread:
    """Have torch set up what the first forward and backward of a process set up (oneDNN, autograd), in a thread.

    Nothing of the program takes part and nothing of it changes: the tensors are zeros, so that no number is drawn, no
    module is called, and a thread of its own has none of the main thread's modes (autocast, function and dispatch
    modes, hooks of saved tensors, a default device).
    """
    return _in_thread(_use_kernels)


def get_ready_beside() -> None:
    """What `grow_heap` does, in a thread that goes on when this returns. Main thread: what comes from the heap is its
    own, so the room is made here, and only touched there.

    Not `start_kernels`: its python code keeps the main thread waiting for the interpreter.
    """
    _keep_what_is_freed()
    blocks = [torch.empty(_HALF_OF_HEAP, dtype=torch.uint8, device="cpu") for _ in range(2)]
    begin = min(block.data_ptr() for block in blocks)
    end = max(block.data_ptr() + block.nbytes for block in blocks)
    is_heap = end - begin < 3 * _HALF_OF_HEAP and end <= _end_of_heap()
    del blocks
    if is_heap:
        _in_thread(lambda: _touch(begin, end))


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="mindx-ahead", daemon=True)
    thread.start()
    return thread


def _end_of_heap() -> int:
    """0: another allocator than glibc's, or one that has not begun."""
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype, sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    return sbrk(0) or 0


def _touch(begin: int, end: int) -> None:
    """Map the pages of this process's heap. What is in them stays as it is, whoever has got them meanwhile."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # In pieces: other threads that map memory have to wait for each. An older kernel refuses: then each page is mapped
    # when it is needed.
    for piece in range(-(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end - _TOUCHED_AT_ONCE + 1, _TOUCHED_AT_ONCE):
        if madvise(piece, _TOUCHED_AT_ONCE, _MADV_POPULATE_WRITE) != 0:
            return


def _use_kernels() -> None:
    """Forward and backward of what most networks have; not by `torch.nn`, whose functions may be replaced."""

    def zeros(*shape: int, trained: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu", requires_grad=trained)

    aten = torch.ops.aten
    scale = zeros(4, trained=True)
    x = aten.convolution(
        zeros(2, 3, 8, 8), zeros(4, 3, 3, 3, trained=True), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )
    x = aten.native_batch_norm(x, scale, scale, zeros(4), zeros(4), True, 0.1, 1e-5)[0]
    x = aten.linear(aten.relu(x).mean((2, 3)), zeros(2, 4, trained=True))
    torch.autograd.backward(aten.cross_entropy_loss(x, zeros(2, dtype=torch.int64)))
