"""Fewer ranks in the place of all: they hand out the same batches, and their windows end at the same samples."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mindx_elastic.config import ShrinkSettings
from mindx_elastic.data import ResumableLoader
from mindx_elastic.data.sampler import EpochPlan, window_of
from mindx_elastic.errors import UsageError


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 5),
    shares=st.integers(2, 8),
    present=st.integers(1, 8),
    window=st.integers(1, 4),
    drop_last=st.booleans(),
    fill=st.booleans(),
)
def test_the_samples_of_each_update_stay(
    size: int, batch: int, shares: int, present: int, window: int, drop_last: bool, fill: bool
) -> None:
    assume(present <= shares)
    whole = EpochPlan(size, batch, shares, drop_last, fill=fill)
    fewer = EpochPlan(size, batch, shares, drop_last, present=present, fill=fill)

    def samples(plan: EpochPlan) -> list[int]:
        found = [plan.share(number, rank) for number in range(plan.num_batches) for rank in range(plan.num_ranks)]
        assert all(begin < end for begin, end in found)
        assert max((end - begin for begin, end in found), default=0) <= max(2, batch)
        return sorted(at for begin, end in found for at in range(begin, end))

    assert samples(fewer) == samples(whole)
    if shares * window % present:
        return
    longer = shares * window // present

    def ends(plan: EpochPlan, length: int) -> list[int]:
        return [plan.consumed(min(n, plan.num_batches)) for n in range(0, plan.num_batches + length, length)]

    assert list(dict.fromkeys(ends(fewer, longer))) == list(dict.fromkeys(ends(whole, window)))
    for number in range(0, fewer.num_batches, longer):
        assert fewer.batches_until(fewer.consumed(number)) == number
    if shares % present == 0:  # each batch is one of all ranks
        parts = [whole.share(number, rank) for number in range(whole.num_batches) for rank in range(shares)]
        assert parts == [fewer.share(number, rank) for number in range(fewer.num_batches) for rank in range(present)]


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ShrinkSettings.from_env({"MINDX_FULL_WORLD_SIZE": "4", "MINDX_PLACES": "0,2,3"})
    assert (settings.shares(3), settings.shares(4), settings.places) == (4, 4, (0, 2, 3))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert window_of(3, 2) == 3
    monkeypatch.setenv("MINDX_FULL_WORLD_SIZE", "3")
    assert window_of(2, 2) == 3
    with pytest.raises(UsageError, match="3 batches of an update of 3 ranks cannot be shared out evenly among 2"):
        window_of(1, 2)


def test_a_position_of_all_ranks_is_one_of_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(rank: int, size: int) -> ResumableLoader:
        return ResumableLoader(list(range(50)), batch_size=3, shuffle=True, seed=1, rank=rank, world_size=size)

    monkeypatch.setenv("WORLD_SIZE", "4")
    whole = [loader(rank, 4) for rank in range(4)]
    iterators = [iter(each) for each in whole]
    assert len([next(each) for each in iterators for _ in range(2)]) == 8
    expected = [batch.tolist() for each in iterators for batch in each]
    state = dict(loader(0, 4).state_dict(), batch=2, samples=24)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MINDX_FULL_WORLD_SIZE", "4")
    found: list[list[int]] = []
    for rank in range(2):
        fewer = loader(rank, 2)
        fewer.load_state_dict(state)
        assert fewer.state_dict()["batch"] == 4
        found += [batch.tolist() for batch in fewer]
    assert sorted(found) == sorted(expected)


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 5),
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=2, max_size=4),
    drop_last=st.booleans(),
)
def test_the_last_batch_of_an_epoch_has_the_number_that_the_length_says(
    size: int, batch: int, parts: list[tuple[int, int]], drop_last: bool
) -> None:
    """A loop by hand ends its accumulation window there, also where the epoch goes on with other ranks."""
    state = None
    for world_size, taken in parts:
        loader = ResumableLoader(
            range(size), batch, shuffle=True, seed=1, drop_last=drop_last, rank=0, world_size=world_size
        )
        whole = len(loader)
        if state is not None:
            loader.load_state_dict(state)
        number = loader.state_dict()["batch"]
        for _ in zip(range(taken), loader, strict=False):
            number += 1
            assert number <= len(loader) and loader.is_last == (number == len(loader))
        state = loader.state_dict()
        if state["finished"]:
            assert len(loader) == whole  # of the next epoch
            break
