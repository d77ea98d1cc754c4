"""The layouts of a new world, as far as they follow from the old one's, and how the two compare. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import LayoutClass, Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.start.facts import World

__all__ = ["same_parts", "target_of"]


def target_of(source: Strategy, world: World) -> Strategy:
    """The new world's strategy: as given, as before, or as `source` where every rank of a mesh of one dimension does
    the same. Raises UsageError when it has to be given."""
    if world.strategy is not None:
        if world.strategy.world_size != world.size:
            raise UsageError(f"the new strategy is for {world.strategy.world_size} ranks, the world has {world.size}")
        return world.strategy
    if world.size == source.world_size:
        return source
    # ZeRO: an optimizer redistributes its state by itself, whatever the number of ranks.
    groups = [group for group in source.classes if not all(spec.parameter or spec.is_marker for spec in group.tensors)]
    layouts = {group.layout: _redistributed(group, source.world_size, world.size) for group in groups}
    kept = (spec for spec in source.tensors if not spec.is_marker)
    specs = (replace(spec, layout=layouts[spec.layout]) for spec in kept if spec.layout in layouts)
    return Strategy(world.size, tuple(specs))


def _redistributed(group: LayoutClass, old: int, new: int) -> Layout:
    layout, name = group.layout, group.tensors[0].name or "the state"
    if layout.size != old or (layout.splitting and len(layout.mesh_shape) > 1):
        raise UsageError(
            f"{name} is laid out as {layout}, so its layout over {new} ranks must be given: start the job, whose own "
            "layouts then count"
        )
    return replace(layout, mesh_shape=(new,), placements=layout.placements[:1], ranks=range(new), mesh_dim_names=())


def same_parts(source: Strategy, target: Strategy) -> bool:
    """Whether each rank of `target` holds what the same rank of `source` did.

    Optimizers have no state before their first step, so only what `target` names is compared.
    """
    if source is target:
        return True
    if source.world_size != target.world_size:
        return False
    return all(
        any(_alike(each, spec) for each in source.by_name[spec.name]) or _held_alone(source.by_name[spec.name], spec)
        for spec in target.tensors
        if spec.name in source.by_name and not spec.is_marker
    )


def _held_alone(old: Sequence[TensorSpec], new: TensorSpec) -> bool:
    """Whether each rank of `new` had its part for itself (see `assumptions`): the whole was its own part."""
    alone = {each.layout.ranks[0]: each.shape for each in old if each.layout.size == 1}
    return all(
        alone.get(rank) == new.layout.local_shape(new.shape, new.layout.shard_of(rank)) for rank in new.layout.ranks
    )


def _alike(old: TensorSpec, new: TensorSpec) -> bool:
    return old.shape == new.shape and (old.layout == new.layout or _equal_boxes(old, new))


def _equal_boxes(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two layouts of one shape mean the same, though they are spelled differently (a mesh of one dimension, or
    of two)."""
    a, b = one.layout, other.layout
    if sorted(a.ranks) != sorted(b.ranks):
        return False
    if not a.splitting and not b.splitting:
        return True
    return all(a.box(one.shape, a.shard_of(rank)) == b.box(one.shape, b.shard_of(rank)) for rank in a.ranks)
