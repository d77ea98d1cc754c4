"""Local parts of DTensors, and DTensors from them; values that go into a tensor that is there."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["filled", "local_part", "with_layout_of"]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def with_layout_of(template: Any, part: torch.Tensor) -> torch.Tensor:
    """`part` as the local part of a DTensor laid out like `template`, where that is a DTensor; else unchanged."""
    if not isinstance(template, DTensor):
        return part
    return DTensor.from_local(
        part.to(template.device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


@torch.no_grad()
def filled(live: Any, saved: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`live` with the values of `saved`, in place where it can be; else a copy on its device, or on `device`."""
    if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        steps = zip(live.stride(), live.shape, strict=True) if live.layout is torch.strided else ()
        if not any(step == 0 and size > 1 for step, size in steps):  # else several elements share one place
            return live.copy_(saved)
    return saved.to(live.device if isinstance(live, torch.Tensor) else device or saved.device, copy=True)
