"""A layout in MindSpore's terms (``ParallelLayouts``), and back. Pure arithmetic; `strategy_file` reads and writes it.

The mesh is ``dev_matrix``, its ranks count row by row from the first rank of the pipeline stage. ``tensor_map[i] = k``:
the tensor's dimension i is split over mesh dimension ``len(dev_matrix) - 1 - k``; -1: not split. Mesh dimensions that
nothing names repeat the tensor. Optimizer sharding (``opt_weight_shard_step``, ``opt_weight_shard_size``) then cuts
dimension 0 of each slice once more, over ranks that hold the same slice: the *last* cut, wherever those ranks are in
the mesh. So it becomes a ``_StridedShard`` where a mesh dimension to the right of it splits the tensor too.

What these fields cannot say (permuted ranks, uneven splits) gets None from `fields_of`, never something close.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindx_elastic.core.layout import MAX_MESH_DIMS, MAX_RANKS, REPLICATE, Layout, Placement
from mindx_elastic.core.strategy import MAX_TENSOR_DIMS, Strategy, TensorSpec
from mindx_elastic.errors import UsageError

__all__ = [
    "Fields",
    "fields_of",
    "layout_of",
    "stage_size_of",
]

Orders = list[list[int]]
"""For each dimension of a tensor the mesh dimensions that split it, in the order in which they do."""


@dataclass(frozen=True)
class Fields:
    """``ParallelLayouts`` without our additions."""

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    """One entry for the whole tensor; or several, one for each of its dimensions, for splits over several mesh
    dimensions (then a second, empty one stands after that of a tensor of one dimension)."""
    field: int = 0
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0

    @property
    def num_ranks(self) -> int:
        return math.prod(self.dev_matrix)

    @property
    def is_nested(self) -> bool:
        """Whether ``tensor_map`` has one entry for each dimension of the tensor."""
        return len(self.tensor_map) > 1

    @property
    def num_dims(self) -> int:
        """Dimensions of the tensor."""
        if not self.is_nested:
            return len(self.tensor_map[0])
        return 1 if len(self.tensor_map) == 2 and not self.tensor_map[1] else len(self.tensor_map)


# --- from MindSpore ---


def layout_of(fields: Fields, first_rank: int) -> Layout:
    """Raises UsageError for fields that contradict each other, or that no layout of ours can follow."""
    mesh, orders = list(fields.dev_matrix), _named_orders(fields)
    if not mesh or min(mesh) < 1 or fields.num_ranks + first_rank > MAX_RANKS:
        raise UsageError(f"dev_matrix {mesh} from rank {first_rank} on: not 1 to {MAX_RANKS} ranks")
    if fields.field:
        raise UsageError(f"field is {fields.field}: tensors sliced by fields are not supported")
    step, size = fields.opt_weight_shard_step, fields.opt_weight_shard_size
    if step < 0 or size < -1:
        raise UsageError(f"opt_weight_shard_step is {step} and opt_weight_shard_size {size}")
    if step and size:
        mesh, orders = _with_optimizer(mesh, orders, step, size)
    return Layout(tuple(mesh), _placements(mesh, orders), range(first_rank, first_rank + fields.num_ranks))


def _named_orders(fields: Fields) -> Orders:
    num_dims = len(fields.dev_matrix)
    if num_dims > MAX_MESH_DIMS:
        raise UsageError(f"dev_matrix has {num_dims} dimensions; {MAX_MESH_DIMS} at most")
    maps = fields.tensor_map
    if len(maps) == 1:
        maps = tuple((k,) for k in maps[0])
    elif len(maps) == 2 and not maps[1]:
        maps = maps[:1]
    if len(maps) > MAX_TENSOR_DIMS:
        raise UsageError(f"tensor_map has {len(maps)} dimensions; {MAX_TENSOR_DIMS} at most")
    orders = [[num_dims - 1 - k for k in each if k != -1] for each in maps]
    used = [m for order in orders for m in order]
    if len(set(used)) != len(used) or not all(0 <= m < num_dims for m in used):
        raise UsageError(f"tensor_map {maps!r:.80} does not fit dev_matrix {list(fields.dev_matrix)!r:.80}")
    return orders


def _placements(mesh: Sequence[int], orders: Orders) -> tuple[Placement, ...]:
    placements = [REPLICATE] * len(mesh)
    for dim, order in enumerate(orders):
        for place, m in enumerate(order):
            if mesh[m] > 1:
                placements[m] = Placement(dim, math.prod(mesh[other] for other in order[:place] if other > m))
    return tuple(placements)


def _with_optimizer(mesh: list[int], orders: Orders, step: int, size: int) -> tuple[list[int], Orders]:
    """The mesh, finer where needed, and the orders with dimension 0 cut by `size` ranks that are `step` apart."""
    used = {m for order in orders for m in order}
    free = [m for m, n in enumerate(mesh) if m not in used and n > 1]
    replicas = math.prod(mesh[m] for m in free)
    problem = f"optimizer sharding over {size} ranks with step {step} does not fit dev_matrix {mesh}, tensor_map"
    everybody = size == -1
    size = replicas if everybody else size
    if size == 1:
        return mesh, orders
    if not orders or size > replicas or replicas % size:
        raise UsageError(f"{problem}: {replicas} replicas, {len(orders)} tensor dimensions")
    if size == replicas:
        if len(free) == 1 and not everybody and math.prod(mesh[free[0] + 1 :]) != step:
            raise UsageError(f"{problem}: the replicas are {math.prod(mesh[free[0] + 1 :])} apart")
        return mesh, [orders[0] + free, *orders[1:]]
    for m in reversed(free):  # a part of one mesh dimension
        inner, rest = divmod(step, math.prod(mesh[m + 1 :]))
        if inner and not rest and mesh[m] % (inner * size) == 0:
            mesh, orders, middle = _divide(mesh, orders, m, (mesh[m] // (inner * size), size, inner))
            return mesh, [[*orders[0], middle], *orders[1:]]
    chosen: list[int] = []
    left = size
    for m in reversed(free):  # whole ones from the right, and a part of the next
        if left % mesh[m] == 0:
            chosen, left = [m, *chosen], left // mesh[m]
        elif mesh[m] % left == 0:
            before = len(mesh)
            mesh, orders, middle = _divide(mesh, orders, m, (mesh[m] // left, left, 1))
            chosen, left = [middle, *(other + len(mesh) - before for other in chosen)], 1
        else:
            break
        if left == 1:
            return mesh, [orders[0] + chosen, *orders[1:]]
    raise UsageError(f"{problem}: no such ranks")


def _divide(mesh: list[int], orders: Orders, m: int, parts: tuple[int, int, int]) -> tuple[list[int], Orders, int]:
    """Mesh dimension `m`, which splits nothing, as several; and which of them is the middle part."""
    kept = [n for place, n in enumerate(parts) if n > 1 or place == 1]
    more = len(kept) - 1
    moved = [[other + more if other > m else other for other in order] for order in orders]
    return [*mesh[:m], *kept, *mesh[m + 1 :]], moved, m + (parts[0] > 1)


# --- to MindSpore ---


def stage_size_of(strategy: Strategy) -> int:
    """Ranks of a pipeline stage: the mesh size of most tensors, as long as such meshes stand side by side."""
    sizes: Counter[int] = Counter()
    for group in strategy.classes:
        size = group.layout.size
        if strategy.world_size % size == 0 and _stands_alone(group.layout, size):
            sizes[size] += len(group.tensors)
    return max(sizes, key=lambda size: (sizes[size], size), default=strategy.world_size)


def fields_of(spec: TensorSpec, stage_size: int) -> Fields | None:
    """MindSpore's fields for a tensor; None where they cannot say how it is laid out."""
    layout = spec.layout
    mesh, orders = layout.mesh_shape, _split_orders(layout)
    if not _stands_alone(layout, stage_size):
        return None
    if any(size % math.prod(mesh[m] for m in order) for size, order in zip(spec.shape, orders, strict=False)):
        return None
    # One entry for each dimension, also for those after the last that is split: MindSpore compares the numbers.
    num_dims = max(len(orders), spec.num_dims or len(spec.shape))
    orders += [[] for _ in range(num_dims - len(orders))]
    maps = tuple(tuple(len(mesh) - 1 - m for m in order) or (-1,) for order in orders)
    if all(len(each) == 1 for each in maps):
        return Fields(mesh, (tuple(k for (k,) in maps),))
    return Fields(mesh, maps if num_dims > 1 else (*maps, ()))


def _stands_alone(layout: Layout, stage_size: int) -> bool:
    """Whether the mesh is one whole pipeline stage, its ranks in order."""
    return isinstance(layout.ranks, range) and layout.size == stage_size and layout.ranks.start % stage_size == 0


def _split_orders(layout: Layout) -> Orders:
    """For each dimension of the tensor, up to the last that is split, the mesh dimensions that split it, outermost cut
    first."""
    return [list(layout.split_orders.get(dim, ())) for dim in range(1 + max(layout.split_orders, default=-1))]
