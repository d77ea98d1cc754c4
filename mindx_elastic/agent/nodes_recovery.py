"""Recoveries in place over several nodes, from an agent's side.

Every agent runs a `NodesRecovery` over the same board. The one that sees the death of a rank first writes the plan, the
others read it (`boards.PlanWatch`), look whether their own ranks can take part, and tell those. Each starts the new
processes of its own ranks.

A whole node that is lost, agent and ranks, restarts the job: its ranks are out of nobody's recovery, and with the first
node the workers' store is gone, and the board in it. `rendezvous.Membership` sees that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agent.boards import Boards, PlanWatch
from mindx_elastic.agent.endings import Meaning, describe, meaning
from mindx_elastic.agent.holder import keep_ring
from mindx_elastic.agent.record_keeper import RecordKeeper
from mindx_elastic.agent.recovery import ERRORS, Generation, News, Recovery
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import WorkerPhase
from mindx_elastic.rejoin.protocol import Phase

__all__ = ["NodesRecovery"]

_LONGEST = 300


class NodesRecovery(Recovery):
    """One per attempt of several nodes. Main thread."""

    def __init__(self, *arguments: Any, watch: PlanWatch, records: RecordKeeper | None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._watch, self._records = watch, records
        self._seen = 0
        """The last generation whose plan was read, or written."""
        self._home: Path | None = None
        """The checkpoint directory, once it is known."""

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._watch.wakeup.fd,)

    def prepare(self) -> None:
        pages = self._workers.statuses().values()
        self._home = next((Path(page.directory) for page in pages if page.directory), self._home)
        if not self._is_prepared and isinstance(self._board_of, Boards):
            self._is_prepared = True
            self._board_of.open()

    def close(self) -> None:
        super().close()
        if self.is_active:  # a stop: the others need not wait for this node
            self._call_off("a node has been stopped during the recovery")
        else:  # a node that stands still may begin one when it wakes up
            if self._machine.phase is Phase.FALLBACK:  # it may have begun that one, and the store did not answer then
                self._refuse_for_all(self._machine.generation, self._machine.reason)
            has_finished = {meaning(end) for end in self._workers.exits} == {Meaning.FINISHED}
            ranks = rank_list(list(self._workers.processes))
            reason = f"{ranks} of another node {'finished the training' if has_finished else 'ended'}"
            self._refuse_for_all(self._machine.generation + 1, reason)
        self._watch.stop()
        if isinstance(self._board_of, Boards):
            self._board_of.close()

    def why_not(self, ranks: Sequence[int], end: WorkerExit | None = None) -> str:
        if end is None and ranks:
            return "which rank the others wait for cannot be told over several nodes"
        if end is not None and end.status is not None and end.status.phase >= WorkerPhase.STOPPING:
            return f"rank {end.rank} has left its guard: {describe(end)}"
        return super().why_not(ranks, end)

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        generation = self._machine.generation + 1
        self._seen = max(self._seen, generation)
        begins = super().begin(end, cause, stuck_s=stuck_s)
        if not begins:  # another agent may have planned one at this very moment, and would wait
            self._refuse_for_all(generation, f"rank {end.rank} cannot be replaced")
        return begins

    def _refuse_for_all(self, generation: int, reason: str) -> None:
        """The recovery with this number comes to nothing, whoever begins it."""
        with suppress(*ERRORS):
            self._board_of(generation).write(f"{generation}/over", {"refusal": reason})

    # --- what another agent has begun ---------------------------------------------------------------------------------

    def hear_others(self, *, is_stopping: bool) -> list[News]:
        self._watch.wakeup.drain()
        news: list[News] = []
        generation = self._machine.generation + 1
        if not self.is_active and self._seen < generation <= self._watch.newest:
            try:
                news += self._hear_plan(generation, is_stopping=is_stopping)
                self._seen = generation
            except OSError as error:  # its host may only stand still: the plan counts, and is read at the next look
                logger.debug("the plan of recovery %d cannot be read yet: %s", generation, error)
            except ERRORS as error:
                self._seen = generation
                what = f"{type(error).__name__}: {error}"
                logger.warning("the plan of recovery %d cannot be used: %s", generation, what)
        return news

    def _hear_plan(self, generation: int, *, is_stopping: bool) -> list[News]:
        if self._machine.phase is not Phase.RUN:
            # For this node the last one has come to nothing, for others it has not.
            self._refuse_for_all(generation, self._machine.reason)
            return []
        board = self._board_of(generation)
        plan = board.read([f"{generation}/plan"])[f"{generation}/plan"]
        if "refusal" in plan:
            logger.info("no recovery in place: %s", _text(plan["refusal"]))
            return []
        rank, cause = int(plan["rank"]), _text(plan["cause"])
        if not 0 <= rank < self._machine.world_size or rank in self._workers.processes:
            raise ValueError(f"a plan for rank {rank}")
        reason = "the job is being stopped" if is_stopping else self.why_not([])
        self._tell()
        self._machine.begin([rank])
        self._board = board
        now = time.time()
        self._now = Generation(now, now, cause, time.monotonic() + self._timeout_s)
        if reason:
            self._call_off(reason)
            return [News()]
        logger.warning("rank %d of another node is gone; this node's ranks live on", rank)
        return [News(f"rank {rank} is gone", rank)]

    # --- a node is lost -----------------------------------------------------------------------------------------------

    has_other_nodes = True

    def keep_rings(self) -> None:
        done = []
        for rank in [] if self._records is None or self._home is None else self._records.ranks_kept:
            assert self._records is not None and self._home is not None
            try:
                if keep_ring(self._home, rank, self._records.records_of(rank)):
                    done.append(rank)
            except OSError as error:
                logger.warning("what this node has kept of rank %d cannot be brought to disk: %s", rank, error)
        if done:
            logger.info("random streams and buffers of %s are on disk, in case that a node is lost", rank_list(done))


def _text(value: object) -> str:
    return printable(str(value), _LONGEST)
