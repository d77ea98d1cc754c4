"""MindSpore's layout fields against a brute-force reading of them, and what they cannot say."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.core.layout import Box, Layout
from mindx_elastic.core.strategy import Strategy, TensorSpec
from mindx_elastic.errors import UsageError
from mindx_elastic.platforms.mindspore_layout import (
    Fields,
    fields_of,
    layout_of,
    stage_size_of,
)
from tests.start.strategies import layout_of as laid


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(n) for n in mesh)))


def read_by_hand(fields: Fields, shape: tuple[int, ...]) -> list[Box]:
    """The box of every rank, straight from what the fields mean; for even splits."""
    mesh = fields.dev_matrix
    maps = fields.tensor_map if len(fields.tensor_map) > 1 else tuple((k,) for k in fields.tensor_map[0])
    slices = []
    for rank in coordinates(mesh):
        box = []
        for size, names in zip(shape, maps, strict=False):
            start, length = 0, size
            for k in names:
                if k >= 0:
                    length //= mesh[len(mesh) - 1 - k]
                    start += length * rank[len(mesh) - 1 - k]
            box.append((start, start + length))
        slices.append(tuple(box))
    if not fields.opt_weight_shard_step or not fields.opt_weight_shard_size:
        return slices
    boxes: list[Box] = []
    for number, mine in enumerate(slices):
        same = [other for other, its in enumerate(slices) if its == mine]
        shards = len(same) if fields.opt_weight_shard_size == -1 else fields.opt_weight_shard_size
        part = same.index(number) % shards  # groups of neighbours among those that hold the same
        (start, stop), *rest = mine
        rows = (stop - start) // shards
        boxes.append(((start + part * rows, start + part * rows + rows), *rest))
    return boxes


def boxes_of(layout: Layout, shape: tuple[int, ...]) -> list[Box]:
    found = []
    for rank in layout.ranks:
        box = layout.box(shape, layout.shard_of(rank))
        found.append(box)
    return found


@st.composite
def some_fields(draw: st.DrawFn) -> Fields:
    mesh = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    free = list(draw(st.permutations(range(len(mesh)))))
    maps: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, min(2, len(free))))
        maps.append(tuple(free.pop() for _ in range(count)) or (-1,))
    used = {len(mesh) - 1 - k for each in maps for k in each if k >= 0}
    replicas = [n for m, n in enumerate(mesh) if m not in used]
    nested = any(len(each) > 1 for each in maps)
    tensor_map = (*maps, ()) if nested and len(maps) == 1 else tuple(maps) if nested else (tuple(k for (k,) in maps),)
    step = size = 0
    if draw(st.booleans()) and math.prod(replicas) > 1:
        size = draw(st.sampled_from([-1, math.prod(replicas)]))
        strides = [math.prod(mesh[m + 1 :]) * (mesh[m] - 1) for m in range(len(mesh)) if m not in used]
        step = sum(strides) // (math.prod(replicas) - 1)
    return Fields(mesh, tensor_map, opt_weight_shard_step=step, opt_weight_shard_size=size)


@settings(max_examples=200, deadline=None)
@given(some_fields(), st.integers(0, 3))
def test_a_layout_means_what_the_fields_mean_and_goes_back_to_them(fields: Fields, stage: int) -> None:
    num_dims = len([each for each in fields.tensor_map if each]) if len(fields.tensor_map) > 1 else 0
    shape = (fields.num_ranks**2,) * (num_dims or len(fields.tensor_map[0]))
    layout = layout_of(fields, stage * fields.num_ranks)
    assert boxes_of(layout, shape) == read_by_hand(fields, shape)
    again = fields_of(TensorSpec("w", shape, layout), fields.num_ranks)
    assert again is not None
    assert read_by_hand(again, shape) == read_by_hand(fields, shape)
    assert boxes_of(layout_of(again, 0), shape) == boxes_of(layout, shape)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (Fields((2, 0), ((0,),)), "dev_matrix [2, 0]"),
        (Fields((2, 2), ((1,), (0, 1))), "does not fit dev_matrix"),
        (Fields((2,), ((0,),), opt_weight_shard_step=1, opt_weight_shard_size=2), "1 replicas"),
        (Fields((4, 2), ((0,),), opt_weight_shard_step=1, opt_weight_shard_size=4), "2 apart"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: Fields, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        layout_of(fields, 0)


def test_optimizer_shards_over_some_of_the_dimensions_are_read() -> None:
    """As version 0.1 wrote them; now such layouts are nested maps."""
    fields = Fields((2, 2, 2, 2), ((0, -1),), opt_weight_shard_step=2, opt_weight_shard_size=4)
    assert layout_of(fields, 0) == laid((2, 2, 2, 2), "R", "_S(0,2)", "_S(0,2)", "S(0)")


def test_the_stage_is_the_mesh_of_most_tensors() -> None:
    stages = [laid((4,), "S(0)", ranks=range(4 * s, 4 * s + 4)) for s in range(2)]
    specs = [TensorSpec(f"w{s}", (8,), layout) for s, layout in enumerate(stages)]
    assert stage_size_of(Strategy(8, tuple(specs))) == 4
    everywhere = TensorSpec("step", (), laid((8,), "R"))
    assert stage_size_of(Strategy(8, (*specs, everywhere))) == 4
    assert stage_size_of(Strategy(8, (everywhere,))) == 8
    assert stage_size_of(Strategy(3, ())) == 3


@pytest.mark.parametrize("step", [2, 4])
def test_an_optimizer_is_shared_by_a_part_of_the_replicas_that_are_so_far_apart(step: int) -> None:
    layout = layout_of(Fields((4, 2), ((0,),), opt_weight_shard_step=step, opt_weight_shard_size=2), 0)
    boxes = dict(zip(layout.ranks, boxes_of(layout, (16,)), strict=True))
    for first in (0, 6 - step):  # 0 and 4, where 2 are apart; 0 and 2, where 4 are
        assert (boxes[first], boxes[first + step]) == (((0, 4),), ((4, 8),))
