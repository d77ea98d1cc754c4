"""Files as MindSpore writes them. That the generated code has its bytes is tested by files made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindx_elastic.platforms.strategy_file import messages

__all__ = ["layout_item", "strategy_map"]


def layout_item(
    name: str,
    dev_matrix: Sequence[int],
    tensor_map: Sequence[Any],
    *,
    split: Sequence[int] = (),
    offsets: Sequence[int] = (),
    step: int = 0,
    size: int = 0,
) -> Any:
    """A tensor of a strategy file. tensor_map: of the whole tensor, or a list for each of its dimensions."""
    item = messages().ParallelLayoutItem(param_name=name)
    layouts = item.parallel_layouts
    layouts.field, layouts.opt_weight_shard_step, layouts.opt_weight_shard_size = 0, step, size
    layouts.dev_matrix.add(dim=dev_matrix)
    for each in [tensor_map] if all(isinstance(k, int) for k in tensor_map) else tensor_map:
        layouts.tensor_map.add(dim=each)
    layouts.param_split_shape.add(dim=split)
    layouts.indices_offset.add(dim=offsets)
    return item


def strategy_map(*items: Any, stage: int = 0) -> bytes:
    """A strategy file with one operator."""
    content = messages().ParallelStrategyMap(current_stage=1, parallel_layout_item=items)
    content.parallel_strategy_item.add(node_name="Default/MatMul-op0").parallel_strategys.stage = stage
    data: bytes = content.SerializeToString(deterministic=True)
    return data
