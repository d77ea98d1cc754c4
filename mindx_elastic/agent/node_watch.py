"""An agent's view of the other nodes' agents, over all attempts: who hosts the workers' store, where they are heard,
and what they have told each other in the store of torch's rendezvous."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mindx_elastic.agent.endpoint import (
    Finder,
    Found,
    GoesOn,
    Kept,
    address_of,
    come_in,
    holder_of,
    identify,
    move,
    remember,
)
from mindx_elastic.agent.lifeline import Gone, Lifeline, LifelineHost
from mindx_elastic.agent.nodes import connect
from mindx_elastic.agent.rendezvous import HostedStoreRendezvous, reconnect
from mindx_elastic.agent.vacancies import (
    Agent,
    Seeker,
    Vacancy,
    claim,
    keys_of_agents,
    offer,
    root_store,
    say_who,
    settle_loss,
    tell_nodes,
    who_is,
)
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.ready_thread import Job, ReadyThread
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.succession import Claim, keepers

__all__ = ["NodeWatch", "first_place"]

_ANSWER_S = 5.0
_PATIENCE_S = 3.0  # all agents have met a moment before
_T = TypeVar("_T")


class NodeWatch:
    """Main thread. What asks the store of the rendezvous waits 5 s at most, and raises what torch raises, TimeoutError,
    ValueError, KeyError, TypeError."""

    def __init__(
        self,
        handler: HostedStoreRendezvous,
        *,
        ranks: int,
        can_join: bool,
        stand_by: Callable[[], None],
        patience_s: float = 0.0,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """`ranks`: processes of this node. can_join: they can be started as new processes of a running job. `stand_by`
        is called when this node begins to wait for a place. `patience_s`: how long a standby node waits for another
        store of the rendezvous, where that is lost. `on_move` is called when `handler` uses another one."""
        self._handler, self._ranks, self._can_join = handler, ranks, can_join
        self._on_move = on_move
        self._thread = ReadyThread("mindx-vacancies")
        self.node, self.num_nodes = 0, 1
        """Of this attempt."""
        self.first = 0
        """The node whose agent hosts the workers' store: at the beginning node 0."""
        self.host: LifelineHost | None = None
        """Hears ranks of other nodes, and on the first node the other agents."""
        self.line: Lifeline | None = None
        """To the first node's agent; None on the first node."""
        self.lost: dict[int, str] = {}
        """The nodes that are lost and whose places are free, and the words for it."""
        self._first_agent: Agent | None = None
        self._has_first_gone = False
        self._kept: list[Job[Kept]] = []
        """What the meeting has left in the store of the rendezvous; the newest first."""
        self._finder: Finder | None = None
        self._own_claims: dict[int, Claim] = {}
        """By recovery. A question to a store that stood still may be answered much later, beside another one."""
        self._lock = threading.Lock()
        handler.seeker = Seeker(
            handler.inner,
            self._claim_place,
            self._why_not,
            stand_by,
            reconnect=lambda inner: reconnect(handler),
            patience_s=patience_s,
        )

    @property
    def place(self) -> Vacancy | None:
        """Of a lost node, which this one has in this attempt."""
        return self._handler.place

    @property
    def job(self) -> str:
        """A name of the job that no other one has, as long as its rendezvous has the same store."""
        return self._handler.identity

    @property
    def scope(self) -> str:
        """A name of the attempt that is the same on all nodes."""
        return self._handler.scope

    @property
    def is_first(self) -> bool:
        return self.node == self.first

    def open(self, *, node: int, num_nodes: int, ranks: Sequence[int]) -> str:
        """The nodes have met. What the workers need to know of the nodes (``MINDX_REJOIN_NODES``); empty: the loss of a
        node is not seen."""
        handler = self._handler
        self.host, self.node, self.num_nodes = handler.lifelines, node, num_nodes
        self.first = 0 if self.place is None else self.place.host
        self._first_agent, self._has_first_gone = None, False
        self._own_claims, self._kept, self.lost = {}, [], {}
        with suppress(Exception):  # any of torch's; then nobody succeeds the first node
            self._ask(partial(say_who, scope=handler.scope, agent=self._own(ranks)))
        with suppress(Exception):  # then the host of the rendezvous may not be lost
            handler.identity = self._ask(identify)
        self.remember()
        if self.place is None and not self._open_line(ranks):
            return ""
        told, patience_s = [str(self.first)], _PATIENCE_S if self.place is None else 0.0
        for other in keepers(self.first, num_nodes):
            with suppress(Exception):
                agent = self._ask(partial(who_is, scope=handler.scope, node=other, patience_s=patience_s))
                if agent is not None and agent.lifeline:
                    told.append(f"{other}={agent.address}:{agent.lifeline}")
                if agent is not None and other == self.first:
                    self._first_agent = agent
        return " ".join(told)

    def _own(self, ranks: Sequence[int]) -> Agent:
        port = 0 if self.host is None else self.host.port
        return Agent(self.node, self._name, self._handler.own_address, port, ranks[0], len(ranks))

    @property
    def _name(self) -> str:
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def _open_line(self, ranks: Sequence[int]) -> bool:
        handler = self._handler
        self._hold(None)  # it had a place, and could not start there
        if self.is_first:
            with suppress(Exception):  # any of torch's: then a late node goes into the rendezvous, as ever
                self._ask(lambda store, run_id: tell_nodes(store, run_id, self.num_nodes))
                self.offer(None)
            return self.host is not None
        if handler.lifeline[1] == 0:
            return False
        line = self._line_to(handler.lifeline, self.node, ranks)
        if line.start():
            self.line = line
            return True
        logger.warning("the first node's agent cannot be reached: the loss of this node restarts the job")
        line.close()
        return False

    def _line_to(self, address: tuple[str, int], node: int, ranks: Sequence[int]) -> Lifeline:
        token = secrets.token_hex(8)
        return Lifeline(address, self._handler.scope, board_key(), node=node, token=token, ranks=ranks)

    def offer(self, place: Vacancy | None) -> None:
        """None: no place is offered any more."""
        self._ask(lambda store, run_id: offer(store, run_id, place))

    def _ask(self, work: Callable[[Any, str], _T]) -> _T:
        """Do `work` with the store of the rendezvous and the name of the job; the store may never answer."""
        store, run_id = root_store(self._handler.inner), self._handler.get_run_id()
        return self._thread.call(lambda: work(store, run_id), _ANSWER_S)

    def close(self, *, is_out: bool = False) -> None:
        """The attempt has ended. is_out: because this node was taken for lost."""
        if self.line is not None:
            self.line.close()
        if self.host is not None:
            self.host.close(says_bye=not is_out)
        self.line = self.host = self._handler.lifelines = None
        self._handler.identity = ""
        self.give_up_seeking()
        if self._handler.seeker is not None:
            self._handler.seeker.was_out = is_out

    def _hold(self, line: Lifeline | None, *, succeeds: bool = False) -> None:
        """The one before ends without a goodbye: nobody is to wait for the node that it spoke for. `succeeds`: nor is
        the one at its other end to go on."""
        if self.line is not None:
            self.line.close(says_bye=False, says_out=succeeds)
        self.line = line

    # --- the store of the rendezvous is lost --------------------------------------------------------------------------

    def remember(self) -> None:
        """What the others need, should the store of the rendezvous be lost."""
        inner, scope, run_id = self._handler.inner, self._handler.scope, self._handler.get_run_id()
        keys, num_nodes = keys_of_agents(run_id, scope, self.num_nodes), self.num_nodes
        if address_of(inner) is None or not self._handler.identity:
            return
        thread = ReadyThread("mindx-meeting")
        with suppress(RuntimeError):  # no more threads
            job = thread.submit(lambda: remember(inner, root_store(inner), keys, num_nodes))
            self._kept = [job, *self._kept[:2]]
        thread.close(0.0)

    def _what_is_kept(self) -> Kept | None:
        for job in self._kept:
            with suppress(Exception):  # of torch's: it has not answered
                return job.wait(0.0)
        return None

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` of the rendezvous; empty: its store is none that has one."""
        address = address_of(self._handler.inner)
        return "" if address is None else f"{address[0]}:{address[1]}"

    def seek(self, generation: int, lost: Sequence[int]) -> bool:
        """The store of the rendezvous does not answer: look for it, or for another one at its address. Whether that can
        be done."""
        self.give_up_seeking()
        if address_of(self._handler.inner) is None or not self._handler.identity or self._what_is_kept() is None:
            return False
        self._finder = Finder(
            self._handler.inner,
            run_id=self._handler.get_run_id(),
            identity=self._handler.identity,
            scope=self._handler.scope,
            generation=generation,
            node=self.node,
            lost=lost,
            kept=self._what_is_kept,
            is_sure=self._is_sure,
        ).start()
        return True

    def _is_sure(self) -> bool:
        return self.host is not None and self.host.is_sure(self.line)

    def found(self) -> Found | None:
        """What `seek` has come to; None: nothing yet. A store in which the notes count is used from now on."""
        if self._finder is None or (found := self._finder.found) is None:
            return None
        self._finder = None
        if found.store is not None:
            move(self._handler.inner, found)
            self._handler.identity = found.identity
            self._thread = ReadyThread("mindx-vacancies")  # the old one may be stuck
            self._on_move()
        return found

    def give_up_seeking(self) -> None:
        if self._finder is not None:
            self._finder.stop()
        self._finder = None

    def settle_in(self, generation: int) -> None:
        """At the end of a recovery: this node is among those that torch knows, in the store of the rendezvous that the
        others use. They may have lost it, and settled in another one who has the place of a lost node, without this
        node's help. Where its own does not answer it is looked for as with `seek`: `found` says when there is one."""
        inner, kept = self._handler.inner, self._what_is_kept()
        if address_of(inner) is None:
            return

        def come(store: Any, run_id: str) -> None:
            holder = holder_of(inner, store, run_id)
            if kept is not None and holder.state.round == kept.round:  # the others have not met anew since
                come_in(inner, holder, self.node)

        try:
            self._ask(come)
        except Exception as error:  # any of torch's
            logger.debug("the store of the rendezvous does not answer: %s", printable(str(error), 200))
            self.seek(generation, [])

    def read_claim(self, generation: int) -> Claim | None:
        """Who hosts the board of this recovery; None: nobody yet."""
        return self._ask(partial(claim, scope=self._handler.scope, generation=generation, own=None))

    # --- a place ------------------------------------------------------------------------------------------------------

    def _why_not(self, place: Vacancy) -> str:
        if not self._can_join:
            return "its program is not run by this Python interpreter"
        if place.ranks != self._ranks:
            return f"it needs {place.ranks} processes on the node, and this one has {self._ranks} (--nproc-per-node)"
        return ""

    def _claim_place(self, place: Vacancy) -> bool:
        token, ranks = secrets.token_hex(8), range(place.first, place.first + place.ranks)
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
                note = board.write(f"{number}/taken/{place.node}", {"token": token, "name": self._name})
                has_it = note.get("token") == token
        finally:
            if has_it:
                self._hold(line)
            else:
                line.close(says_bye=False)
        return has_it

    # --- who is lost, and who succeeds the first node -----------------------------------------------------------------

    def gone(self) -> list[Gone]:
        """The nodes that give no sign of life now, as far as this one has to see to it."""
        found: list[Gone] = []
        if self.host is not None:
            self.host.drain()
            found = self.host.gone() if self.is_first else []
        if self.line is not None and not self._has_first_gone:
            self.line.drain()
            if (since := self.line.gone()) is not None and (agent := self._who_is_first()) is not None:
                found.append(Gone(agent.node, agent.name, "", tuple(agent.ranks), *since))
        return found

    def note_lost(self, lost: Mapping[int, str]) -> None:
        """A recovery begins, or does not, because of these nodes."""
        self.lost |= {node: cause for node, cause in lost.items() if node not in self.lost}

    def note_whole(self) -> None:
        """A recovery is over: others have the places of all lost nodes."""
        self.lost = {}

    @property
    def heard(self) -> set[int]:
        """The nodes whose agents hold a connection to this one, or this one to them."""
        found = set(self.host.heard) if self.host is not None and self.is_first else set()
        return found | ({self.first} if self.line is not None and self.line.is_heard else set())

    def _who_is_first(self) -> Agent | None:
        if self._first_agent is None:
            try:
                self._first_agent = self.agent_of(self.first)
            except Exception as error:  # any of torch's: its loss restarts the job
                self._has_first_gone = True
                logger.debug("node %d is not known: %s", self.first, printable(str(error), 200))
        return self._first_agent

    def note_first_gone(self) -> None:
        """It is taken care of."""
        self._has_first_gone = True

    def claim(self, generation: int, *, refusal: str = "") -> Claim:
        """Who hosts the board of this recovery, after the first node is lost: this node, if it is the first to ask.
        `refusal`: why it does not."""
        if self.host is None:
            refusal = refusal or f"the agent of node {self.node} cannot be reached by others"
        port = 0 if self.host is None else self.host.port

        def own() -> Claim:
            if refusal:
                return Claim(node=self.node, refusal=refusal)
            with self._lock:
                if generation not in self._own_claims:
                    address, store_port = self._handler.host()
                    mine = Claim(node=self.node, address=address, port=store_port, lifeline=port)
                    self._own_claims[generation] = mine
                return self._own_claims[generation]

        found = self._ask(partial(claim, scope=self._handler.scope, generation=generation, own=own))
        assert found is not None
        if found.node != self.node or found.refusal:
            self._handler.hosted = None
            self._own_claims.pop(generation, None)
        else:
            self._hold_meeting(generation)
        return found

    def _hold_meeting(self, generation: int) -> None:
        """This node hosts the board of a recovery, and so the meeting goes on. The store may have stood still for a
        while, but not for so long that it had to be looked for."""
        inner, goes_on = self._handler.inner, GoesOn(self._handler.scope, generation, self._what_is_kept())
        if address_of(inner) is not None:
            with suppress(Exception):  # any of torch's; then the node that comes may not find its way to the place
                self._ask(lambda store, run_id: come_in(inner, holder_of(inner, store, run_id), self.node, goes_on))

    def settle_loss(self, generation: int, lost: Sequence[int]) -> Claim:
        """This is the first node, and has lost others: the claim that counts."""
        scope = self._handler.scope
        found = self._ask(partial(settle_loss, scope=scope, generation=generation, node=self.node, lost=lost))
        if found.node == self.node and not found.refusal:
            self._hold_meeting(generation)
        return found

    def agent_of(self, node: int) -> Agent | None:
        """What the agent of a node has said of itself in this attempt; None: nothing."""
        return self._ask(partial(who_is, scope=self._handler.scope, node=node))

    def follow(self, found: Claim, ranks: Sequence[int]) -> None:
        """`found` is the first node from now on. Raises OSError where it cannot be reached."""
        address = (found.address, found.lifeline)
        if found.node == self.node:
            self._hold(None, succeeds=True)
        else:
            line = self._line_to(address, self.node, ranks)
            if not line.start():
                line.close(says_bye=False)
                raise OSError(f"node {found.node}, which hosts the workers' store now, does not answer at {address}")
            self._hold(line, succeeds=True)
        self._handler.lifeline = address
        self.first = found.node
        self._first_agent, self._has_first_gone = None, False
        self._who_is_first()

    def keeper(self) -> dict[str, Any] | None:
        """For the board: where this node's agent hears ranks; None: it keeps no small records."""
        if self.host is None or self.node not in keepers(self.first, self.num_nodes):
            return None
        return {"address": self._handler.own_address, "port": self.host.port}


def first_place(nodes: NodeWatch | None, address: str, port: int, *, attempt: int) -> Vacancy:
    """Of node 0 in recovery 0 of an attempt: what all its places have in common. `address`, `port`: of the workers'
    store."""
    if nodes is None:
        raise ValueError("the agents do not hear each other, and no place is offered")
    return Vacancy(
        host=nodes.first,
        name="none",
        node=0,
        num_nodes=nodes.num_nodes,
        ranks=0,
        first=0,
        address=address,
        port=port,
        lifeline=0 if nodes.host is None else nodes.host.port,
        scope=nodes.scope,
        generation=0,
        attempt=attempt,
    )
