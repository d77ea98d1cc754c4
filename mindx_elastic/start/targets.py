"""The layouts of a new world, as far as they follow from the old one's, and how the two compare. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.strategy import LayoutClass, Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.start.facts import World

__all__ = ["bytes_by_rank", "remesh", "same_part", "same_parts", "target_of"]


def target_of(source: Strategy, world: World) -> Strategy:
    """The new world's strategy: as given, as before, or scaled. Raises UsageError when it has to be given."""
    if world.strategy is not None:
        if world.strategy.world_size != world.size:
            raise UsageError(f"the new strategy is for {world.strategy.world_size} ranks, the world has {world.size}")
        return world.strategy
    return source if world.size == source.world_size else remesh(source, world.size)


def remesh(source: Strategy, world_size: int, mesh: Mapping[str, int] | None = None) -> Strategy:
    """`source` on another number of ranks.

    Without `mesh` its only mesh dimension, or the outermost one (data parallel, by convention), takes up the
    difference. With `mesh` (name -> size) dimensions get the sizes named. Raises UsageError where that does not fit.
    """
    layouts: dict[Layout, Layout] = {}
    for group in source.classes:
        try:
            layouts[group.layout] = _remesh_layout(group, source.world_size, world_size, mesh)
        except UsageError:
            # ZeRO: an optimizer spreads its state anew by itself, whatever the number of ranks.
            if not all(spec.parameter or spec.is_marker for spec in group.tensors):
                raise
    kept = (spec for spec in source.tensors if spec.layout in layouts and not spec.is_marker)
    return Strategy(world_size, tuple(replace(spec, layout=layouts[spec.layout]) for spec in kept))


def _remesh_layout(group: LayoutClass, old: int, new: int, mesh: Mapping[str, int] | None) -> Layout:
    layout, name = group.layout, group.tensors[0].name or "the state"
    stage, stages = _stage_of(layout, old)
    if stage is None or new % stages:
        where = rank_list(tuple(layout.ranks))
        raise UsageError(
            f"{name} is on {where} of {old} only, so its layout over {new} ranks must be given (start the job, "
            "whose own layouts then count, or give a strategy file of the new world)"
        )
    new //= stages  # pipeline stages keep their number
    ranks = range(stage * new, (stage + 1) * new)
    shape = list(layout.mesh_shape)
    if mesh is None:
        inner = math.prod(shape[1:])
        if not layout.splitting:
            return replace(layout, mesh_shape=(new,), placements=layout.placements[:1], ranks=ranks, mesh_dim_names=())
        if new % inner:
            raise UsageError(
                f"{name} is laid out as {layout}: {new} ranks are not a multiple of {inner}; say how with "
                "--mesh name=size,..., or start the job with that number of ranks"
            )
        shape[0] = new // inner
    else:
        names = layout.mesh_dim_names
        if not layout.splitting and not set(mesh) <= set(names):
            return replace(layout, mesh_shape=(new,), placements=layout.placements[:1], ranks=ranks, mesh_dim_names=())
        unknown = [each for each in mesh if each not in names]
        if unknown:
            known = ", ".join(names) or "none"
            raise UsageError(f"{name} has no mesh dimension called {unknown[0]!r} (known: {known})")
        shape = [mesh.get(each, size) for each, size in zip(names, shape, strict=True)]
    if math.prod(shape) != new:
        raise UsageError(f"a mesh of {' x '.join(map(str, shape))} has not {new} ranks ({name})")
    return _with_factors(replace(layout, mesh_shape=tuple(shape), ranks=ranks), layout)


def _stage_of(layout: Layout, world_size: int) -> tuple[int | None, int]:
    """Which pipeline stage its ranks are, of how many; None: they are not one of equal blocks of the world."""
    first, size = layout.ranks[0], layout.size
    if (
        tuple(layout.ranks) != tuple(range(first, first + size))
        or first % size
        or world_size % size
        or size == 1 < world_size
    ):
        return None, 1
    return first // size, world_size // size


def _with_factors(new: Layout, old: Layout) -> Layout:
    """A ``_StridedShard``'s factor is the number of splits inside of it, which may have changed."""
    placements = list(new.placements)
    for i, placement in enumerate(placements):
        if placement.split_factor == 1 or placement.dim is None:
            continue
        inside = [j for j in range(i + 1, len(placements)) if old.placements[j].dim == placement.dim]
        if math.prod(old.mesh_shape[j] for j in inside) == placement.split_factor:
            factor = math.prod(new.mesh_shape[j] for j in inside)
            placements[i] = replace(placement, split_factor=factor)
    return replace(new, placements=tuple(placements))


def same_parts(source: Strategy, target: Strategy) -> bool:
    """Whether each rank of `target` holds what the same rank of `source` did.

    Optimizers have no state before their first step, so only what `target` names is compared.
    """
    if source is target:
        return True
    if source.world_size != target.world_size:
        return False
    return all(
        any(_alike(each, spec) for each in source.by_name[spec.name])
        for spec in target.tensors
        if spec.name in source.by_name and not spec.is_marker
    )


def same_part(own: Strategy, spec: TensorSpec, rank: int | None) -> bool:
    """Whether `rank`, whose file says `own`, had the part of `spec` that it wants, and no other. None: every rank."""
    return spec.is_marker or any(
        _alike(each, spec) or (rank is not None and _is_alone(each, spec, rank)) for each in own.by_name[spec.name]
    )


def _is_alone(old: TensorSpec, new: TensorSpec, rank: int) -> bool:
    """Where the rank was the only holder (see `assumptions`), the whole was its own part."""
    if tuple(old.layout.ranks) != (rank,):
        return False
    return old.shape == new.layout.local_shape(new.shape, new.layout.shard_of(rank))


def _alike(old: TensorSpec, new: TensorSpec) -> bool:
    return old.shape == new.shape and (old.layout == new.layout or _equal_boxes(old, new))


def _equal_boxes(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two layouts of one shape mean the same, though they are spelled differently (a mesh of one dimension, or
    of two)."""
    a, b = one.layout, other.layout
    if sorted(a.ranks) != sorted(b.ranks) or not (one.is_shape_known and other.is_shape_known):
        return False
    if not a.splitting and not b.splitting:
        return True
    return all(a.segments(one.shape, a.shard_of(rank)) == b.segments(one.shape, b.shard_of(rank)) for rank in a.ranks)


def bytes_by_rank(target: Strategy, source: Strategy) -> dict[int, int]:
    """About how many bytes each rank reads: what it holds of the tensors that `source` has.

    Optimizer state follows its parameter's new layout where `target` does not name it.
    """
    found: dict[int, int] = {}
    groups: dict[Layout, list[TensorSpec]] = {}
    layouts = {spec.name: spec.layout for spec in target.tensors}
    for spec in source.tensors:
        layout = layouts.get(spec.name)
        if layout is None and spec.parameter in layouts:
            like = source.by_name.get(spec.parameter, ())
            same_shape = bool(like) and like[0].shape == spec.shape
            # Small things beside the moments (step counters, factored rows) are read whole.
            layout = layouts[spec.parameter] if same_shape else None
        if layout is not None and not spec.is_marker:
            groups.setdefault(layout, []).append(spec)
    for layout, specs in groups.items():
        sizes = _shard_bytes(layout, specs)
        for rank, shard in zip(layout.ranks, layout.shard_ids, strict=True):
            found[rank] = found.get(rank, 0) + sizes[shard]
    return found


def _shard_bytes(layout: Layout, specs: Sequence[TensorSpec]) -> list[int]:
    """Bytes that each shard has of all `specs`; tensors of one shape are worked out together."""
    weights: dict[tuple[int, ...], int] = {}
    for spec in specs:
        if spec.is_shape_known:
            weights[spec.shape] = weights.get(spec.shape, 0) + spec.item_bytes
    sizes = [0] * layout.num_shards
    lengths: dict[tuple[int, int], list[int]] = {}
    split = _degrees(layout)
    even = 0
    for shape, weight in weights.items():
        if all(shape[dim] % parts == 0 for dim, parts in split.items()):
            even += math.prod(shape) * weight // layout.num_shards
            continue
        whole = weight * math.prod(size for dim, size in enumerate(shape) if dim not in split)
        for dim in split:  # the length along a dimension is the same for all tensors of that size
            if (dim, shape[dim]) not in lengths:
                lengths[dim, shape[dim]] = [_length(layout, shape[dim], dim, s) for s in range(layout.num_shards)]
        columns = [lengths[dim, shape[dim]] for dim in split]
        sizes = [size + whole * math.prod(row) for size, row in zip(sizes, zip(*columns, strict=True), strict=True)]
    return [size + even for size in sizes]


def _length(layout: Layout, size: int, dim: int, shard: int) -> int:
    return sum(stop - start for start, stop in layout.intervals(size, dim, shard))


def _degrees(layout: Layout) -> dict[int, int]:
    """Into how many parts each dimension is cut."""
    degrees: dict[int, int] = {}
    for i in layout.splitting:
        dim = layout.placements[i].dim
        assert dim is not None
        degrees[dim] = degrees.get(dim, 1) * layout.mesh_shape[i]
    return degrees
