"""DTensor (FSDP2, tensor parallel): each rank saves the part that it holds, with a description of where it lies.

Until resharding exists, a part is put back on the same rank of an equal mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["describe_shard", "local_part", "with_layout_of"]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def with_layout_of(template: Any, part: torch.Tensor) -> torch.Tensor:
    """`part` as the local part of a DTensor laid out like `template`; unchanged when `template` is no DTensor."""
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


def describe_shard(tensor: DTensor) -> dict[str, Any]:
    """JSON-able: global shape, mesh shape and names, placements (torch's own spelling), this rank's coordinate."""
    mesh = tensor.device_mesh
    return {
        "global_shape": list(tensor.shape),
        "mesh_shape": list(mesh.shape),
        "mesh_dim_names": list(mesh.mesh_dim_names or ()),
        "placements": [str(placement) for placement in tensor.placements],
        "coordinate": list(mesh.get_coordinate() or ()),
    }
