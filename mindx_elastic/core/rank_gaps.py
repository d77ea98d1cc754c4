"""Ranks that are not there, of a world of any size, without a list of them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, overload

__all__ = ["RankGaps"]


class RankGaps(Sequence[int]):
    """The ranks from 0 to `world_size` - 1 that are not among `present`, ascending; reads like a tuple of them.

    A file of a few bytes can claim to be one of a million ranks: what this costs depends on `present` alone.
    """

    def __init__(self, world_size: int, present: Iterable[int]) -> None:
        self._ranges: list[range] = []
        self._ends: list[int] = []  # how many ranks lie in the ranges up to each
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
        if not isinstance(other, (tuple, list)) or len(self) != len(other):
            return NotImplemented if not isinstance(other, (tuple, list)) else False
        return all(one == each for one, each in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self._ranges))

    def __repr__(self) -> str:
        return f"RankGaps({self._ranges!r})"

    def __reduce__(self) -> Any:
        present = [rank for before, after in zip(self._ranges, self._ranges[1:], strict=False)
                   for rank in range(before.stop, after.start)]  # fmt: skip
        end = self._ranges[-1].stop if self._ranges else 0
        begin = range(self._ranges[0].start) if self._ranges else ()
        return RankGaps, (end, [*begin, *present])
