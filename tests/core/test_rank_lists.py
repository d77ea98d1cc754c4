"""Lists of ranks: in words, and the ranks that are missing from a world."""

from __future__ import annotations

from mindx_elastic.core.rank_lists import missing_ranks, rank_list, rank_ranges


def test_a_list_of_ranks() -> None:
    assert [rank_list(ranks) for ranks in ([3], {4, 1})] == ["rank 3", "ranks 1, 4"]
    assert rank_list(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_ranges_of_ranks() -> None:
    assert rank_ranges([3, 0, 2, 9, 4, 11, 12]) == "0, 2-4, 9, 11, 12"
    assert rank_ranges([*range(0, 40, 2), 39]) == "0, 2, 4, 6, 8, 10, 12, 14 and 13 more"


def test_missing_ranks() -> None:
    assert missing_ranks(5, [3, 0, 7]) == [1, 2, 4]
