"""Local parts of DTensors, and DTensors from them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["local_part", "with_layout_of"]


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
