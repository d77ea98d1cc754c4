"""Copies of a module's buffers in one block of host memory, so that all of them are moved elsewhere in one go."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BufferBlock", "view_of"]

_ALIGNMENT = 64
_Slice = tuple[int, str, list[int]]
"""Offset in bytes, type name, shape."""


class BufferBlock:
    """Makes `views`, one for each of `tensors` (None stays None), with the same types and shapes; contents are copied.

    Tensors that are not plain contiguous CPU memory get a copy of their own, outside of the block.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.slices: list[_Slice | None] = []
        """The part of `flat` that each view is; None for one outside of the block."""
        size = 0
        for tensor in tensors:
            if tensor is None or not _is_plain(tensor):
                self.slices.append(None)
                continue
            self.slices.append((size, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            size += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        self.flat = torch.zeros(size, dtype=torch.uint8)  # the gaps too: blocks are compared whole
        self.views: list[torch.Tensor | None] = []
        for tensor, part in zip(tensors, self.slices, strict=True):
            if tensor is None or part is None:
                self.views.append(None if tensor is None else tensor.detach().clone())
                continue
            view = view_of(self.flat, part)
            view.copy_(tensor.detach())
            self.views.append(view)


def view_of(flat: torch.Tensor, part: _Slice | list[object]) -> torch.Tensor:
    """The tensor that `part` of a block describes."""
    offset, name, shape = part
    dtype = getattr(torch, str(name))
    nbytes = torch.Size(shape).numel() * dtype.itemsize  # type: ignore[arg-type]
    piece = flat[int(offset) : int(offset) + nbytes]  # type: ignore[call-overload]
    return piece.view(dtype).view(torch.Size(shape))  # type: ignore[arg-type]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
