"""Strategies that many tests plan with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from mindx_elastic.core.layout import REPLICATE, Layout, Placement, Shard, parse_placement
from mindx_elastic.core.strategy import Strategy, TensorSpec


def layout_of(mesh: Sequence[int], *placements: Any, ranks: Any = (), names: tuple[str, ...] = ()) -> Layout:
    """`placements`: one for each dimension of the mesh, in any spelling."""
    return Layout(tuple(mesh), tuple(map(parse_placement, placements)), ranks, names)


def rows(world_size: int) -> Layout:
    """Each rank has some rows: FSDP."""
    return layout_of((world_size,), "S(0)")


def replicated(world_size: int, tensors: Mapping[str, Sequence[int]], dtype: str = "") -> Strategy:
    """Every rank holds everything: DDP. `tensors`: name -> shape."""
    layout = Layout((world_size,), (REPLICATE,))
    return Strategy(world_size, tuple(TensorSpec(name, tuple(shape), layout, dtype) for name, shape in tensors.items()))


def draw_placements(draw: st.DrawFn, mesh: Sequence[int], num_dims: int) -> tuple[Placement, ...]:
    """Of a tensor, with split factors that fit: what the splits of the same dimension to the right make, or 1."""
    dims = [draw(st.sampled_from([None, *range(num_dims)])) for _ in mesh]
    placements = []
    for i, dim in enumerate(dims):
        inside = [mesh[j] for j in range(i + 1, len(mesh)) if dims[j] == dim]
        factor = math.prod(inside) if mesh[i] > 1 and draw(st.booleans()) else 1
        placements.append(REPLICATE if dim is None else Shard(dim, factor))
    return tuple(placements)
