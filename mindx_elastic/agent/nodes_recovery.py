"""Recoveries in place over several nodes, from an agent's side, also where whole nodes are lost.

Every agent runs a `NodesRecovery` over the same board. The one that sees the death of a rank first writes the plan, the
others read it (`boards.PlanWatch`), look whether their own ranks can take part, and tell those. Each starts the new
processes of its own ranks.

That a whole node is lost the first node's agent decides (`failure_detector`), once, on the board: the plan names the
node. It offers the place in the store of the rendezvous (`standby`) and holds the recovery in its first phase, with all
guards open, until an agent has claimed it: then it notes the lost ranks to be dead, and everything goes on as where
single ranks have died. Several places are offered one after the other. The agent that has a place starts all of its
workers as new processes of the recovery that is under way (`NodeWatch.place`). Nobody comes within --rejoin-timeout:
the job is restarted, as without recovery in place. `rejoin.lost_node` has the rules.

The first node itself is lost: the workers' store has ended with it, so that the ranks save and the job is restarted. So
it is where the store of the rendezvous, in which places are offered, is lost with its host.

Keys of the board, beside those of `rejoin.board` and `recovery`:

==========================  ============================================================================================
``{g}/open/{node}``         the node is lost, and its place is offered in this recovery, which therefore lasts longer
``{g}/taken/{node}``        the agent that has the node's place now
``{g}/keeper/{node}``       where that node's agent hears ranks of others
``{g}/records/{rank}/{n}``  what of a lost rank's ring has come to node n (`rejoin.small_records`)
``{g}/joins/{rank}``        the one new process of the rank that connects to the others
==========================  ============================================================================================
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindx_elastic.agent.boards import Boards, PlanWatch
from mindx_elastic.agent.endings import Meaning, describe, meaning
from mindx_elastic.agent.failure_detector import SILENCE_S, Lost
from mindx_elastic.agent.holder import keep_ring
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.pausing import is_between_steps
from mindx_elastic.agent.recovery import ERRORS, Generation, News, Notes, Recovery
from mindx_elastic.agent.standby import NodePlace
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import listed, printable
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.status_page import NODES_REPLACED, WorkerPhase
from mindx_elastic.rejoin.lost_node import FIRST, Answer, answer, why_in_vain
from mindx_elastic.rejoin.protocol import Phase

__all__ = ["NodesRecovery"]

_LATER_S = 2.0
_LOOK_S = 0.05
_LONGEST = 300


@dataclass
class _Open:
    """A place that is offered, will be, or was taken, in the newest recovery in which there is one."""

    place: NodePlace
    lost: Lost
    is_taken: bool = False


class NodesRecovery(Recovery):
    """One per attempt of several nodes. Main thread."""

    def __init__(self, *arguments: Any, watch: PlanWatch, nodes: NodeWatch, place: NodePlace, **named: Any) -> None:
        """`place`: what all places of this attempt have in common."""
        super().__init__(*arguments, **named)
        self._watch, self._nodes, self._place = watch, nodes, place
        self._seen = 0
        """The last generation whose plan was read, or written."""
        self._is_named = False
        """A note of a recovery says that this node is lost."""
        self._has_lost = False
        self._home: Path | None = None
        """The checkpoint directory, from the loss of a node until the recovery has succeeded."""
        self._opens: list[_Open] = []
        self._look_due = 0.0
        self._longer = 0
        """The recovery whose time has been extended because of a place in it."""

    @property
    def fds(self) -> tuple[int, ...]:
        more = (self._nodes.server, self._nodes.heartbeat)
        return self._watch.wakeup.fd, *(each.wakeup.fd for each in more if each is not None)

    @property
    def is_out(self) -> bool:
        return self._is_named or self._nodes.is_out

    def prepare(self) -> None:
        if not self._is_prepared and isinstance(self._board_of, Boards):
            self._is_prepared = True
            self._board_of.open()

    def close(self) -> None:
        super().close()
        if self.is_active and not self.is_out:  # a stop: the others need not wait for this node
            self._call_off("a node has been stopped during the recovery")
        elif not (self.is_out or self._nodes.has_first_gone):  # a node that stands still may begin it when it wakes up
            if self._machine.phase is Phase.FALLBACK:  # it may have begun that one, and the store did not answer then
                self._refuse_for_all(self._machine.generation, self._machine.reason)
            has_finished = {meaning(end) for end in self._workers.exits} == {Meaning.FINISHED}
            ranks = rank_list(list(self._workers.processes))
            reason = f"{ranks} of another node {'finished the training' if has_finished else 'ended'}"
            self._refuse_for_all(self._machine.generation + 1, reason)
        self._watch.stop()
        if isinstance(self._board_of, Boards):
            self._board_of.close()
        self._withdraw_places()
        if not (self.is_out or self._has_finished):
            self._keep_rings()

    def why_not(self, ranks: Sequence[int], end: WorkerExit | None = None) -> str:
        if end is None and ranks:
            return "which rank the others wait for cannot be told over several nodes"
        if end is not None and end.status is not None and end.status.phase >= WorkerPhase.STOPPING:
            return f"rank {end.rank} has left its guard: {describe(end)}"
        return super().why_not(ranks, end)

    def begin(self, end: WorkerExit, cause: str, *, stuck_s: float = 0.0) -> bool:
        generation = self._machine.generation + 1
        if not self.is_out:  # a node that has just woken up finds its dead before it hears what it is itself
            with suppress(*ERRORS):
                board = self._board_of(generation)
                if not self._note_if_put_out(board, generation):
                    self._tell_of_keeper(board, generation)
        if self.is_out:
            return False
        self._seen = max(self._seen, generation)
        begins = super().begin(end, cause, stuck_s=stuck_s)
        if not begins and not self.is_out:  # another agent may have planned one at this very moment, and would wait
            self._refuse_for_all(generation, f"rank {end.rank} cannot be replaced")
        return begins

    def _refuse_for_all(self, generation: int, reason: str) -> None:
        """The recovery with this number comes to nothing, whoever begins it, unless it is one without this node."""
        with suppress(*ERRORS):
            board = self._board_of(generation)
            if not self._note_if_put_out(board, generation):
                board.write(f"{generation}/over", {"refusal": reason})

    def join(self, place: NodePlace) -> None:
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
            self._now.cause, self._now.node = _text(plan.get("cause", "")), _text(plan.get("name", ""))
            self._now.taken_by = self._nodes.name

    def look(self) -> Phase:
        if self.is_active and not self.is_out:
            try:
                self._look_at_places()
            except ERRORS as error:
                self._machine.note_refusal(f"{type(error).__name__}: {error}")
        was_active = self.is_active
        phase = super().look()
        if was_active and phase is Phase.RUN:
            self._home = None
            self._nodes.note_whole()
        return phase

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
        if "refusal" in plan:
            logger.info("no recovery in place: %s", _text(plan["refusal"]))
            return []
        rank, cause, node = int(plan["rank"]), _text(plan["cause"]), int(plan.get("node", -1))
        if self._note_if_named(plan):
            return []
        if not 0 <= rank < self._machine.world_size or rank in self._workers.processes:
            raise ValueError(f"a plan for rank {rank}")
        reason = "the job is being stopped" if is_stopping else self.why_not([])
        self._tell()
        self._machine.begin([] if node >= 0 else [rank])  # a node's ranks are dead once another one has its place
        self._board = board
        now = time.time()
        self._now = Generation(now, now, cause, time.monotonic() + self._timeout_s)
        if node >= 0:
            self._now.node = _text(plan.get("name", ""))
            self._nodes.note_lost({node: cause})
        with suppress(*ERRORS):  # before this node's workers report
            self._tell_of_keeper(board, generation)
        if reason:
            self._call_off(reason)
            return [News()]
        logger.warning("rank %d of another node is gone; this node's ranks live on", rank)
        return [News(f"rank {rank} is gone", rank)]

    def _note_if_put_out(self, board: Notes, generation: int) -> bool:
        """This node is out if the notes of a recovery say that it is lost. Whether they do. Raises `ERRORS`."""
        node = self._nodes.node
        plan, opened, taken = f"{generation}/plan", f"{generation}/open/{node}", f"{generation}/taken/{node}"
        notes = board.read([plan, opened, taken])
        if notes.get(taken, {}).get("name") == self._nodes.name:
            return False  # this node has come in the place of the lost one
        self._is_named = self._is_named or opened in notes or taken in notes
        return self._note_if_named(notes.get(plan, {}))

    def _note_if_named(self, plan: Mapping[str, Any]) -> bool:
        """This node is out if a plan says that it is lost. Whether that, or a note before it, does."""
        self._is_named = self._is_named or ("node" in plan and plan.get("rank") in self._workers.processes)
        return self._is_named

    def _why_not_plan(self, plan: Mapping[str, Any]) -> str:
        return "this node was taken for lost" if self._note_if_named(plan) else ""

    def _tell(self, *, trains: bool = False) -> None:
        now = self._now
        if now is not None and now.node and not now.taken_by and not now.told and self._board is not None:
            with suppress(*ERRORS):
                keys = [f"{self._machine.generation}/taken/{node}" for node in range(self._nodes.num_nodes)]
                now.taken_by = _text("; ".join(str(note["name"]) for note in self._board.read(keys).values()))
        super()._tell(trains=trains)

    def _tell_of_keeper(self, board: Notes, generation: int) -> None:
        """Where workers may send small records to this node's agent, which may be another one now."""
        if (keeper := self._nodes.keeper()) is not None:
            board.write(f"{generation}/keeper/{self._nodes.node}", keeper)

    def _keep_rings(self) -> None:
        """There was no recovery in place: what this agent has kept of other nodes' ranks is for a start then. Of all
        ranks: which other nodes were lost meanwhile may not be known yet."""
        server, home, done = self._nodes.server, self._home, []
        if server is None or home is None:
            return
        for rank in server.ranks_kept:
            try:
                if keep_ring(home, rank, server.records_of(rank) or {"records": []}):
                    done.append(rank)
            except ERRORS as error:
                logger.warning("what this node has kept of rank %d cannot be brought to disk: %s", rank, error)
        if done:
            logger.info("random streams and buffers of %s are on disk, because a node is lost", rank_list(done))

    # --- a node is lost -----------------------------------------------------------------------------------------------

    @property
    def has_lost_node(self) -> bool:
        return self._has_lost

    def _hear_lost(self, lost: Lost) -> News | None:
        """A node gives no sign of life. One that is silent may only have an agent that stands still."""
        statuses = list(self._workers.statuses().values())
        # In a recovery all of them may be new processes, which have no pages yet.
        can_do_without = self.is_active or bool(statuses)
        can_do_without = can_do_without and all(status.in_place == NODES_REPLACED for status in statuses)
        left = [status for status in statuses if status.finished and status.phase == WorkerPhase.LEFT]
        if not can_do_without or len(left) == len(self._workers.live):
            return None
        quiet_since = time.monotonic_ns() - SILENCE_S * 1e9
        if lost.is_silent and any(s.boundary_ns > quiet_since or is_between_steps(s) for s in statuses):
            return None
        was_active, self._has_lost = self.is_active, True
        self._home = next((Path(each.directory) for each in statuses if each.directory), self._home)
        self._nodes.note_lost({lost.node: lost.words})
        which = listed([str(rank) for rank in lost.ranks], 8)
        logger.error("%s, and with it rank%s %s", lost.words, "s" * (len(lost.ranks) > 1), which)
        reason = self._lose_first(lost) if lost.node == FIRST else self._lose(lost)
        if reason:
            return News(reason)
        if self.is_active and not was_active:
            return News(f"node {lost.node} is lost", lost.ranks[0])
        return News()

    def _lose_first(self, lost: Lost) -> str:
        """Nothing can be agreed on in place: the board was in its store. Why the job must be restarted; empty: it is
        already."""
        self._nodes.note_first_lost()
        if self.is_active:
            self._machine.note_refusal(f"{lost.words}, and it had the workers' store")
        if self._machine.phase is Phase.FALLBACK:
            return ""
        self.refuse(lost.ranks, lost.words, "the lost node had the workers' store", stuck_s=lost.for_s)
        return lost.words

    def _lose(self, lost: Lost) -> str:
        """Why the job must be restarted; empty: a place is open, or a recovery has been called off."""
        assert self._nodes.server is not None
        self._nodes.server.put_out(lost)
        if self.is_active and any(each.is_taken and each.place.node == lost.node for each in self._opens):
            self._call_off(f"the agent that has taken the place of node {lost.node} is gone, too")
        try:
            return self._answer(lost)
        except ERRORS as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if self.is_active:
                self._call_off(reason)
                return ""
            return reason

    def _answer(self, lost: Lost) -> str:
        machine = self._machine
        if any(each.place.node == lost.node and not each.is_taken for each in self._opens_now()):
            return ""
        if machine.phase is Phase.RUN and (reason := self._begin_without(lost)):
            self.refuse(lost.ranks, lost.words, reason, stuck_s=lost.for_s)
            return f"{lost.words}; no recovery in place: {reason}"
        has_joined = False
        if self.is_active and self._board is not None:  # the plan may be the lost agent's own, for a rank of its own
            has_joined = bool(self._board.read([f"{machine.generation}/joins/{rank}" for rank in lost.ranks]))
        match answer(machine, lost.ranks, has_joined=has_joined, is_open=bool(self._opens_now())):
            case Answer.CALL_OFF:
                self._call_off(f"{lost.words}, during the recovery")
            case Answer.OPEN:
                self._open_place(lost)
        return ""

    def _begin_without(self, lost: Lost) -> str:
        """Begin a recovery because of a lost node. Why not; empty: it has begun."""
        generation, reason = self._machine.generation + 1, self.why_not(())
        self._seen = max(self._seen, generation)
        self._tell()
        board = self._board_of(generation)
        plan = {"generation": generation, "rank": lost.ranks[0], "cause": lost.words, "node": lost.node}
        plan = {"refusal": reason} if reason else {**plan, "name": lost.name}
        reason = str(board.write(f"{generation}/plan", plan).get("refusal", ""))  # of another agent, perhaps
        if not reason:
            self._machine.begin([])
            self._tell_of_keeper(board, generation)
            self._board, noticed = board, time.time()
            self._now = Generation(noticed - lost.for_s, noticed, lost.words, time.monotonic() + self._timeout_s)
        return reason

    # --- places, one after the other ----------------------------------------------------------------------------------

    def _opens_now(self) -> list[_Open]:
        """Those of the recovery under way."""
        return [each for each in self._opens if each.place.generation == self._machine.generation]

    def _open_place(self, lost: Lost) -> None:
        """The place of a lost node can be taken in the recovery under way, behind those that are open already."""
        assert self._now is not None and self._board is not None
        now, generation = self._now, self._machine.generation
        first, ranks = lost.ranks[0], len(lost.ranks)
        name = secrets.token_hex(8)
        place = replace(self._place, name=name, node=lost.node, ranks=ranks, first=first, generation=generation)
        self._opens = self._opens_now()
        if not self._opens:
            now.node, now.deadline = "", time.monotonic() + self._timeout_s
        now.node = "; ".join(filter(None, (now.node, lost.name)))
        is_next = all(each.is_taken for each in self._opens)
        self._opens.append(_Open(place, lost))
        self._board.write(f"{generation}/open/{lost.node}", {"name": lost.name})
        if is_next:
            self._nodes.offer(place)
        logger.warning(
            "the other nodes' ranks wait up to %.0f s for another node in the place of node %d (--rejoin-timeout): "
            "start the same command there",
            max(0.0, now.deadline - time.monotonic()),
            lost.node,
        )

    def _look_at_places(self) -> None:
        assert self._now is not None and self._board is not None
        now, board, generation = self._now, self._board, self._machine.generation
        moment = time.monotonic()
        is_late = moment > now.deadline
        if free := [each for each in self._opens_now() if not each.is_taken]:
            if moment >= self._look_due or is_late:
                self._look_due = moment + _LOOK_S
                self._look_at_offer(free, now, board, is_late=is_late)
        elif is_late and not self._opens_now() and self._longer != generation:
            notes = board.read([f"{generation}/open/{node}" for node in range(self._nodes.num_nodes)])
            if notes:  # the first node's agent has opened them
                self._longer = generation
                now.deadline = moment + self._timeout_s + _LATER_S
                now.node = now.node or _text("; ".join(str(note["name"]) for note in notes.values()))

    def _look_at_offer(self, free: Sequence[_Open], now: Generation, board: Notes, *, is_late: bool) -> None:
        """Has an agent taken the place that is offered, the first of those that are `free`?"""
        node, ranks, generation = free[0].place.node, free[0].lost.ranks, self._machine.generation
        if reason := why_in_vain(self._machine, [rank for each in free for rank in each.lost.ranks]):
            self._call_off(reason)
            return
        key = f"{generation}/taken/{node}"
        note = board.read([key]).get(key)
        if note is None:
            if is_late:
                self._call_off(self._why_late(now))
            return
        assert self._nodes.server is not None
        by, free[0].is_taken = _text(note["name"]), True
        now.taken_by = "; ".join(filter(None, (now.taken_by, by)))
        self._nodes.server.expect(node, str(note["token"])[:64])
        logger.warning("%s has taken the place of node %d (%s)", by, node, free[0].lost.name)
        for rank in ranks:
            if (kept := self._nodes.server.records_of(rank)) is not None:
                board.write(f"{generation}/records/{rank}/{self._nodes.node}", kept)
        for rank in ranks:
            if not board.write(f"{generation}/out/{rank}", {"dead": True}).get("dead"):
                self._call_off(f"rank {rank} has died during the recovery")
        if len(free) > 1:
            self._nodes.offer(free[1].place)
            return
        now.deadline = time.monotonic() + self._timeout_s
        self._withdraw_places(keeps=True)

    def _why_late(self, now: Generation) -> str:
        free = [each.place.node for each in self._opens_now() if not each.is_taken]
        if not free:
            return super()._why_late(now)
        return f"no other node has taken the place of node {free[0]} within {self._timeout_s:g} s (--rejoin-timeout)"

    def _call_off(self, reason: str) -> None:
        with suppress(*ERRORS):
            if self._board is not None and self._note_if_put_out(self._board, self._machine.generation):
                self._machine.note_refusal(reason)  # the others go on without this node
                return
        super()._call_off(reason)

    def _give_up(self) -> None:
        if self.is_out:
            self._has_given_up = True
        else:
            super()._give_up()
        self._withdraw_places()

    def _withdraw_places(self, *, keeps: bool = False) -> None:
        """There is no place to take any more. `keeps`: it stays known who has taken them. Never raises."""
        if self._opens:
            with suppress(Exception):  # any of torch's; who takes it then finds the recovery over, or its store gone
                self._nodes.offer(None)
        if not keeps:
            self._opens = []


def _text(value: object) -> str:
    return printable(str(value), _LONGEST)
