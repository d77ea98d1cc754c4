"""Lists of ranks: in words for messages, and the ranks that are missing from a world of any size. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import overload

from mindx_elastic.core.printable import listed

__all__ = ["RankGaps", "rank_list", "rank_ranges"]

_MAX_SHOWN = 8


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more``."""
    shown = ranks if isinstance(ranks, RankGaps) else sorted(ranks)
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


class RankGaps(Sequence[int]):
    """The ranks from 0 to `world_size` - 1 that are not among `present`, ascending; reads like a tuple of them.

    A file of a few bytes can claim to be one of a million ranks: what this costs depends on `present` alone.
    """

    def __init__(self, world_size: int, present: Iterable[int]) -> None:
        self._ranges: list[range] = []
        self._ends: list[int] = []  # how many ranks the ranges up to each have
        begin = count = 0
        for rank in chain(sorted({rank for rank in present if 0 <= rank < world_size}), (world_size,)):
            if rank > begin:
                count += rank - begin
                self._ranges.append(range(begin, rank))
                self._ends.append(count)
            begin = rank + 1

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._ranges)

    def __contains__(self, rank: object) -> bool:
        return any(rank in each for each in self._ranges)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return tuple(islice(self, start, stop, step)) if step > 0 else tuple(self)[index]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, place)
        return self._ranges[number][place - (self._ends[number - 1] if number else 0)]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankGaps):
            return self._ranges == other._ranges
        if isinstance(other, (tuple, list)):
            return len(self) == len(other) and all(one == each for one, each in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._ranges))

    def __repr__(self) -> str:
        return f"RankGaps({self._ranges!r})"
