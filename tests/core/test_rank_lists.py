"""Lists of ranks: in words, and the ranks that are missing from a world."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.core.rank_lists import RankGaps, rank_list, rank_ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ({4, 1}, "ranks 1, 4"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(20), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
        (RankGaps(1 << 60, [0, 2]), f"ranks 1, 3, 4, 5, 6, 7, 8, 9 and {(1 << 60) - 10} more"),
    ],
)
def test_a_list_of_ranks(ranks: Iterable[int], text: str) -> None:
    assert rank_list(ranks) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "0"),
        ([3, 1, 2], "1-3"),
        ([0, 1], "0, 1"),
        ([0, 2, 3, 4, 9], "0, 2-4, 9"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranges_of_ranks(ranks: Iterable[int], text: str) -> None:
    assert rank_ranges(ranks) == text


@given(st.integers(0, 40), st.sets(st.integers(-2, 42)), st.slices(50))
def test_gaps_read_like_a_tuple(world_size: int, present: set[int], part: slice) -> None:
    gaps, expected = RankGaps(world_size, present), tuple(rank for rank in range(world_size) if rank not in present)
    assert (tuple(gaps), len(gaps), gaps == expected) == (expected, len(expected), True)
    assert [gaps[i] for i in range(-len(expected), len(expected))] == [*expected, *expected]
    assert tuple(gaps[part]) == expected[part]
    assert [rank in gaps for rank in range(-1, 45)] == [rank in expected for rank in range(-1, 45)]
    again = copy.deepcopy(gaps)
    assert again == gaps and hash(again) == hash(gaps)
    with pytest.raises(IndexError):
        gaps[len(expected)]
