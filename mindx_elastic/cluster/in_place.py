"""Recovery in place in a dynamic cluster: `rejoin`'s protocol, with the scheduler in place of the agent.

The survivors come out of the training and tell the scheduler that they are ready for the next generation. The dead
worker is started again by hand and registers. Then the group of that generation is formed: it has a store of its own,
which carries the board. Its ranks read from the group itself who is new, so nobody has to note the deaths.

A recovery that comes to nothing ends as without it: the survivors save, begin anew in place, and all meet in the
generation after it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from mindx_elastic.cluster.connection import NoSchedulerError, SchedulerConnection
from mindx_elastic.cluster.group import export_group
from mindx_elastic.cluster.messages import Group
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.rejoin import groups
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.copies import Receive
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.groups import DdpModules
from mindx_elastic.rejoin.host import Host
from mindx_elastic.rejoin.member import Entry, Member
from mindx_elastic.rejoin.protocol import Verdict
from mindx_elastic.rejoin.record import BY_HAND, IN_PLACE, RESTART, RecoveryRecord, StandIn, as_event, stages_of

__all__ = ["ClusterMember", "cluster_problem"]

_LOOK_S = 0.5
_CONNECT, _ANSWER = timedelta(seconds=5), timedelta(minutes=5)
_LEAST_TIMEOUT_S = 120.0
"""The new process runs its program up to the guard meanwhile, and nothing was started beforehand."""


class ClusterMember(Member):
    """A worker's part in recoveries in place."""

    def __init__(self, settings: RejoinSettings, ranks: RankInfo, connection: SchedulerConnection) -> None:
        assert connection.group is not None
        super().__init__(settings, ranks, AgentInfo(folder=Path(), attempt=connection.group.attempt))
        self._scheduler, self._group = connection, connection.group
        self.generation = connection.group.generation
        self.is_joiner = 0 < len(connection.group.new) < connection.group.size
        self._timeout_s = max(self._timeout_s, _LEAST_TIMEOUT_S)
        self.page = StatusPage()
        self._shares_orders = False  # there are no spares
        self._meets_first = True
        self.events: EventLog | None = None
        """Of the guard that is open."""
        self._heard_rank = -1
        """Whose death was heard last."""
        self._untold: Verdict | None = None
        """Of the recovery that has succeeded, until every rank has done a step; only on the donor."""

    def hear_death(self, rank: int) -> None:
        self._heard_rank = rank
        super().hear_death(rank)

    def leave(self) -> Entry:
        self._tell(trains=False)
        try:
            entry = super().leave()
        except RejoinFailed as error:
            self._tell_of_failure(str(error))
            raise
        if self.ranks.rank == entry.verdict.donor:
            self._untold = entry.verdict
        return entry

    def at_boundary(self) -> None:
        super().at_boundary()
        self._tell(trains=True)  # the gradients of all ranks are in this step

    def entered(self) -> None:
        self._times["pid"] = os.getpid()
        super().entered()

    def closed(self) -> None:
        super().closed()
        self._tell(trains=False)
        self.events = None

    def _agree(self, board: Board, host: Host, generation: int) -> Entry:
        self._enter_group(self._next_group(host, generation))
        board = self._board(generation)
        self._note_new(board, generation)
        return super()._agree(board, host, generation)

    def join(self, ddp: DdpModules, end_setup: Callable[[], None], receive: Receive) -> Entry:
        self._note_new(self._board(self.generation), self.generation)
        return super().join(ddp, end_setup, receive)

    def _why_over(self) -> str:
        return f"{self._scheduler.last_death}, during the recovery" if self._scheduler.deaths else ""

    def opened(self, host: Host) -> None:
        super().opened(host)
        for rank in self._scheduler.deaths:  # while the guard was being entered
            host.call_soon(0.0, lambda rank=rank: self.hear_death(rank))  # type: ignore[misc]

    def refuse(self, generation: int, reason: str) -> None:
        if generation == self._group.generation:
            super().refuse(generation, reason)

    def _tell(self, *, trains: bool) -> None:
        """Donor: write what the last recovery was, once. `trains`: all ranks have done a step since."""
        verdict, self._untold = self._untold, None
        if verdict is None or self.events is None:
            return
        notes = {self.ranks.rank: dict(self._times)}
        if trains:
            try:
                keys = {f"{self.generation}/ready/{rank}": rank for rank in range(self.ranks.world_size)}
                found = self._board(self.generation).read(list(keys)).items()
                notes |= {keys[key]: note for key, note in found}
            except Exception as error:  # the store's host has died
                logger.debug("the stages of the other ranks are not known: %s", error)
        heard = float(self._times.get("heard", time.time()))
        began, stages = stages_of(list(notes.values()), heard, heard)
        took = time.time() - began
        record = RecoveryRecord(
            generation=self.generation,
            outcome=IN_PLACE,
            cause=self._scheduler.last_death,
            ranks=verdict.dead,
            stood_in=tuple(
                StandIn(rank=rank, pid=int(notes[rank]["pid"]), by=BY_HAND)
                for rank in verdict.dead
                if "pid" in notes.get(rank, {})
            ),
            behind=verdict.behind,
            donor=verdict.donor,
            step=verdict.step,
            steps_lost=verdict.steps_lost,
            stages={**stages, **({"first_step": round(took, 4)} if trains else {})},
            duration_s=took,
        )
        self._emit(record)

    def _tell_of_failure(self, reason: str) -> None:
        """Each survivor writes it; `agent.run_log` takes the first."""
        began = float(self._times.get("heard", time.time()))
        self._emit(
            RecoveryRecord(
                generation=self.generation + 1,
                outcome=RESTART,
                cause=self._scheduler.last_death,
                reason=reason,
                ranks=tuple(sorted(self._scheduler.deaths)),
                duration_s=time.time() - began,
            )
        )

    def _emit(self, record: RecoveryRecord) -> None:
        if self.events is not None:
            facts: dict[str, Any] = {"attempt": self._group.attempt, "pid": os.getpid(), "host": socket.gethostname()}
            self.events.emit("rejoin", **as_event(record), cluster=self._scheduler.job, **facts)

    def _next_group(self, host: Host, generation: int) -> Group:
        """Wait until every rank has a process again."""
        is_said = False
        while True:
            try:
                group = self._scheduler.wait_for(generation, _LOOK_S)
            except NoSchedulerError as error:
                raise RejoinFailed(str(error)) from None
            except TimeoutError:
                if host.is_stopping():
                    raise RejoinFailed("the job is being stopped") from None
                if self._scheduler.is_alone and not self._scheduler.broken and not is_said:
                    is_said = True
                    self._say_that_it_waits()
                continue
            if group.generation != generation:
                raise RejoinFailed(f"the group is at generation {group.generation}, and this rank at {generation}")
            return group

    def _say_that_it_waits(self) -> None:
        """A death of which no scheduler tells."""
        logger.warning(
            "rank %d is gone, and no scheduler is there; this process waits up to %g s (MS_TOPO_TIMEOUT) for one at %s "
            "and for that rank: start both again with the same variables, the scheduler with MS_NODE_ID=sched",
            self._heard_rank,
            self._scheduler.settings.formation_s,
            self._scheduler.place,
        )

    def _enter_group(self, group: Group) -> None:
        """The store of the group before may have died with its host."""
        import torch.distributed as dist

        self._group, self._store = group, None
        groups.set_default_store(dist.PrefixStore(f"mindx-cluster/{group.generation}", self._scheduler.store_of(group)))
        export_group(self._scheduler, group)

    def _note_new(self, board: Board, generation: int) -> None:
        """What the agent notes elsewhere. All ranks write the same, and the first one counts."""
        for rank in self._group.new:
            board.write(f"{generation}/out/{rank}", {"dead": True})
        board.write(f"{generation}/plan", {"generation": generation})

    def prepare(self) -> None:
        """The store of the next recovery is another one."""

    def _board(self, generation: int) -> Board:
        """The board of a generation whose group is not formed yet is only a word: the store before may be gone."""
        scope = f"{self._scheduler.job}/{generation}"
        store = self._connection() if generation == self._group.generation else None
        return Board(store, key=board_key(), scope=scope, writer=self.ranks.rank)  # type: ignore[arg-type]

    def _connection(self) -> Any:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.PrefixStore("mindx/rejoin", self._reach())
        return self._store

    def _reach(self) -> Any:
        """The store of the group. torch tries for minutes to reach one whose host is gone, and no death ends that."""
        import torch.distributed as dist

        host, port, end = self._group.host, self._group.port, time.monotonic() + self._timeout_s
        while True:
            if said := self._why_over():
                raise RejoinFailed(said)
            try:
                found = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                continue
            found.set_timeout(_ANSWER)
            return found


def cluster_problem(connection: SchedulerConnection) -> str:
    """Why deaths are not recovered in place; empty: they are."""
    if not connection.settings.recovery:
        return "MS_ENABLE_RECOVERY=1 is not set"
    if connection.group is None or connection.group.local_size != connection.group.size:
        return "the workers are on several machines"
    return ""
