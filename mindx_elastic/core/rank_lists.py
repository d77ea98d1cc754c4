"""Lists of ranks: in words for messages, and the ranks that are missing from a world. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mindx_elastic.core.printable import listed

__all__ = ["missing_ranks", "rank_list", "rank_ranges"]

_MAX_SHOWN = 8


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more``."""
    shown = sorted(ranks)
    return f"rank{'s' * (len(shown) > 1)} {listed(shown, _MAX_SHOWN)}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """``0-5, 7``; of very scattered ranks the first ranges and how many ranks are left out."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs[:_MAX_SHOWN]]
    more = sum(b - a + 1 for a, b in runs[_MAX_SHOWN:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def missing_ranks(world_size: int, present: Iterable[int]) -> list[int]:
    """The ranks of a world that are not among `present`, ascending."""
    there = set(present)
    return [rank for rank in range(world_size) if rank not in there]
