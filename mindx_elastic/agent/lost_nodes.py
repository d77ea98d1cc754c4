"""Recoveries in place where whole nodes are lost: their agents, and all of their ranks with them.

The first node's agent decides that a node is lost (`lifeline`), once, on the board: the plan names the node. It offers
the place (`open_places`) and holds the recovery in its first phase, with all guards open, until an agent has claimed
it: then it notes the lost ranks to be dead, and everything goes on as where single ranks have died. The agent that has
the place starts all of its workers as new processes of the recovery that is under way (`NodeWatch.place`). Nobody comes
within --rejoin-timeout: the job is restarted, as without recovery in place.

The first node itself is lost: the workers' store has ended with it, so that the ranks save and the job is restarted. So
it is where the store of the rendezvous, in which places are offered, is lost with its host.

Keys of the board, beside those of `rejoin.board` and `nodes`:

==========================  ============================================================================================
``{g}/open``                a place is offered in this recovery, which therefore lasts longer
``{g}/taken/{node}``        the agent that has the node's place now
``{g}/keeper/{node}``       where that node's agent hears ranks of others
``{g}/records/{rank}/{n}``  what of a lost rank's ring has come to node n (`rejoin.small_records`)
``{g}/joins/{rank}``        the one new process of the rank that connects to the others
==========================  ============================================================================================
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindx_elastic.agent.holder import keep_ring
from mindx_elastic.agent.lifeline import Gone
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.nodes import NodesRecovery
from mindx_elastic.agent.open_places import OpenPlaces
from mindx_elastic.agent.recovery import ERRORS, Generation, Notes
from mindx_elastic.agent.vacancies import Vacancy
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import NODES_REPLACED
from mindx_elastic.rejoin.lost_node import FIRST, Answer, answer
from mindx_elastic.rejoin.protocol import Phase

__all__ = ["WholeNodesRecovery"]

_LATER_S = 2.0
_LONGEST = 300


class WholeNodesRecovery(NodesRecovery):
    """One per attempt of several nodes whose agents hear each other. Main thread."""

    def __init__(self, *arguments: Any, nodes: NodeWatch, place: Callable[[], Vacancy], **named: Any) -> None:
        """`place`: of node 0 in recovery 0 of this attempt, from which the others are made."""
        super().__init__(*arguments, **named)
        self._nodes, self._place = nodes, place
        self._opens = OpenPlaces(nodes, self._machine, self._timeout_s, self._call_off)
        self._has_lost = self._is_named = False
        self._home: Path | None = None
        """The checkpoint directory, from the loss of a node until the recovery has succeeded."""
        self._longer = 0
        """The recovery whose time has been extended because of a place in it."""

    # --- every agent --------------------------------------------------------------------------------------------------

    @property
    def fds(self) -> tuple[int, ...]:
        host, line = self._nodes.host, self._nodes.line
        more = [each.fd for each in (host, line) if each is not None]
        return (*super().fds, *more)

    @property
    def is_out(self) -> bool:
        line = self._nodes.line
        if line is not None:
            line.drain()
        host = self._nodes.host
        return self._is_named or (line is not None and line.is_out) or (host is not None and host.is_out)

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        generation = self._machine.generation + 1
        if not self.is_out:  # a node that has just woken up finds its dead before it hears what it is itself
            key = f"{generation}/plan"
            with suppress(*ERRORS):
                board = self._board_of(generation)
                if not self._names_this_node(board.read([key]).get(key, {})):
                    self._tell_of_keeper(board, generation)
        return not self.is_out and super().begin(end, cause, stuck_s=stuck_s)

    def _names_this_node(self, plan: Mapping[str, Any]) -> bool:
        """Whether a plan says that this node is lost; then it is out."""
        is_named = "node" in plan and plan.get("rank") in self._workers.processes
        self._is_named = self._is_named or is_named
        return self._is_named

    def join(self, place: Vacancy) -> None:
        """This node has taken the place of a lost one: take part in the recovery under way."""
        generation = place.generation
        self._machine.generation = generation - 1
        self._machine.begin(range(place.first, place.first + place.ranks))
        self._seen = self._watch.newest = generation
        self._board, now = self._board_of(generation), time.time()
        self._now = Generation(now, now, "", time.monotonic() + self._timeout_s)
        with suppress(*ERRORS):
            self._tell_of_keeper(self._board, generation)
            plan = self._board.read([f"{generation}/plan"]).get(f"{generation}/plan", {})
            self._now.cause = printable(str(plan.get("cause", "")), _LONGEST)
            self._now.node = printable(str(plan.get("name", "")), _LONGEST)
            self._now.taken_by = f"{socket.gethostname()}, pid {os.getpid()}"

    def look(self) -> Phase:
        if self.is_active and not self.is_out:
            try:
                self._look_at_place()
            except ERRORS as error:
                self._hear_error(error)
        was_active = self.is_active
        phase = super().look()
        if was_active and phase is Phase.RUN:
            self._home = None
            self._nodes.note_whole()
        return phase

    def close(self) -> None:
        super().close()
        self._opens.withdraw()
        if not (self.is_out or self._has_finished):
            self._keep_rings()

    def _keep_rings(self) -> None:
        """There was no recovery in place: what this agent has kept of other nodes' ranks is for a start then. Of all
        ranks: which other nodes were lost meanwhile may not be known yet."""
        host, home, done = self._nodes.host, self._home, []
        if host is None or home is None:
            return
        for rank in host.ranks_kept:
            try:
                if keep_ring(home, rank, host.records_of(rank) or {"records": []}):
                    done.append(rank)
            except ERRORS as error:
                logger.warning("what this node has kept of rank %d cannot be brought to disk: %s", rank, error)
        if done:
            logger.info("random streams and buffers of %s are on disk, because a node is lost", rank_list(done))

    def _look_at_place(self) -> None:
        now, board, generation = self._now, self._board, self._machine.generation
        assert now is not None and board is not None
        if self._opens.generation == generation:
            self._opens.look(now, board)
        elif self._longer != generation and time.monotonic() > now.deadline:
            note = board.read([f"{generation}/open"]).get(f"{generation}/open")
            if note is not None:
                self._longer = generation
                now.deadline = time.monotonic() + self._timeout_s + _LATER_S
                now.node = now.node or printable(str(note.get("name", "")), _LONGEST)

    def _why_late(self, now: Generation) -> str:
        return self._opens.why_late() or super()._why_late(now)

    def _hear_own_loss(self, plan: Mapping[str, Any]) -> None:
        if not self._names_this_node(plan):
            super()._hear_own_loss(plan)

    def _why_not_plan(self, plan: Mapping[str, Any]) -> str:
        return "this node was taken for lost" if self._names_this_node(plan) else super()._why_not_plan(plan)

    def hear_others(self, *, is_stopping: bool) -> int | None:
        rank = super().hear_others(is_stopping=is_stopping)
        if rank is not None and self._board is not None:
            with suppress(*ERRORS):  # before this node's workers report
                self._tell_of_keeper(self._board, self._machine.generation)
        return rank

    def _hear_of_node(self, plan: Mapping[str, Any]) -> None:
        assert self._now is not None
        self._now.node = printable(str(plan.get("name", "")), _LONGEST)
        if type(plan["node"]) is int:
            self._nodes.note_lost({plan["node"]: printable(str(plan["cause"]), _LONGEST)})

    def _tell(self, *, trains: bool = False) -> None:
        if self._now is not None and self._now.node and not self._now.taken_by and not self._now.told:
            self._hear_taker(self._now)
        super()._tell(trains=trains)

    def _hear_taker(self, now: Generation) -> None:
        assert self._board is not None
        with suppress(*ERRORS):
            keys = [f"{self._machine.generation}/taken/{node}" for node in range(self._nodes.num_nodes)]
            names = [str(note["name"]) for note in self._board.read(keys).values()]
            now.taken_by = printable("; ".join(names), _LONGEST)

    def _tell_of_keeper(self, board: Notes, generation: int) -> None:
        """Where workers may send small records to this node's agent, which may be another one now."""
        if (keeper := self._nodes.keeper()) is not None:
            board.write(f"{generation}/keeper/{self._nodes.node}", keeper)

    def _give_up(self) -> None:
        super()._give_up()
        self._opens.withdraw()

    # --- a node is lost -----------------------------------------------------------------------------------------------

    @property
    def has_lost_node(self) -> bool:
        return self._has_lost

    def lost(self) -> list[Gone]:
        """The nodes that give no sign of life now."""
        return self._nodes.gone()

    def is_whole(self) -> bool:
        """Whether the job could do without any node's ranks, once new processes are there."""
        statuses = self._workers.statuses()
        return bool(statuses) and all(status.in_place == NODES_REPLACED for status in statuses.values())

    def lose(self, gone: Gone) -> str:
        """This node is lost. Why the job must be restarted; empty: a place is open, or a recovery has been called
        off."""
        self._has_lost = True
        directories = (status.directory for status in self._workers.statuses().values())
        self._home = next((Path(each) for each in directories if each), self._home)
        self._nodes.note_lost({gone.node: gone.words})
        logger.error("%s, and with it rank%s %s", gone.words, "s" * (len(gone.ranks) > 1), _numbers(gone.ranks))
        if gone.node == FIRST:
            return self._lose_first(gone)
        assert self._nodes.host is not None
        self._nodes.host.put_out(gone)
        if self._opens.is_taken(gone.node) and self.is_active:
            self._call_off(f"the agent that has taken the place of node {gone.node} is gone, too")
        try:
            return self._lose(gone, gone.words)
        except ERRORS as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if self.is_active:
                self._call_off(reason)
                return ""
            return reason

    def _lose_first(self, gone: Gone) -> str:
        """Nothing can be agreed on in place: the board was in its store."""
        self._nodes.note_first_gone()
        if self.is_active:
            self._machine.note_refusal(f"{gone.words}, and it had the workers' store")
        if self._machine.phase is Phase.FALLBACK:
            return ""
        self.refuse(gone.ranks, gone.words, "the lost node had the workers' store", stuck_s=gone.for_s)
        return gone.words

    def _lose(self, gone: Gone, what: str) -> str:
        machine = self._machine
        has_joined = False
        if self.is_active:
            assert self._board is not None
            keys = [f"{machine.generation}/joins/{rank}" for rank in gone.ranks]
            has_joined = bool(self._board.read(keys))
        is_open = self._opens.generation == machine.generation
        if self.is_active and self._opens.is_open(gone.node):
            return ""
        now = answer(machine, gone.ranks, has_joined=has_joined, is_open=is_open)
        if now is Answer.NOTHING:
            return ""
        if now is Answer.CALL_OFF:
            self._call_off(f"{what}, during the recovery")
            return ""
        if now is Answer.BEGIN:
            generation = machine.generation + 1
            reason = self.why_not(())
            self._seen = max(self._seen, generation)
            self._tell()
            board = self._board_of(generation)
            plan = {"generation": generation, "rank": gone.ranks[0], "cause": what, "node": gone.node}
            plan = {"refusal": reason} if reason else {**plan, "name": gone.name}
            reason = str(board.write(f"{generation}/plan", plan).get("refusal", ""))  # of another agent, perhaps
            if reason:
                self.refuse(gone.ranks, what, reason, stuck_s=gone.for_s)
                return f"{what}; no recovery in place: {reason}"
            machine.begin([])
            self._tell_of_keeper(board, generation)
            self._board, noticed = board, time.time()
            self._now = Generation(noticed - gone.for_s, noticed, what, time.monotonic() + self._timeout_s)
        assert self._now is not None and self._board is not None
        self._opens.open(gone, self._place(), self._now, self._board)
        return ""


def _numbers(ranks: Sequence[int]) -> str:
    return listed([str(rank) for rank in ranks], 8)
