"""Recoveries in place where whole nodes are lost: their agents, and all of their ranks with them.

The first node's agent decides that a node is lost (`lifeline`), once, on the board: the plan names the node. It offers
the place (`open_places`) and holds the recovery in its first phase, with all guards open, until an agent has claimed
it: then it notes the lost ranks to be dead, and everything goes on as where single ranks have died. The agent that has
the place starts all of its workers as new processes of the recovery that is under way (`NodeWatch.place`). Nobody comes
within --rejoin-timeout: the job is restarted, as without recovery in place.

The first node itself is lost: the others begin the recovery without a board. Their workers come out of the training and
wait. One of the agents hosts a new store, with the board of this recovery and of later ones (`rejoin.succession` says
which); the others come to it, all tell their workers where it is (`rejoin.board.BOARD_FILE`), and from there on it is
the first node. Who has not come within 10 s is lost, too. A rank of the first node may have died a moment before its
agent: then the recovery under way begins again on the new board, unless the donor's state is in memory already.

The store of the rendezvous, in which these things are settled, may be lost as well, with the node that hosts it. The
recovery begins all the same, so that the workers come out, and waits for another one at the same endpoint (`endpoint`).

Keys of the board, beside those of `rejoin.board` and `nodes`:

==========================  ============================================================================================
``{g}/here/{node}``         an agent has come to the new first node's
``{g}/open``                a place is offered in this recovery, which therefore lasts longer
``{g}/taken/{node}``        the agent that has the node's place now
``{g}/first``               which node the first one is
``{g}/keeper/{node}``       where that node's agent hears ranks of others
``{g}/records/{rank}/{n}``  what of a lost rank's ring has come to node n (`rejoin.small_records`)
``{g}/joins/{rank}``        the one new process of the rank that connects to the others
==========================  ============================================================================================
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindx_elastic.agent.holder import keep_ring
from mindx_elastic.agent.lifeline import SILENCE_S, Gone
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.nodes import BoardAgain, Boards, NodesRecovery, Surroundings
from mindx_elastic.agent.open_places import OpenPlaces, tell_records
from mindx_elastic.agent.recovery import ERRORS, Generation, Notes
from mindx_elastic.agent.rendezvous import CONNECTION_ERRORS
from mindx_elastic.agent.vacancies import Vacancy
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import NODES_REPLACED
from mindx_elastic.rejoin.belonging import Deed
from mindx_elastic.rejoin.board import BOARD_FILE
from mindx_elastic.rejoin.lost_node import Answer, answer
from mindx_elastic.rejoin.protocol import Phase
from mindx_elastic.rejoin.record import RESTART
from mindx_elastic.rejoin.succession import Claim, Meaning, Standing, assemble, meaning

__all__ = ["WholeNodesRecovery"]

_LOOK_S = 0.05
_LATER_S = 2.0
_LONGEST = 300


@dataclass
class _Succession:
    """The first node is lost, and the agents meet at the next one's."""

    claim: Claim | None
    """None: it cannot be asked who that is, because the store of the rendezvous is lost."""
    gone: Gone
    late: float
    """`time.monotonic` at which the others need not be waited for any longer; without a claim: another store."""


@dataclass
class _Unsettled:
    """This is the first node, and has lost others; the store of the rendezvous, which must hear of it, is lost, too."""

    gone: list[Gone]
    late: float
    """`time.monotonic` at which another store need not be waited for any longer."""


class WholeNodesRecovery(NodesRecovery):
    """One per attempt of several nodes whose agents hear each other. Main thread."""

    def __init__(
        self,
        *arguments: Any,
        nodes: NodeWatch,
        place: Callable[[], Vacancy],
        connect_to: Callable[[str, int], Surroundings],
        folder: Path,
        **named: Any,
    ) -> None:
        """`place`: see `Surroundings`. `connect_to`: to another workers' store from now on. `folder`: the agent's."""
        super().__init__(*arguments, **named)
        self._nodes, self._place, self._connect_to, self._folder = nodes, place, connect_to, folder
        self._opens = OpenPlaces(nodes, self._machine, self._timeout_s, self._call_off)
        self._succession: _Succession | None = None
        self._unsettled: _Unsettled | None = None
        self._has_lost = self._is_named = False
        self._home: Path | None = None
        """The checkpoint directory, from the loss of a node until the recovery has succeeded."""
        self._look_due = 0.0
        self._endpoint_deed: Deed | None = None
        """What the endpoint has said, since the store of the rendezvous was lost last."""
        self._board_gone: float | None = None
        """`time.monotonic` since which the board of the recovery under way cannot be asked."""
        self._again = BoardAgain(self._board_of, 0)
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
                    self._tell_of_nodes(board, generation)
        return not self.is_out and super().begin(end, cause, stuck_s=stuck_s)

    def hear_end(self, end: WorkerExit) -> None:
        if self._succession is not None:
            self._call_off(f"rank {end.rank} has died while the nodes met anew")
            return
        super().hear_end(end)

    def _names_this_node(self, plan: Mapping[str, Any]) -> bool:
        """Whether a plan says that this node is lost; then it is out."""
        nodes = plan.get("nodes", [])
        is_named = plan.get("rank") in self._workers.processes or (
            isinstance(nodes, list) and self._nodes.node in nodes
        )
        self._is_named = self._is_named or ("node" in plan and is_named)
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
            self._tell_of_nodes(self._board, generation)
            plan = self._board.read([f"{generation}/plan"]).get(f"{generation}/plan", {})
            self._now.cause = printable(str(plan.get("cause", "")), _LONGEST)
            self._now.node = printable(str(plan.get("name", "")), _LONGEST)
            self._now.taken_by = f"{socket.gethostname()}, pid {os.getpid()}"

    def look(self) -> Phase:
        if self.is_active and not self.is_out:
            try:
                if self._succession is not None:
                    self._look_at_succession(self._succession)
                else:
                    self._look_at_place()
            except ERRORS as error:
                self._hear_error(error)
        if self.is_active and (self._board is None or self._waits_for_loss()):
            return self._machine.phase
        was_active = self.is_active
        phase = super().look()
        if was_active and phase is Phase.RUN:
            self._home = None
            self._nodes.note_whole()
            self._nodes.settle_in(self._machine.generation)
            self._nodes.remember()  # another agent has a place now
        return phase

    def _hear_error(self, error: Exception) -> None:
        # The board may be lost with the first node, which is noticed a moment later: the recovery may begin again.
        is_gone = isinstance(error, (OSError, *CONNECTION_ERRORS))
        if is_gone and self._nodes.line is not None and self._succession is None:
            if self._board_gone is None:
                self._board_gone = time.monotonic()
                self._again = BoardAgain(self._board_of, self._machine.generation)
        else:
            super()._hear_error(error)

    def _waits_for_loss(self) -> bool:
        """Whether the board cannot be asked any more, and it is not known yet whether the first node is lost."""
        if self._board_gone is None or self._succession is not None:
            return False
        if (board := self._again.look()) is not None:
            self._board, self._board_gone = board, None
            logger.info("the workers' store answers again: the recovery goes on")
            return False
        if time.monotonic() - self._board_gone > SILENCE_S + _LATER_S:
            self._machine.note_refusal("the workers' store does not answer, and the first node is not lost")
            return False
        return True

    def prepare(self) -> None:
        super().prepare()
        if not self.is_active and (found := self._nodes.found()) is not None:
            logger.info("the endpoint %s answers: %s", self._nodes.endpoint, found.deed.value)
            self._is_named = self._is_named or found.deed is Deed.OUT
            if found.store is not None:
                self._nodes.remember()

    def close(self) -> None:
        super().close()
        self._opens.withdraw()
        self._nodes.give_up_seeking()
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

    def _note_home(self) -> None:
        for status in self._workers.statuses().values():
            if status.directory:
                self._home = Path(status.directory)

    def _look_at_place(self) -> None:
        now, board, generation = self._now, self._board, self._machine.generation
        assert now is not None and board is not None
        if self._unsettled is not None:
            self._look_at_unsettled(self._unsettled)
        elif self._opens.generation == generation:
            self._opens.look(now, board)
        elif self._longer != generation and time.monotonic() > now.deadline:
            note = board.read([f"{generation}/open"]).get(f"{generation}/open")
            if note is not None:
                self._longer = generation
                now.deadline = time.monotonic() + self._timeout_s + _LATER_S
                now.node = now.node or printable(str(note.get("name", "")), _LONGEST)

    def _why_late(self, now: Generation) -> str:
        no_endpoint = self._why_no_endpoint() if self._unsettled is not None else ""
        return no_endpoint or self._opens.why_late() or super()._why_late(now)

    def _hear_own_loss(self, plan: Mapping[str, Any]) -> None:
        if not self._names_this_node(plan):
            super()._hear_own_loss(plan)

    def _why_not_plan(self, plan: Mapping[str, Any]) -> str:
        return "this node was taken for lost" if self._names_this_node(plan) else super()._why_not_plan(plan)

    def hear_others(self, *, is_stopping: bool) -> int | None:
        rank = super().hear_others(is_stopping=is_stopping)
        if rank is not None and self._board is not None:
            with suppress(*ERRORS):  # before this node's workers report
                self._tell_of_nodes(self._board, self._machine.generation)
        return rank

    def _hear_of_node(self, plan: Mapping[str, Any]) -> None:
        assert self._now is not None
        self._now.node = printable(str(plan.get("name", "")), _LONGEST)
        nodes = plan["nodes"] if isinstance(plan.get("nodes"), list) else []
        cause = printable(str(plan["cause"]), _LONGEST)
        self._nodes.note_lost({node: cause for node in nodes if type(node) is int})

    def _tell(self, *, trains: bool = False) -> None:
        if self._now is not None and self._now.node and not self._now.taken_by and not self._now.told:
            self._hear_taker(self._now)
        super()._tell(trains=trains)

    def _hear_taker(self, now: Generation) -> None:
        if self._board is None:  # there was none yet
            return
        with suppress(*ERRORS):
            keys = [f"{self._machine.generation}/taken/{node}" for node in range(self._nodes.num_nodes)]
            names = [str(note["name"]) for note in self._board.read(keys).values()]
            now.taken_by = printable("; ".join(names), _LONGEST)

    def _tell_of_nodes(self, board: Notes, generation: int) -> None:
        """What the workers need to know of the nodes in the recovery `generation`."""
        board.write(f"{generation}/first", {"node": self._nodes.first})
        if (keeper := self._nodes.keeper()) is not None:
            board.write(f"{generation}/keeper/{self._nodes.node}", keeper)

    def _call_off(self, reason: str) -> None:
        if self._board is None:
            self._machine.note_refusal(reason)
        else:
            super()._call_off(reason)

    def _give_up(self) -> None:
        if self._board is None:
            self._has_given_up = True
            logger.warning("no recovery in place: %s; the job is restarted", self._machine.reason)
            self._tell_of_failure(RESTART)
        else:
            super()._give_up()
        self._succession = self._unsettled = None
        self._nodes.give_up_seeking()
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
        self._note_home()
        is_first = gone.node == self._nodes.first
        if is_first:
            self._nodes.note_first_gone()
        else:
            assert self._nodes.host is not None
            self._nodes.host.put_out(gone)
            self._look_at_place_of(gone)
        what = gone.words
        self._nodes.note_lost({gone.node: what})
        logger.error("%s, and with it rank%s %s", what, "s" * (len(gone.ranks) > 1), _numbers(gone.ranks))
        try:
            return self._succeed(gone, what) if is_first else self._lose(gone, what)
        except ERRORS as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if self.is_active:
                self._call_off(reason)
                return ""
            return reason

    # --- the first node is lost ---------------------------------------------------------------------------------------

    def _succeed(self, gone: Gone, what: str) -> str:
        """Begin the recovery without a board. Returns why the job must be restarted."""
        machine, is_active = self._machine, self.is_active
        if machine.phase is Phase.FALLBACK:
            return ""
        generation = machine.generation + (not is_active)
        reason = ("" if self._begins_again(gone) else f"{what}, during a recovery") if is_active else self.why_not(())
        claim = None
        try:
            claim = self._nodes.claim(generation, refusal=reason)
            found = meaning(claim, node=self._nodes.node, first=gone.node)
            if found is Meaning.OUT:
                self._is_named = True
                return ""
            if found is Meaning.RESTART:
                reason = reason or claim.refusal or f"{what}, while the loss of another node is recovered"
        except ERRORS as error:
            if not reason and not self._nodes.seek(generation, [gone.node]):
                text = printable(f"{type(error).__name__}: {error}".partition("\n")[0], 200)
                reason = f"the store of the rendezvous cannot be asked who succeeds it ({text})"
        if reason and is_active:
            machine.note_refusal(reason)
            return ""
        if reason:
            self.refuse(gone.ranks, what, reason, stuck_s=gone.for_s)
            return f"{what}; no recovery in place: {reason}"
        if is_active:
            machine.begin_again()
        else:
            self._tell()
            machine.begin([])
        self._board_gone = None
        self._board, self._seen, self._endpoint_deed, moment = None, generation, None, time.monotonic()
        noticed = time.time()
        patience = SILENCE_S + self._timeout_s
        self._now = Generation(noticed - gone.for_s, noticed, what, moment + patience, node=gone.name)
        late = moment + (self._timeout_s if claim is None else SILENCE_S)
        self._succession = _Succession(claim, gone, late)
        self._tell_workers({"generation": generation})
        if claim is None:
            self._say_that_it_waits()
        return ""

    def _begins_again(self, gone: Gone) -> bool:
        """Whether the recovery under way is for ranks of the lost first node alone, so that it can begin again on
        another board: nothing has happened to the survivors yet."""
        machine = self._machine
        return self._succession is None and not machine.has_state and machine.dead <= set(gone.ranks)

    def _look_at_succession(self, now: _Succession) -> None:
        """Come to the new first node, and begin the recovery there. Raises ERRORS."""
        generation, node = self._machine.generation, self._nodes.node
        if now.claim is None:
            self._look_for_claim(now, generation)
            return
        if self._board is None:
            self._move(now.claim, generation)
            return
        if time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + _LOOK_S
        board, key = self._board, f"{generation}/plan"
        assert now.claim is not None
        if now.claim.node == node and not self._assembles(now, board, generation):
            return
        plan = board.read([key]).get(key)
        if plan is None or self._names_this_node(plan):
            return
        tell_records(self._nodes, board, generation, [int(rank) for rank in plan["ranks"]])
        self._succession = None
        assert self._now is not None
        self._now.node = printable(str(plan.get("name", "")), _LONGEST)
        self._tell_workers({"generation": generation, "address": now.claim.address, "port": now.claim.port})
        logger.warning(
            "node %d hosts the workers' store now%s", now.claim.node, " (this one)" if now.claim.node == node else ""
        )

    def _look_for_claim(self, now: _Succession, generation: int) -> None:
        """Whether there is a store of the rendezvous again, and who succeeds the first node according to it. Raises
        ERRORS."""
        if self._meets_late(now.late) or time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + _LOOK_S
        what = self._hear_endpoint()
        claim = None
        if what is Deed.CLAIM:
            claim = self._nodes.claim(generation)
        elif what is Deed.READ:
            claim = self._nodes.read_claim(generation)
        if claim is None:
            return
        found = meaning(claim, node=self._nodes.node, first=now.gone.node)
        if found is Meaning.OUT:
            self._is_named = True
        elif found is Meaning.RESTART:
            self._call_off(claim.refusal or f"{now.gone.name} is lost, while the loss of another node is recovered")
        else:
            assert self._now is not None
            moment = time.monotonic()
            now.claim, now.late = claim, moment + SILENCE_S
            self._now.deadline = moment + SILENCE_S + self._timeout_s

    def _say_that_it_waits(self) -> None:
        logger.warning(
            "the host of the rendezvous is lost; this node's ranks wait up to %.0f s for another one "
            "(--rejoin-timeout): start the same command on the machine that has the address %s",
            self._timeout_s,
            self._nodes.endpoint,
        )

    def _meets_late(self, late: float) -> bool:
        """Whether it is too late for another store of the rendezvous; then the recovery has been called off."""
        if time.monotonic() <= late or not (reason := self._why_no_endpoint()):
            return False
        self._call_off(reason)
        return True

    def _why_no_endpoint(self) -> str:
        """What has not come of another store of the rendezvous; empty: it is there."""
        if self._endpoint_deed is None:
            return (
                f"no other host of the rendezvous has come within {self._timeout_s:g} s (--rejoin-timeout); start the "
                f"same command on the machine that has the address {self._nodes.endpoint}, and on the other nodes"
            )
        if self._endpoint_deed is Deed.READ:
            return (
                "this agent has stood still, so that it may have been given up, and no other one has come to the host "
                f"of the rendezvous at {self._nodes.endpoint} within {self._timeout_s:g} s (--rejoin-timeout)"
            )
        return ""

    def _hear_endpoint(self) -> Deed | None:
        """What is to be done at the endpoint; None: nothing yet, or this node is out, or the recovery is called off."""
        if (found := self._nodes.found()) is not None:
            self._endpoint_deed = found.deed
            logger.info("the endpoint %s answers: %s", self._nodes.endpoint, found.deed.value)
            if found.deed is Deed.OUT:
                self._is_named = True
            elif found.deed is Deed.RESTART:
                self._call_off(f"at the endpoint {self._nodes.endpoint} the job has begun anew without this node")
        return None if self._endpoint_deed in (Deed.OUT, Deed.RESTART) else self._endpoint_deed

    def _move(self, claim: Claim, generation: int) -> None:
        """The board, the plans and the agents' connections are at the new first node's."""
        self._watch.stop()
        if isinstance(self._board_of, Boards):
            self._board_of.close()
        found = self._connect_to(claim.address, claim.port)
        self._board_of, self._watch, self._place = found.boards, found.watch, found.place
        self._watch.newest = generation
        self._watch.start()
        board = self._board_of(generation)
        self._nodes.follow(claim, sorted(self._workers.processes))
        board.write(f"{generation}/here/{self._nodes.node}", {"generation": generation})
        self._tell_of_nodes(board, generation)
        self._board = board

    def _assembles(self, now: _Succession, board: Notes, generation: int) -> bool:
        """The new first node's agent: whether it is known who is lost, and the recovery has its plan."""
        nodes, others = self._nodes, {}
        keys = {f"{generation}/here/{node}": node for node in range(nodes.num_nodes) if node != nodes.node}
        for key, note in board.read(list(keys)).items():
            others[keys[key]] = Standing.from_json(note)
        is_late = time.monotonic() > now.late
        found = assemble(nodes.num_nodes, generation, others, first=now.gone.node, node=nodes.node, is_late=is_late)
        if found.refusal:
            self._call_off(found.refusal)
        if found.refusal or not found.is_complete:
            return False
        lost = [now.gone if node == now.gone.node else self._never_came(node) for node in found.lost]
        claim = nodes.settle_loss(generation, found.lost)
        if claim.node != nodes.node or claim.refusal:
            raise RuntimeError(claim.refusal or f"node {claim.node} hosts the workers' store")
        ranks = [rank for gone in lost for rank in gone.ranks]
        assert self._now is not None
        name = "; ".join(gone.name for gone in lost)
        plan = {"generation": generation, "rank": ranks[0], "cause": self._now.cause, "node": lost[0].node}
        plan |= {"name": name, "nodes": list(found.lost), "ranks": ranks}
        board.write(f"{generation}/plan", plan)
        for gone in lost:
            if gone is not now.gone:
                logger.error("node %d (%s) has not come either: it is lost, too", gone.node, gone.name)
            self._open_place(gone)
        return True

    def _never_came(self, node: int) -> Gone:
        agent = self._nodes.agent_of(node)
        if agent is None:
            raise ValueError(f"it is not known which ranks node {node} has")
        return Gone(node, agent.name, "", tuple(agent.ranks), is_silent=False)

    def _tell_workers(self, content: Mapping[str, Any]) -> None:
        """Where the board is. Raises OSError."""
        temp = self._folder / f".{BOARD_FILE}"
        temp.write_text(json.dumps(content))
        os.replace(temp, self._folder / BOARD_FILE)

    # --- the first node's agent ---------------------------------------------------------------------------------------

    def _look_at_place_of(self, gone: Gone) -> None:
        """The agent that had taken the place of a lost node is lost, too."""
        if self._opens.is_taken(gone.node) and self.is_active:
            self._call_off(f"the agent that has taken the place of node {gone.node} is gone, too")

    def _lose(self, gone: Gone, what: str) -> str:
        machine = self._machine
        if self._succession is not None:
            self._call_off(f"{what}, while the nodes met anew")
            return ""
        has_joined = False
        if self.is_active:
            assert self._board is not None
            keys = [f"{machine.generation}/joins/{rank}" for rank in gone.ranks]
            has_joined = bool(self._board.read(keys))
        opens = self._opens.lost if self._opens.generation == machine.generation else []
        if self.is_active and self._opens.is_open(gone.node):
            return ""
        now = answer(machine, gone.ranks, has_joined=has_joined, is_open=bool(opens))
        if now is Answer.NOTHING:
            return ""
        if now is Answer.CALL_OFF:
            self._call_off(f"{what}, during the recovery")
            return ""
        generation = machine.generation + (now is Answer.BEGIN)
        lost = [gone.node, *(opens if now is Answer.OPEN else [])]
        if self._unsettled is not None:
            self._unsettled.gone.append(gone)
            return ""
        claim, is_settled = Claim(node=self._nodes.node), True
        try:
            claim = self._nodes.settle_loss(generation, lost)
        except ERRORS:
            is_settled = False
            if not self._nodes.seek(generation, lost):
                raise
        if claim.node != self._nodes.node and not claim.refusal:  # it has lost this one, and was faster
            self._is_named = True
            return ""
        if now is Answer.BEGIN:
            reason = claim.refusal or self.why_not(())
            self._seen = max(self._seen, generation)
            self._tell()
            board = self._board_of(generation)
            plan = {"generation": generation, "rank": gone.ranks[0], "cause": what, "node": gone.node}
            plan = {"refusal": reason} if reason else {**plan, "name": gone.name, "nodes": [gone.node]}
            reason = str(board.write(f"{generation}/plan", plan).get("refusal", ""))  # of another agent, perhaps
            if reason:
                self.refuse(gone.ranks, what, reason, stuck_s=gone.for_s)
                return f"{what}; no recovery in place: {reason}"
            machine.begin([])
            self._tell_of_nodes(board, generation)
            self._board, noticed = board, time.time()
            self._now = Generation(noticed - gone.for_s, noticed, what, time.monotonic() + self._timeout_s)
        if is_settled:
            self._open_place(gone)
            return ""
        assert self._now is not None
        self._now.node = self._now.node or gone.name
        self._unsettled, self._endpoint_deed = _Unsettled([gone], self._now.deadline), None
        self._say_that_it_waits()
        return ""

    def _look_at_unsettled(self, now: _Unsettled) -> None:
        """Whether there is a store of the rendezvous again: then the lost nodes' places are offered there. Raises
        ERRORS."""
        if self._meets_late(now.late) or time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + _LOOK_S
        what, generation = self._hear_endpoint(), self._machine.generation
        if what is None:
            return
        lost = {*(gone.node for gone in now.gone), *self._opens.lost}
        if what is Deed.CLAIM:
            claim = self._nodes.settle_loss(generation, sorted(lost))
        elif (read := self._nodes.read_claim(generation)) is None:
            return
        else:
            claim = read
        if claim.node != self._nodes.node and not claim.refusal:
            self._is_named = True
        elif claim.refusal:
            self._call_off(claim.refusal)
        else:
            assert self._now is not None
            deadline, self._unsettled = self._now.deadline, None
            for gone in now.gone:
                self._open_place(gone)
            # The workers know of one time-out only, which has begun when the node was lost.
            self._now.deadline = max(deadline, time.monotonic() + _LATER_S)

    def _open_place(self, gone: Gone) -> None:
        """Raises ERRORS."""
        assert self._now is not None and self._board is not None
        self._opens.open(gone, self._place(), self._now, self._board)


def _numbers(ranks: Sequence[int]) -> str:
    return listed([str(rank) for rank in ranks], 8)
