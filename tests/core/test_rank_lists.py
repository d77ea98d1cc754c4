"""Lists of ranks: in words, and the ranks that are missing from a world."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mindx_elastic.core.rank_lists import missing_ranks, rank_list, rank_ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ({4, 1}, "ranks 1, 4"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(20), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
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


def test_missing_ranks() -> None:
    assert missing_ranks(5, [3, 0, 7]) == [1, 2, 4]
