"""Layouts against torch's own arithmetic, against what FSDP2 really holds, and against counting."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, _utils, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mindx_elastic.core.layout import REPLICATE, Box, Layout, Placement, overlap, parse_placement
from mindx_elastic.errors import UsageError
from tests.start.strategies import draw_placements, layout_of

asks_torch = pytest.mark.skipif(
    not hasattr(_utils, "_compute_local_shape_and_global_offset"), reason="torch 2.6 does not say it without a mesh"
)


@st.composite
def layouts(draw: st.DrawFn, *, strided: bool = True) -> tuple[tuple[int, ...], Layout]:
    """A shape and a layout of it."""
    shape = tuple(draw(st.lists(st.integers(0 if strided else 1, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    if strided:
        placements = draw_placements(draw, mesh, len(shape))
    else:
        dims = st.sampled_from([None, *range(len(shape))])
        placements = tuple(REPLICATE if dim is None else Placement(dim) for dim in [draw(dims) for _ in mesh])
    first = draw(st.integers(0, 3))
    ranks = draw(st.permutations(range(first, first + math.prod(mesh)))) if draw(st.booleans()) else ()
    names = tuple(f"dim {i}" for i in range(len(mesh))) if draw(st.booleans()) else ()
    return shape, Layout(mesh, placements, ranks, names)


@asks_torch
@settings(max_examples=100, deadline=None)
@given(layouts(strided=False))
def test_shards_and_replicas_are_where_torch_has_them(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    theirs = [TorchReplicate() if p.dim is None else TorchShard(p.dim) for p in layout.placements]
    for rank, at in zip(layout.ranks, itertools.product(*map(range, layout.mesh_shape)), strict=True):
        local, offset = _utils._compute_local_shape_and_global_offset(shape, layout.mesh_shape, list(at), theirs)
        shard = layout.shard_of(rank)
        assert layout.local_shape(shape, shard) == local
        if math.prod(local):
            assert tuple(start for start, _ in layout.box(shape, shard)) == offset


@pytest.fixture
def _no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@asks_torch
@pytest.mark.usefixtures("_no_process_group")
@pytest.mark.parametrize(("rows", "dp", "tp"), [(9, 4, 2), (7, 2, 3), (3, 2, 2)])
def test_what_fsdp2_really_holds_around_tensor_parallel(rows: int, dp: int, tp: int) -> None:
    for rank in range(dp * tp):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dp * tp)
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        module = torch.nn.Linear(1, rows, bias=False)
        rows_of = torch.arange(float(rows)).reshape(rows, 1)
        module.weight = torch.nn.Parameter(
            distribute_tensor(rows_of, mesh["tp"], [TorchShard(0)], src_data_rank=None)  # None: no communication
        )
        fully_shard(module, mesh=mesh["dp"])
        weight = module.weight
        assert isinstance(weight, DTensor)
        layout = Layout((dp, tp), tuple(map(parse_placement, weight.placements)))
        assert str(layout.placements[0]) == f"_S(0,{tp})"
        (interval, _) = layout.box((rows, 1), layout.shard_of(rank))
        assert list(range(*interval)) == weight.to_local().flatten().int().tolist()
        dist.destroy_process_group()


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_each_element_is_in_one_shard_also_after_json(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    counts = np.zeros(shape, dtype=np.int64)
    for shard in range(layout.num_shards):
        box = layout.box(shape, shard)
        counts[tuple(slice(*interval) for interval in box)] += 1
        assert layout.local_shape(shape, shard) == tuple(stop - start for start, stop in box)
    assert (counts == 1).all()
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and again.mesh_dim_names == layout.mesh_dim_names and again.holders == layout.holders
    same = Layout(layout.mesh_shape, layout.placements, list(layout.ranks))
    assert same == layout and hash(same) == hash(layout)


def test_holders_are_the_ranks_that_hold_the_same_ascending() -> None:
    layout = layout_of((2, 2), "R", "S(0)", ranks=(7, 3, 5, 1))
    assert layout.holders == [[5, 7], [1, 3]]
    assert [layout.shard_of(rank) for rank in (7, 3, 5, 1)] == [0, 1, 0, 1]
    assert 3 in layout and 2 not in layout
    with pytest.raises(KeyError):
        layout.shard_of(2)


def test_the_whole_shape_follows_from_equal_shards() -> None:
    assert layout_of((2, 3), "S(0)", "S(1)").global_shape((4, 5)) == (8, 15)
    assert layout_of((2, 3), "R", "S(0)").global_shape((4, 5)) == (12, 5)
    with pytest.raises(UsageError, match="dimension 1"):
        layout_of((2,), "S(1)").global_shape((4,))


def test_a_split_that_the_tensor_or_the_mesh_does_not_have_is_named() -> None:
    with pytest.raises(UsageError, match=r"splits .*dimension.* of shape \[4\]"):
        layout_of((2,), "S(1)").box((4,), 0)
    with pytest.raises(UsageError, match="no shard 2"):
        layout_of((2,), "S(0)").box((4,), 2)
    for placements in (("_S(0,3)",), ("_S(0,2)", "S(1)"), ("S(0)", "_S(0,2)")):
        with pytest.raises(UsageError, match="no other splits of dimension 0"):
            layout_of((2, 3)[: len(placements)], *placements)


boxes_of_two = st.tuples(*[st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda p: (min(p), max(p)))] * 2)


@settings(max_examples=100, deadline=None)
@given(boxes_of_two, boxes_of_two)
def test_overlap_counts_as_cells_do(one: Box, other: Box) -> None:
    def cells(box: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(*interval) for interval in box)))

    common = overlap(one, other)
    assert cells(one) & cells(other) == (cells(common) if common else set())


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("S(0)", Placement(0)),
        ("Shard(dim=1)", Placement(1)),
        ("_S(0, 2)", Placement(0, 2)),
        (Placement(3, 2), Placement(3, 2)),
        (TorchReplicate(), REPLICATE),
        (_StridedShard(1, split_factor=2), Placement(1, 2)),
    ],
    ids=str,
)
def test_placements_are_understood_in_every_spelling(spelling: Any, expected: Placement) -> None:
    assert parse_placement(spelling) == expected
    assert parse_placement(str(expected)) == expected


@pytest.mark.parametrize(
    "value",
    [*("", "S()", "S(-1)", "S(0", "_S(0,)", "R(0)", "S(0)S(1)"), *(3, None, TorchPartial(), "S(" + "9" * 5000 + ")")],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_placement_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError):
        Layout((2,), (parse_placement(value),))
