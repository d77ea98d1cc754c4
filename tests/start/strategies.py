"""Strategies that many tests plan with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec


def replicated(world_size: int, tensors: Mapping[str, Sequence[int]], dtype: str = "") -> Strategy:
    """Every rank holds everything: DDP. `tensors`: name -> shape."""
    layout = Layout((world_size,), (REPLICATE,))
    return Strategy(world_size, tuple(TensorSpec(name, tuple(shape), layout, dtype) for name, shape in tensors.items()))
