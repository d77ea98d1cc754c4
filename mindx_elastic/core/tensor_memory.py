"""The memory of a tensor of the program, as a buffer that Python can read and write; and of thousands of them.

Not by way of numpy: `Tensor.numpy()` marks the tensor's storage as one that must never be resized, for good, because an
array may still look at it. A `resize_` of the program's own, an ``out=`` that grows, and FSDP, which frees and
allocates its parameters by resizing, would then fail under a guard and nowhere else.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["flat_bytes", "memory_of", "without_collections"]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, live. The view keeps the tensor alive. Raises RuntimeError for a
    tensor without memory (fake, meta). Any thread.

    A tensor that is resized or freed by its storage meanwhile leaves the view without memory: use it at once.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    address = tensor.data_ptr()
    if not address:
        raise RuntimeError(f"{type(tensor).__name__} {list(tensor.shape)}: no own memory")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(address)
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in file order, on its device; copies only where memory has another order."""
    if not tensor.is_contiguous():
        # On the host: a training job has no spare accelerator memory.
        tensor = tensor.cpu().contiguous()
    # Not reshape(-1): it keeps the odd strides that tensors of one or no element may have, which view() then refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_is_paused = False


@contextmanager
def without_collections() -> Iterator[None]:
    """What is done for each of thousands of tensors makes thousands of objects, and each makes Python look for garbage
    sooner, in all objects of the process: half of the time of entering a guard, of a save and of a load. A worker that
    a loader forks meanwhile collects as ever."""
    global _is_paused
    if not gc.isenabled():  # the program's business, or it is paused
        yield
        return
    try:
        _is_paused = True
        gc.disable()
        yield
    finally:
        gc.enable()
        _is_paused = False


def _go_on_in_child() -> None:
    if _is_paused:
        gc.enable()


os.register_at_fork(after_in_child=_go_on_in_child)
