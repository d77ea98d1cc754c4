"""Copies of a module's buffers in one run of host memory, made by one call.

A batch norm has three small buffers, and each call of torch for a tensor takes about as long as a hundred of its bytes
take to copy. So the memory of plain tensors is read through addresses that are looked up once, and ``bytes.join``
gathers it: under a microsecond for sixty of them, where ``torch._foreach_copy_`` takes 23. What could make an address
wrong is checked before each reading, other memory of the same tensor, but for tensors that are `fixed`: to ask sixty of
them takes longer than all the rest. Another tensor in the buffer's place shows by a hook of torch's, or at a close
boundary (`close_looks`), as other memory of a fixed one does. Another meaning of that memory
(``buffer.data = buffer.data.view(torch.int32)``) shows in neither, nor in a version counter. All are looked at by who
takes the copy out: where one has changed in mid-step, there is none.

Other tensors are cloned, those on a device in the order of its work.

Rejected: to copy only what has another version. `torch.batch_norm` changes the running mean and variance without
moving their ``_version`` (torch 2.13), and ``.data`` and numpy arrays of the same memory move none either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from mindx_elastic.core.tensor_memory import memory_of

__all__ = ["BufferBlock", "BufferReader", "is_plain", "view_of"]

_Slice = tuple[int, str, list[int]]
"""Offset in bytes, type name, shape."""
_data_ptr, _is_cuda = torch.Tensor.data_ptr, attrgetter("is_cuda")


class BufferBlock(NamedTuple):
    """One copy. Not changed once it is made, except by the reader that is told to use its tensors again."""

    raw: bytes
    """The bytes of all plain tensors, without gaps, so blocks are compared whole."""
    slices: list[_Slice | None]
    """The part of `raw` that each tensor is; None for one that is outside of it."""
    outside: Sequence[torch.Tensor | None]
    """Copies of the tensors that are not plain CPU memory; None for the others and for None."""

    @property
    def views(self) -> list[torch.Tensor | None]:
        """The copies as new tensors, one for each; None stays None. Any thread."""
        flat = torch.frombuffer(bytearray(self.raw or b"\0"), dtype=torch.uint8)
        parts = zip(self.slices, self.outside, strict=True)
        return [other if part is None else view_of(flat, part) for part, other in parts]


class BufferReader:
    """Reads the same tensors again and again. Training thread."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], fixed: Collection[int] = ()) -> None:
        """`fixed`: the numbers of those whose memory stays, most likely."""
        self.tensors = list(tensors)
        """The tensors that it reads."""
        self.slices: list[_Slice | None] = [None] * len(tensors)
        # The widest types first, so that each one is aligned.
        plain = [(i, tensor) for i, tensor in enumerate(tensors) if tensor is not None and is_plain(tensor)]
        plain.sort(key=lambda each: -each[1].dtype.itemsize)
        size = 0
        for i, tensor in plain:
            self.slices[i] = size, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            size += tensor.nbytes
        self._pieces = [memory_of(tensor) for _, tensor in plain]
        self._keeps = [tensor.untyped_storage() for _, tensor in plain]  # addresses stay valid
        self._others = [i for i, t in enumerate(tensors) if t is not None and self.slices[i] is None]
        of_type: dict[torch.dtype, list[int]] = {}
        for number, i in enumerate(self._others):
            of_type.setdefault(tensors[i].dtype, []).append(number)  # type: ignore[union-attr]
        # For each type by itself: of several types torch copies one tensor after the other.
        self._kinds_of_device = [*map(_getter, of_type.values())]
        self._no_others: list[torch.Tensor | None] = [None] * len(self.slices)
        self._fixed = [tensor for i, tensor in plain if i in fixed]
        self._movable = [tensor for i, tensor in plain if i not in fixed]
        self._fixed_at, self._movable_at = [*map(_data_ptr, self._fixed)], [*map(_data_ptr, self._movable)]
        self._meanings = [*map(_meaning_of, self.tensors)]

    def fits(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether `tensors` are the same ones, with the same memory."""
        has_movable = [*map(_data_ptr, self._movable)] == self._movable_at
        return self.are(tensors) and has_movable and self._has_fixed() and self._has_others()

    def are(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether `tensors` are the same ones."""
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))

    def _has_fixed(self) -> bool:
        return [*map(_data_ptr, self._fixed)] == self._fixed_at

    def _has_others(self) -> bool:
        return all(_meaning_of(self.tensors[i]) == self._meanings[i] for i in self._others)

    def means_the_same(self) -> bool:
        """Whether its tensors mean by their memory what they meant, and the fixed ones have that memory."""
        return self._has_fixed() and [*map(_meaning_of, self.tensors)] == self._meanings

    def read_raw(self) -> bytes | None:
        """As `read`, but `BufferBlock.raw` alone."""
        if [*map(_data_ptr, self._movable)] != self._movable_at or (self._others and not self._has_others()):
            return None
        return b"".join(self._pieces)

    def read(self, earlier: BufferBlock | None = None) -> BufferBlock | None:
        """A copy as they are now; None where one of the tensors has other memory. `earlier`: a block of this reader's
        whose tensors may be used again."""
        if self._others:
            raw = self.read_raw()
            return None if raw is None else self._with_others(raw, earlier)
        if [*map(_data_ptr, self._movable)] != self._movable_at:
            return None
        return tuple.__new__(BufferBlock, (b"".join(self._pieces), self.slices, self._no_others))  # without a call

    @torch.no_grad()
    def _with_others(self, raw: bytes, earlier: BufferBlock | None) -> BufferBlock:
        live: list[torch.Tensor] = [self.tensors[i] for i in self._others]  # type: ignore[misc]
        if earlier is not None and earlier.slices is self.slices and all(map(_is_cuda, live)):
            # On a device the new values arrive in the order of its queue, so the older ones stay for as long as the
            # device is at the older boundary (see `capture.device_progress`). In host memory they would be gone.
            copies: list[torch.Tensor] = [earlier.outside[i] for i in self._others]  # type: ignore[misc]
            for pick in self._kinds_of_device:
                torch._foreach_copy_(pick(copies), pick(live))
        else:
            copies = [tensor.detach().clone() for tensor in live]
        outside: list[torch.Tensor | None] = [None] * len(self.slices)
        for index, copy in zip(self._others, copies, strict=True):
            outside[index] = copy
        return BufferBlock(raw, self.slices, outside)


def view_of(flat: torch.Tensor, part: _Slice | list[object]) -> torch.Tensor:
    """The tensor that `part` of a block describes."""
    offset, name, shape = part
    dtype = getattr(torch, str(name))
    nbytes = torch.Size(shape).numel() * dtype.itemsize  # type: ignore[arg-type]
    piece = flat[int(offset) : int(offset) + nbytes]  # type: ignore[call-overload]
    return piece.view(dtype).view(torch.Size(shape))  # type: ignore[arg-type]


def _getter(indices: Sequence[int]) -> Any:
    """Gives those items of a sequence, as a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: [items[i] for i in indices]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after the other in host memory, as they are."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _meaning_of(tensor: torch.Tensor | None) -> object:
    """How its memory is read."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.layout, is_plain(tensor))
