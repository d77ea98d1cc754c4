"""How a new world lays its tensors out, as far as the old one's strategy tells. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mindx_elastic.errors import UsageError
from mindx_elastic.plan.facts import World, rank_list
from mindx_elastic.plan.layout import Layout
from mindx_elastic.plan.strategy import LayoutClass, Strategy

__all__ = ["bytes_by_rank", "remesh", "same_parts", "target_of"]


def target_of(source: Strategy, world: World) -> Strategy:
    """The new world's strategy: as given, as it was, or scaled. Raises UsageError when that has to be told."""
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
        layouts[group.layout] = _remesh_layout(group, source.world_size, world_size, mesh)
    specs = (replace(spec, layout=layouts[spec.layout]) for spec in source.tensors)
    return Strategy(world_size, tuple(specs))


def _remesh_layout(group: LayoutClass, old: int, new: int, mesh: Mapping[str, int] | None) -> Layout:
    layout, name = group.layout, group.tensors[0].name or "the state"
    stage, stages = _stage_of(layout, old)
    if stage is None or new % stages:
        where = rank_list(tuple(layout.ranks))
        raise UsageError(
            f"{name} lies on {where} of {old} only: how it is spread over {new} ranks has to be told (start the job, "
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
                f"{name} is laid out as {layout}: {new} ranks are no multiple of {inner}; say how with "
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
        or size == 1 < first
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
    for spec in target.tensors:
        known = source.by_name.get(spec.name, ())
        if known and not any(
            each.shape == spec.shape
            and (each.layout == spec.layout or _equal_boxes(each.layout, spec.layout, spec.shape))
            for each in known
        ):
            return False
    return True


def _equal_boxes(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    """Layouts that are spelled differently (a mesh of one dimension, or of two) and mean the same."""
    if sorted(one.ranks) != sorted(other.ranks):
        return False
    if not one.splitting and not other.splitting:
        return True
    return all(
        one.segments(shape, one.shard_of(rank)) == other.segments(shape, other.shard_of(rank)) for rank in one.ranks
    )


def bytes_by_rank(target: Strategy, source: Strategy) -> dict[int, int]:
    """About how much each rank reads: what it holds of the tensors that `source` has; optimizers' state follows the
    layout that it had before where `target` does not name it."""
    found: dict[int, int] = {}
    specs = {spec.name: spec for spec in source.tensors}
    named = {spec.name for spec in target.tensors}
    classes = list(target.classes)
    if target is not source:
        parameters = {spec.name: spec.layout for spec in target.tensors}
        extra: dict[Layout, list[str]] = {}
        for spec in source.tensors:
            if spec.name not in named and spec.parameter in parameters:
                extra.setdefault(parameters[spec.parameter], []).append(spec.name)
        classes += [
            LayoutClass(layout, tuple(replace(specs[name], layout=layout) for name in names if len(specs[name].shape)))
            for layout, names in extra.items()
        ]
    for group in classes:
        sizes = _shard_bytes(group)
        for rank, shard in zip(group.layout.ranks, group.layout.shard_ids, strict=True):
            found[rank] = found.get(rank, 0) + sizes[shard]
    return found


def _shard_bytes(group: LayoutClass) -> list[int]:
    layout, even = group.layout, 0
    sizes = [0] * layout.num_shards
    degrees: dict[int, int] = {}
    for i in layout.splitting:
        dim = layout.placements[i].dim
        assert dim is not None
        degrees[dim] = degrees.get(dim, 1) * layout.mesh_shape[i]
    for spec in group.tensors:
        if all(dim < len(spec.shape) and spec.shape[dim] % parts == 0 for dim, parts in degrees.items()):
            even += math.prod(spec.shape) * spec.item_bytes // layout.num_shards
            continue
        for shard in range(layout.num_shards):
            sizes[shard] += spec.local_bytes(shard)
    return [size + even for size in sizes]
