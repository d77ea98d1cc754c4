"""Which ranks the others wait for, for long enough to say so. Pure: times are passed in. One thread.

`core.pace` says which rank is one that the others wait for. Where there are several nodes, each agent sends what it
knows of its ranks with its heartbeats, and the table of the nodes compares all.
"""

from __future__ import annotations

from collections.abc import Iterable

from mindx_elastic.core.pace import SlowRank

__all__ = ["SlowWatch"]

_BEGINS_S = 5.0  # 64 steps may be short
_ENDS_S = 60.0  # one that is just slow enough would come and go all the time


class SlowWatch:
    """`look` again and again."""

    def __init__(self) -> None:
        self.named: dict[int, SlowRank] = {}
        """By rank: those that have been slow for some seconds all the time, until they have not been for a minute."""
        self._since: dict[int, float] = {}
        """Since when a verdict has been as it is, of ranks of which it is not what `named` says."""

    def look(self, slow: Iterable[SlowRank], now: float) -> tuple[list[SlowRank], list[SlowRank]]:
        """`slow`: who is it now. The ranks that are named from now on, and those that are no longer."""
        found = {each.rank: each for each in slow}
        changed = found.keys() ^ self.named.keys()
        self._since = {rank: self._since.get(rank, now) for rank in changed}
        due = {r for r, since in self._since.items() if now - since >= (_ENDS_S if r in self.named else _BEGINS_S)}
        self._since = {rank: since for rank, since in self._since.items() if rank not in due}
        begun = [found[rank] for rank in found if rank in due]
        over = [self.named.pop(rank) for rank in due - found.keys()]
        self.named |= {rank: found[rank] for rank in found if rank in due or rank in self.named}
        return begun, over

    def reset(self) -> None:
        """A new attempt begins."""
        self.named, self._since = {}, {}
