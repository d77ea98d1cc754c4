"""Copies of a module's buffers in one run of host memory, as snapshots have them.

Buffers on a device are copied there, in the order of its work.

Rejected: to copy only what has another version. `torch.batch_norm` changes the running mean and variance without
moving their ``_version`` (torch 2.13), and ``.data`` and numpy arrays of the same memory move none either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from mindx_elastic.core.tensor_memory import memory_of

__all__ = ["BufferBlock", "block_of", "is_on_device", "view_of"]

_ALIGNMENT = 16  # of the widest type
_DENSE = torch.strided
_Slice = tuple[int, torch.dtype, torch.Size]
"""Offset in bytes, type, shape."""


class BufferBlock:
    """One copy. Not changed once it is made, but for tensors on a device; see `block_of`."""

    def __init__(self, raw: bytes, slices: list[_Slice | None], outside: list[torch.Tensor | None]) -> None:
        self.raw = raw
        """The bytes of all dense tensors. The gaps between them are zero, so blocks are compared whole."""
        self.slices = slices
        """The part of `raw` that each tensor is; None for one that is outside of it."""
        self.outside = outside
        """Copies of the tensors that are not plain CPU memory; None for the others and for None."""
        self._views: list[torch.Tensor | None] | None = None

    @property
    def views(self) -> list[torch.Tensor | None]:
        """The copies as tensors, one for each; None stays None. Any thread."""
        if self._views is None:
            flat = torch.frombuffer(bytearray(self.raw or b"\0"), dtype=torch.uint8)
            parts = zip(self.slices, self.outside, strict=True)
            self._views = [other if part is None else _view(flat, *part) for part, other in parts]
        return self._views

    def describe(self, names: Sequence[str]) -> str:
        """What `view_of` needs to find each of the tensors in `raw` by its name, as JSON."""
        parts = zip(names, self.slices, strict=True)
        return json.dumps(
            [
                [name, (part[0], str(part[1]).removeprefix("torch."), part[2])]
                for name, part in parts
                if part is not None
            ]
        )


def block_of(
    tensors: Sequence[torch.Tensor | None], earlier: BufferBlock | None = None, *, dense_only: bool = False
) -> BufferBlock:
    """A copy of `tensors` as they are now. `earlier`: a block whose tensors on a device may be used again. dense_only:
    those outside of host memory are left out. Training thread, at each boundary."""
    pieces: list[Any] = []
    slices: list[_Slice | None] = []
    others: list[int] = []
    size = 0
    for number, tensor in enumerate(tensors):
        if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not _DENSE or tensor.is_quantized:
            slices.append(None)
            if tensor is not None and not dense_only:
                others.append(number)
            continue
        nbytes = tensor.nbytes
        slices.append((size, tensor.dtype, tensor.shape))
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        pieces.append(memory_of(tensor if is_plain else tensor.detach().resolve_conj().resolve_neg().contiguous()))
        if gap := -nbytes % _ALIGNMENT:
            pieces.append(bytes(gap))
        size += nbytes + gap
    outside: list[torch.Tensor | None] = [None] * len(slices)
    if others:
        _copy_others(tensors, others, outside, earlier)
    return BufferBlock(b"".join(pieces), slices, outside)


@torch.no_grad()
def _copy_others(
    tensors: Sequence[Any], others: Sequence[int], copies: list[torch.Tensor | None], earlier: BufferBlock | None
) -> None:
    """On a device the new values arrive in the order of its queue, so older ones stay in the same memory for as long as
    the device is at the older boundary (see `capture.device_progress`). In host memory they would be gone."""
    older: Sequence[Any] = copies if earlier is None or len(earlier.outside) != len(copies) else earlier.outside
    together: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for number in others:
        live, old = tensors[number], older[number]
        if live.is_cuda and old is not None and _kind_of(old) == _kind_of(live):
            copies[number] = old
            ours, theirs = together.setdefault((live.device, live.dtype), ([], []))
            ours.append(old)
            theirs.append(live)
        else:
            copies[number] = live.detach().clone()
    for ours, theirs in together.values():  # for each type by itself: of several torch copies one after the other
        torch._foreach_copy_(ours, theirs)


def _kind_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def view_of(flat: torch.Tensor, part: Sequence[Any]) -> torch.Tensor:
    """The tensor that `part` of `BufferBlock.describe` is: offset, type name, shape."""
    offset, name, shape = part
    return _view(flat, offset, getattr(torch, name), torch.Size(shape))


def _view(flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether it is not in host memory."""
    return tensor.device.type != "cpu"
