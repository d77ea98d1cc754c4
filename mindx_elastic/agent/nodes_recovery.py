"""Recoveries in place over several nodes, from an agent's side.

Every agent runs a `NodesRecovery` over the same board. The one that sees the death of a rank first writes the plan, the
others read it (`boards.PlanWatch`), look whether their own ranks can take part, and tell those. Each starts the new
processes of its own ranks.

A whole node that is lost, agent and ranks, ends all of that: the job is restarted. The first node's agent decides that
another one is lost (`failure_detector`), and says so on the board. The loss of the first node each other agent sees by
itself; the workers' store, with the board in it, is gone then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agent.boards import Boards, PlanWatch
from mindx_elastic.agent.endings import Meaning, describe, meaning
from mindx_elastic.agent.failure_detector import SILENCE_S, Lost
from mindx_elastic.agent.holder import keep_ring
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.pausing import is_between_steps
from mindx_elastic.agent.recovery import ERRORS, Generation, News, Recovery
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import WorkerPhase
from mindx_elastic.rejoin.protocol import Phase
from mindx_elastic.rejoin.small_records import FIRST

__all__ = ["NodesRecovery"]

_LONGEST = 300


class NodesRecovery(Recovery):
    """One per attempt of several nodes. Main thread."""

    def __init__(self, *arguments: Any, watch: PlanWatch, nodes: NodeWatch, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._watch, self._nodes = watch, nodes
        self._seen = 0
        """The last generation whose plan was read, or written."""
        self._home: Path | None = None
        """The checkpoint directory, once a node is lost."""

    @property
    def fds(self) -> tuple[int, ...]:
        more = (self._nodes.server, self._nodes.heartbeat)
        return self._watch.wakeup.fd, *(each.wakeup.fd for each in more if each is not None)

    def prepare(self) -> None:
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
        if not self._has_finished:
            self._keep_rings()

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
        self._nodes.drain()
        news = [] if is_stopping else list(filter(None, map(self._hear_lost, self._nodes.lost_now())))
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
        if "node" in plan:
            return [] if is_stopping else [News(_text(plan["refusal"]))]
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

    @property
    def has_lost_node(self) -> bool:
        return bool(self._nodes.lost)

    def _hear_lost(self, lost: Lost) -> News | None:
        """A node gives no sign of life. One that is silent may only have an agent that stands still."""
        statuses = list(self._workers.statuses().values())
        left = [status for status in statuses if status.finished and status.phase == WorkerPhase.LEFT]
        # Without a guard nothing can be saved; as under torchrun, the workers find out by themselves.
        if not statuses or len(left) == len(self._workers.live):
            return None
        quiet_since = time.monotonic_ns() - SILENCE_S * 1e9
        if lost.is_silent and any(s.boundary_ns > quiet_since or is_between_steps(s) for s in statuses):
            return None
        self._home = next((Path(each.directory) for each in statuses if each.directory), self._home)
        self._nodes.note_lost({lost.node: lost.words})
        which = listed([str(rank) for rank in lost.ranks], 8)
        logger.error("%s, and with it rank%s %s", lost.words, "s" * (len(lost.ranks) > 1), which)
        if lost.node != FIRST:  # which had the board
            self._tell_others(lost)
        if self.is_active:
            self._machine.note_refusal(lost.words)
            return News()
        if self._machine.phase is not Phase.RUN:
            return None
        self.refuse(lost.ranks, lost.words, "a whole node is lost", stuck_s=lost.for_s)
        return News(lost.words)

    def _tell_others(self, lost: Lost) -> None:
        """No recovery goes on, and none begins."""
        generation = self._machine.generation + 1
        self._seen = max(self._seen, generation)
        with suppress(*ERRORS):
            self._board_of(generation).write(f"{generation}/plan", {"refusal": lost.words, "node": lost.node})
        self._refuse_for_all(generation, lost.words)
        if self.is_active:
            self._call_off(lost.words)

    def _keep_rings(self) -> None:
        """What this agent has kept of other nodes' ranks is for the next start. Of all ranks: which other nodes were
        lost meanwhile may not be known yet."""
        server, home, done = self._nodes.server, self._home, []
        if server is None or home is None:
            return
        for rank in server.ranks_kept:
            try:
                if keep_ring(home, rank, server.records_of(rank)):
                    done.append(rank)
            except OSError as error:
                logger.warning("what this node has kept of rank %d cannot be brought to disk: %s", rank, error)
        if done:
            logger.info("random streams and buffers of %s are on disk, because a node is lost", rank_list(done))


def _text(value: object) -> str:
    return printable(str(value), _LONGEST)
