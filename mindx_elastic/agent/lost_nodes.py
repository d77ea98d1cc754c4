"""Recoveries in place where a whole node is lost: its agent, and all of its ranks with it.

The first node's agent decides that it is (`lifeline`), once, on the board: the plan names the node. It offers the place
(`vacancies`) and holds the recovery in its first phase, with all guards open, until an agent has claimed it: then it
notes the lost ranks to be dead, and everything goes on as where single ranks have died. The agent that has the place
starts all of its workers as new processes of the recovery that is under way (`NodeWatch.place`). Nobody comes within
--rejoin-timeout: the job is restarted, as without recovery in place.

Keys of the board, beside those of `rejoin.board` and `nodes`:

======================  ================================================================================================
``{g}/open``            a place is offered in this recovery, which therefore lasts longer
``{g}/taken/{node}``    the agent that has the node's place now
``{g}/records/{rank}``  what of a lost rank's ring has come to the first node (`rejoin.small_records`)
``{g}/joins/{rank}``    the one new process of the rank that connects to the others
======================  ================================================================================================
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mindx_elastic.agent.lifeline import Gone, Lifeline, LifelineHost
from mindx_elastic.agent.nodes import NodesRecovery, connect
from mindx_elastic.agent.recovery import ERRORS, Generation
from mindx_elastic.agent.rendezvous import HostedStoreRendezvous
from mindx_elastic.agent.vacancies import Seeker, Vacancy, offer, root_store, tell_nodes
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.core.status_page import NODES_REPLACED
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.lost_node import Answer, answer, why_in_vain
from mindx_elastic.rejoin.protocol import Phase

__all__ = ["NodeWatch", "WholeNodesRecovery"]

_ANSWER_S = 5.0
_LOOK_S = 0.05
_LATER_S = 2.0
_LONGEST = 300


class NodeWatch:
    """This agent's connection to the other nodes' agents, over all attempts. Main thread."""

    def __init__(
        self, handler: HostedStoreRendezvous, *, ranks: int, can_join: bool, stand_by: Callable[[], None]
    ) -> None:
        """`ranks`: processes of this node. can_join: they can be started as new processes of a running job. `stand_by`
        is called when this node begins to wait for a place."""
        self._handler, self._ranks, self._can_join = handler, ranks, can_join
        self._thread = ReadyThread("mindx-vacancies")
        self.host: LifelineHost | None = None
        self.line: Lifeline | None = None
        handler.seeker = Seeker(handler.inner, self._claim, self._why_not, stand_by)

    @property
    def place(self) -> Vacancy | None:
        """Of a lost node, which this one has in this attempt."""
        return self._handler.place

    @property
    def address(self) -> str:
        """For the workers: where the first node's agent hears others; ``1``: it is this one."""
        return "1" if self.host is not None else f"{self._handler.lifeline[0]}:{self._handler.lifeline[1]}"

    def open(self, *, node: int, num_nodes: int, ranks: Sequence[int]) -> bool:
        """The nodes have met. Whether the loss of a node other than the first will be seen."""
        handler = self._handler
        self.host = handler.lifelines
        if self.place is not None:
            return True
        self._hold(None)  # it had a place, and could not start there
        if node == 0:
            with suppress(Exception):  # any of torch's: then a late node goes into the rendezvous, as ever
                self._ask(lambda store, run_id: tell_nodes(store, run_id, num_nodes))
                self.offer(None)
            return self.host is not None
        if handler.lifeline[1] == 0:
            return False
        token = secrets.token_hex(8)
        self.line = Lifeline(handler.lifeline, handler.scope, board_key(), node=node, token=token, ranks=ranks)
        if self.line.start():
            return True
        logger.warning("the first node's agent cannot be reached: the loss of this node restarts the job")
        self.close()
        return False

    def offer(self, place: Vacancy | None) -> None:
        """Raises what torch raises, and TimeoutError."""
        self._ask(lambda store, run_id: offer(store, run_id, place))

    def _ask(self, work: Callable[[Any, str], object]) -> None:
        """Do `work` with the store of the rendezvous and the name of the job; the store may never answer."""
        store, run_id = root_store(self._handler.inner), self._handler.get_run_id()
        self._thread.call(lambda: work(store, run_id), _ANSWER_S)

    def close(self) -> None:
        """The attempt has ended."""
        if self.line is not None:
            self.line.close()
        if self.host is not None:
            self.host.close()
        self.line = self.host = self._handler.lifelines = None

    def _hold(self, line: Lifeline | None) -> None:
        """The one before ends without a goodbye: nobody is to wait for the node that it spoke for."""
        if self.line is not None:
            self.line.close(says_bye=False)
        self.line = line

    def _why_not(self, place: Vacancy) -> str:
        if not self._can_join:
            return "its program is not run by this Python interpreter"
        if place.ranks != self._ranks:
            return f"it needs {place.ranks} processes on the node, and this one has {self._ranks} (--nproc-per-node)"
        return ""

    def _claim(self, place: Vacancy) -> bool:
        token, ranks = secrets.token_hex(8), range(place.first, place.first + place.ranks)
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        address = (place.address, place.lifeline)
        line = Lifeline(address, place.scope, board_key(), node=place.node, token=token, ranks=ranks)
        has_it = False
        try:
            if not line.start():
                raise OSError(f"the first node's agent does not answer at {place.address}:{place.lifeline}")
            store: Any = connect(place.address, place.port, place.scope)
            scope, number = f"{place.scope}/{place.generation}", place.generation
            board = Board(store, key=board_key(), scope=scope, writer=place.first)
            if not board.read([f"{number}/over"]):
                note = board.write(f"{number}/taken/{place.node}", {"token": token, "name": name})
                has_it = note.get("token") == token
        finally:
            if has_it:
                self._hold(line)
            else:
                line.close(says_bye=False)
        return has_it


@dataclass
class _Open:
    """A place that is offered, or was taken."""

    place: Vacancy
    gone: Gone
    due: float
    """`time.monotonic` at which to look next."""
    taken_by: str = ""


class WholeNodesRecovery(NodesRecovery):
    """One per attempt of several nodes whose agents hear each other. Main thread."""

    def __init__(self, *arguments: Any, nodes: NodeWatch, place: Callable[[], Vacancy], **named: Any) -> None:
        """`place`: of node 0 in recovery 0 of this attempt, from which the others are made."""
        super().__init__(*arguments, **named)
        self._nodes, self._place = nodes, place
        self._open: _Open | None = None
        self._has_lost = self._is_named = False
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
        return self._is_named or (line is not None and line.is_out)

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        if not self.is_out:  # a node that has just woken up finds its dead before it hears what it is itself
            key = f"{self._machine.generation + 1}/plan"
            with suppress(*ERRORS):
                self._names_this_node(self._board_of(self._machine.generation + 1).read([key]).get(key, {}))
        return not self.is_out and super().begin(end, cause, stuck_s=stuck_s)

    def _names_this_node(self, plan: Mapping[str, Any]) -> bool:
        """Whether a plan says that this node is lost; then it is out."""
        self._is_named = self._is_named or ("node" in plan and plan.get("rank") in self._workers.processes)
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
            plan = self._board.read([f"{generation}/plan"]).get(f"{generation}/plan", {})
            self._now.cause = printable(str(plan.get("cause", "")), _LONGEST)
            self._now.node = printable(str(plan.get("name", "")), _LONGEST)
            self._now.taken_by = f"{socket.gethostname()}, pid {os.getpid()}"
        self._longer = generation

    def look(self) -> Phase:
        if self.is_active and not self.is_out:
            try:
                self._look_at_place()
            except ERRORS as error:
                self._machine.note_refusal(f"{type(error).__name__}: {error}")
        return super().look()

    def close(self) -> None:
        super().close()
        self._withdraw()

    def _look_at_place(self) -> None:
        now, board, generation = self._now, self._board, self._machine.generation
        assert now is not None and board is not None
        if self._open is not None and self._open.place.generation == generation:
            self._look_at_own_place(self._open)
        elif self._longer != generation and time.monotonic() > now.deadline:
            note = board.read([f"{generation}/open"]).get(f"{generation}/open")
            if note is not None:
                self._longer = generation
                now.deadline = time.monotonic() + self._timeout_s + _LATER_S
                now.node = printable(str(note.get("name", "")), _LONGEST)

    def _hear_own_loss(self, plan: Mapping[str, Any]) -> None:
        if not self._names_this_node(plan):
            super()._hear_own_loss(plan)

    def _why_not_plan(self, plan: Mapping[str, Any]) -> str:
        return "this node was taken for lost" if self._names_this_node(plan) else super()._why_not_plan(plan)

    def _hear_of_node(self, plan: Mapping[str, Any]) -> None:
        assert self._now is not None
        self._now.node = printable(str(plan.get("name", "")), _LONGEST)

    def _tell(self, *, trains: bool = False) -> None:
        if self._now is not None and self._now.node and not self._now.taken_by and not self._now.told:
            self._hear_taker(self._now)
        super()._tell(trains=trains)

    def _hear_taker(self, now: Generation) -> None:
        with suppress(*ERRORS):
            assert self._board is not None
            keys = [f"{self._machine.generation}/taken/{node}" for node in range(1, self._num_nodes)]
            for note in self._board.read(keys).values():
                now.taken_by = printable(str(note["name"]), _LONGEST)

    @property
    def _num_nodes(self) -> int:
        return self._place().num_nodes

    # --- the first node's agent ---------------------------------------------------------------------------------------

    @property
    def has_lost_node(self) -> bool:
        return self._has_lost

    def lost(self) -> list[Gone]:
        """The nodes that give no sign of life now."""
        host = self._nodes.host
        if host is None:
            return []
        host.drain()
        return host.gone()

    def is_whole(self) -> bool:
        """Whether the job could do without any node's ranks, once new processes are there."""
        statuses = self._workers.statuses()
        return bool(statuses) and all(status.in_place == NODES_REPLACED for status in statuses.values())

    def lose(self, gone: Gone) -> str:
        """This node is lost. Why the job must be restarted; empty: a place is open, or a recovery has been called
        off."""
        host = self._nodes.host
        assert host is not None
        self._has_lost = True
        host.put_out(gone)
        self._look_at_place_of(gone)
        what = f"node {gone.node} ({gone.name}) is lost: its agent {'is silent' if gone.is_silent else 'is gone'}"
        logger.error("%s, and with it rank%s %s", what, "s" * (len(gone.ranks) > 1), _numbers(gone.ranks))
        try:
            return self._lose(gone, what)
        except ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            if self.is_active:
                self._call_off(reason)
                return ""
            return reason

    def _look_at_place_of(self, gone: Gone) -> None:
        """The agent that had taken the place of a lost node is lost, too."""
        if self._open is not None and self._open.taken_by and self._open.place.node == gone.node and self.is_active:
            self._call_off(f"the agent that has taken the place of node {gone.node} is gone, too")

    def _lose(self, gone: Gone, what: str) -> str:
        machine = self._machine
        has_joined = False
        if self.is_active:
            assert self._board is not None
            keys = [f"{machine.generation}/joins/{rank}" for rank in gone.ranks]
            has_joined = bool(self._board.read(keys))
        is_open = self._open is not None and self._open.place.generation == machine.generation
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
            self._board, noticed = board, time.time()
            self._now = Generation(noticed - gone.for_s, noticed, what, 0.0)
        assert self._now is not None and self._board is not None
        place = replace(
            self._place(),
            name=secrets.token_hex(8),
            node=gone.node,
            ranks=len(gone.ranks),
            first=gone.ranks[0],
            generation=machine.generation,
        )
        self._now.node = gone.name
        self._board.write(f"{machine.generation}/open", {"node": gone.node, "name": gone.name})
        self._nodes.offer(place)
        self._now.deadline = time.monotonic() + self._timeout_s
        self._open = _Open(place, gone, 0.0)
        logger.warning(
            "the other nodes' ranks wait up to %g s for another node in the place of node %d (--rejoin-timeout): start "
            "the same command there",
            self._timeout_s,
            gone.node,
        )
        return ""

    def _look_at_own_place(self, mine: _Open) -> None:
        """Has an agent taken it?"""
        assert self._board is not None and self._now is not None and self._nodes.host is not None
        moment = time.monotonic()
        is_late = moment > self._now.deadline
        if mine.taken_by or (moment < mine.due and not is_late):
            return
        mine.due = moment + _LOOK_S
        place, board, machine = mine.place, self._board, self._machine
        key = f"{place.generation}/taken/{place.node}"
        note = board.read([key]).get(key)
        if note is None:
            if reason := why_in_vain(machine, mine.gone.ranks):
                self._call_off(reason)
            elif is_late:
                patience = f"{self._timeout_s:g} s (--rejoin-timeout)"
                self._call_off(f"no other node has taken the place of node {place.node} within {patience}")
            return
        mine.taken_by = self._now.taken_by = printable(str(note["name"]), _LONGEST)
        self._nodes.host.expect(place.node, str(note["token"])[:64])
        logger.warning("%s has taken the place of node %d (%s)", mine.taken_by, place.node, mine.gone.name)
        for rank in mine.gone.ranks:
            if (kept := self._nodes.host.records_of(rank)) is not None:
                board.write(f"{place.generation}/records/{rank}", kept)
            found = board.write(f"{place.generation}/out/{rank}", {"dead": True})
            if not found.get("dead"):
                self._call_off(f"rank {rank} has died during the recovery")
        self._now.deadline = moment + self._timeout_s
        self._withdraw(keeps=True)

    def _withdraw(self, *, keeps: bool = False) -> None:
        """There is no place to take any more."""
        if self._open is None:
            return
        with suppress(Exception):  # any of torch's; who takes it then finds the recovery over, or its store gone
            self._nodes.offer(None)
        if not keeps:
            self._open = None

    def _give_up(self) -> None:
        super()._give_up()
        self._withdraw()


def _numbers(ranks: Sequence[int]) -> str:
    return listed([str(rank) for rank in ranks], 8)
