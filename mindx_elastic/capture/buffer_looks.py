"""Whether a block of the program has left the buffers of modules as they were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["BufferLook", "look_at_buffers"]

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class BufferLook:
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor | None
    """None where there would be much to copy: a change that was taken back counts as one."""

    def is_changed(self, now: torch.Tensor) -> bool:
        """`now`: the buffer that has its place."""
        if now is self.buffer and now._version == self.version:
            return False
        if now is not self.buffer or self.copy is None:
            return True
        # As bytes: statistics of a diverged model are NaN, which equals nothing.
        return not torch.equal(_bytes_of(now), _bytes_of(self.copy))


def look_at_buffers(buffers: Iterable[tuple[str, torch.Tensor]]) -> dict[str, BufferLook]:
    """By place. The small ones, as BatchNorm's are, are copied: averaged weights are loaded with their statistics for
    an evaluation, and the own ones afterwards."""
    looks, left = {}, _MOST_BYTES
    for place, buffer in buffers:
        is_small = type(buffer) is torch.Tensor and buffer.layout is torch.strided and buffer.nbytes <= left
        left -= buffer.nbytes if is_small else 0
        looks[place] = BufferLook(buffer, buffer._version, buffer.detach().clone() if is_small else None)
    return looks


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
