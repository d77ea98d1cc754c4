"""Recovery in place in a dynamic cluster: `rejoin`'s protocol, with the scheduler in place of the agent.

The survivors come out of the training and tell the scheduler that they are ready for the next generation. The dead
worker is started again by hand and registers. Then the group of that generation is formed: it has a store of its own,
which carries the board. Its ranks read from the group itself who is new, so nobody has to note the deaths.

A recovery that comes to nothing ends as without it: the survivors save, begin anew in place, and all meet in the
generation after it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindx_elastic.cluster.group import export_group
from mindx_elastic.cluster.member import Group
from mindx_elastic.cluster.member import Member as Link
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.rejoin import groups
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.groups import DdpModules
from mindx_elastic.rejoin.member import Entry, Host, Member, RejoinFailed

__all__ = ["ClusterMember", "cluster_problem"]

_LOOK_S = 0.5
_LEAST_TIMEOUT_S = 120.0
"""The new process runs its program up to the guard meanwhile, and nothing was started beforehand."""


class _NoPage:
    """In place of an agent's status page."""

    def set(self, **fields: object) -> None:
        pass

    def set_text(self, name: str, text: str) -> None:
        pass


class ClusterMember(Member):
    """A worker's part in recoveries in place."""

    def __init__(self, settings: RejoinSettings, ranks: RankInfo, link: Link) -> None:
        assert link.group is not None
        super().__init__(settings, ranks, AgentInfo(folder=Path(), attempt=link.group.attempt))
        self._link, self._group = link, link.group
        self.generation = link.group.generation
        self.is_joiner = 0 < len(link.group.new) < link.group.size
        self._timeout_s = max(self._timeout_s, _LEAST_TIMEOUT_S)
        self.page = _NoPage()

    def _agree(self, board: Board, host: Host, generation: int) -> Entry:
        self._enter_group(self._next_group(host, generation))
        board = self._board(generation)
        self._note_new(board, generation)
        return super()._agree(board, host, generation)

    def join(self, ddp: DdpModules, end_setup: Callable[[], None]) -> Entry:
        self._note_new(self._board(self.generation), self.generation)
        return super().join(ddp, end_setup)

    def opened(self, host: Host) -> None:
        super().opened(host)
        for rank in self._link.deaths:  # while the guard was being entered
            host.call_soon(0.0, lambda rank=rank: self.hear_death(rank))  # type: ignore[misc]

    def refuse(self, generation: int, reason: str) -> None:
        if generation == self._group.generation:
            super().refuse(generation, reason)

    def _next_group(self, host: Host, generation: int) -> Group:
        """Wait until every rank has a process again."""
        while True:
            try:
                group = self._link.wait_for(generation, _LOOK_S)
            except TimeoutError:
                if host.is_stopping():
                    raise RejoinFailed("the job is being stopped") from None
                continue
            if group.generation != generation:
                raise RejoinFailed(f"the group is at generation {group.generation}, and this rank at {generation}")
            return group

    def _enter_group(self, group: Group) -> None:
        """The store of the group before may have died with its host."""
        import torch.distributed as dist

        self._group, self._store = group, None
        groups.set_default_store(dist.PrefixStore(f"mindx-cluster/{group.generation}", self._link.store_of(group)))
        export_group(self._link, group)

    def _note_new(self, board: Board, generation: int) -> None:
        """What the agent notes elsewhere. All ranks write the same, and the first one counts."""
        for rank in self._group.new:
            board.write(f"{generation}/out/{rank}", {"dead": True})
        board.write(f"{generation}/plan", {"generation": generation})

    def prepare(self) -> None:
        """The store of the next recovery is another one."""

    def _board(self, generation: int) -> Board:
        """The board of a generation whose group is not formed yet is only a word: the store before may be gone."""
        scope = f"{self._link.job}/{generation}"
        store = self._connection() if generation == self._group.generation else None
        return Board(store, key=board_key(), scope=scope, writer=self.ranks.rank)  # type: ignore[arg-type]

    def _connection(self) -> Any:
        import torch.distributed as dist

        if self._store is None:
            own = dist.TCPStore(self._group.host, self._group.port, is_master=False, wait_for_workers=False)
            self._store = dist.PrefixStore("mindx/rejoin", own)
        return self._store


def cluster_problem(link: Link) -> str:
    """Why deaths are not recovered in place; empty: they are."""
    if not link.settings.recovery:
        return "MS_ENABLE_RECOVERY=1 is not set"
    if link.group is None or link.group.local_size != link.group.size:
        return "the workers are on several machines"
    return ""
