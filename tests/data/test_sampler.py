from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data as torch_data
from hypothesis import given, settings
from hypothesis import strategies as st

from mindx_elastic.data.adoption import Adoption
from mindx_elastic.data.position import Cursor
from mindx_elastic.data.sampler import EpochPlan, ResumableBatchSampler, rank_and_world_size

sizes = st.integers(0, 300)
batch_sizes = st.integers(1, 17)
worlds = st.integers(1, 9)


def positions(plan: EpochPlan, rank: int, first: int = 0) -> list[list[int]]:
    return [list(range(*plan.share(batch, rank))) for batch in range(first, plan.num_batches)]


def order_of(size: int, batch_size: int, world_size: int = 1, rank: int = 0) -> list[list[int]]:
    sampler = ResumableBatchSampler(
        range(size),
        Cursor(),
        batch_size=batch_size,
        shuffle=True,
        seed=5,
        drop_last=False,
        ranks=lambda: (rank, world_size),
    )
    return [indices for _, indices in sampler]


@given(size=sizes, batch_size=batch_sizes, world_size=worlds)
def test_every_sample_comes_exactly_once(size: int, batch_size: int, world_size: int) -> None:
    plan = EpochPlan(size, batch_size, world_size)
    ranks = [positions(plan, rank) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {plan.num_batches}
    assert plan.num_batches == -(-size // (batch_size * world_size))
    lengths = [len(batch) for batches in ranks for batch in batches]
    assert all(1 <= length <= batch_size for length in lengths)
    for step in zip(*ranks, strict=True):
        assert max(map(len, step)) - min(map(len, step)) <= 1
    seen = Counter(position for batches in ranks for batch in batches for position in batch)
    assert set(seen) == set(range(size + plan.padding))
    assert set(seen.values()) <= {1}
    assert plan.padding < world_size
    if batch_size > 1 and size >= world_size:
        assert plan.padding == 0


@given(size=sizes, batch_size=batch_sizes, old=worlds, new=worlds, data=st.data())
def test_other_ranks_can_finish_the_epoch(size: int, batch_size: int, old: int, new: int, data: st.DataObject) -> None:
    plan = EpochPlan(size, batch_size, old)
    done = data.draw(st.integers(0, plan.num_batches))
    before = [p for rank in range(old) for batch in positions(plan, rank)[:done] for p in batch]
    rest = EpochPlan(size, batch_size, new, start=plan.consumed(done))
    after = [p for rank in range(new) for batch in positions(rest, rank) for p in batch]
    assert {p for p in before + after if p < size} == set(range(size))
    assert sum(p < size for p in before + after) == size


@settings(max_examples=50)
@given(size=st.integers(1, 200), batch_size=batch_sizes, world_size=worlds)
def test_the_order_does_not_depend_on_the_number_of_ranks(size: int, batch_size: int, world_size: int) -> None:
    ranks = [order_of(size, batch_size, world_size, rank) for rank in range(world_size)]
    steps = [[index for part in step for index in part] for step in zip(*ranks, strict=True)]
    together = [index for step in steps for index in step]
    alone = [index for batch in order_of(size, batch_size) for index in batch]
    assert together[:size] == alone
    assert together[size:] == [alone[place % size] for place in range(size, len(together))]


def test_ranks_come_from_torch_when_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_and_world_size(None, None) == (0, 1)
    assert rank_and_world_size(2, 5) == (2, 5)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    assert rank_and_world_size(None, None) == (1, 3)
    assert rank_and_world_size(2, 5) == (2, 5)


@pytest.mark.parametrize("drop_last", [False, True])
@settings(deadline=None)
@given(size=st.integers(1, 90), batch_size=st.integers(1, 9), world_size=st.integers(1, 5))
def test_filled_rounds_give_every_rank_what_a_distributed_sampler_gives(
    drop_last: bool, size: int, batch_size: int, world_size: int
) -> None:
    data: Any = range(size)
    lengths = []
    for rank in range(world_size):
        stock: Any = torch_data.DistributedSampler(data, world_size, rank, shuffle=False, drop_last=False)
        lengths.append([len(batch) for batch in torch_data.BatchSampler(stock, batch_size, drop_last)])
    plan = EpochPlan(size, batch_size, world_size, drop_last, fill=True)
    shares = [[plan.share(batch, rank) for batch in range(plan.num_batches)] for rank in range(world_size)]
    assert [[end - begin for begin, end in share] for share in shares] == lengths
    visited = {position % size for share in shares for begin, end in share for position in range(begin, end)}
    assert drop_last or visited == set(range(size))


def test_an_adopted_loader_gives_every_rank_batches_of_the_same_size() -> None:
    """A loss over `all_gather` hangs or aborts otherwise."""
    sizes = []
    for rank in range(3):
        data = torch_data.TensorDataset(torch.arange(100))
        sampler: Any = torch_data.DistributedSampler(data, 3, rank, seed=1)
        loader = torch_data.DataLoader(data, 8, sampler=sampler)
        adoption = Adoption(loader)
        adoption.begin()
        sizes.append([len(batch[0]) for batch in loader])
        assert len(loader) == len(sizes[-1])
        adoption.end()
    assert sizes[0] == sizes[1] == sizes[2] == [8, 8, 8, 8, 2]
