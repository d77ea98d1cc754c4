"""An agent's view of the other nodes' agents, over all attempts: who hosts the workers' store, where they are heard,
and what they have told each other in the store of torch's rendezvous."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mindx_elastic.agent.lifeline import Gone, Lifeline, LifelineHost
from mindx_elastic.agent.nodes import connect
from mindx_elastic.agent.rendezvous import HostedStoreRendezvous
from mindx_elastic.agent.vacancies import (
    Agent,
    Seeker,
    Vacancy,
    claim,
    offer,
    root_store,
    say_who,
    settle_loss,
    tell_nodes,
    who_is,
)
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.succession import Claim, keepers

__all__ = ["NodeWatch"]

_ANSWER_S = 5.0
_PATIENCE_S = 3.0  # all agents have met a moment before
_T = TypeVar("_T")


class NodeWatch:
    """Main thread. What asks the store of the rendezvous waits 5 s at most, and raises what torch raises, TimeoutError,
    ValueError, KeyError, TypeError."""

    def __init__(
        self, handler: HostedStoreRendezvous, *, ranks: int, can_join: bool, stand_by: Callable[[], None]
    ) -> None:
        """`ranks`: processes of this node. can_join: they can be started as new processes of a running job. `stand_by`
        is called when this node begins to wait for a place."""
        self._handler, self._ranks, self._can_join = handler, ranks, can_join
        self._thread = ReadyThread("mindx-vacancies")
        self.node, self.num_nodes = 0, 1
        """Of this attempt."""
        self.first = 0
        """The node whose agent hosts the workers' store: at the beginning node 0."""
        self.host: LifelineHost | None = None
        """Hears ranks of other nodes, and on the first node the other agents."""
        self.line: Lifeline | None = None
        """To the first node's agent; None on the first node."""
        self._first_agent: Agent | None = None
        self._has_first_gone = False
        handler.seeker = Seeker(handler.inner, self._claim_place, self._why_not, stand_by)

    @property
    def place(self) -> Vacancy | None:
        """Of a lost node, which this one has in this attempt."""
        return self._handler.place

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
        with suppress(Exception):  # any of torch's; then nobody succeeds the first node
            self._ask(partial(say_who, scope=handler.scope, agent=self._own(ranks)))
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

    def _line_to(self, address: tuple[str, int], node: int, ranks: Sequence[int], token: str = "") -> Lifeline:
        token = token or secrets.token_hex(8)
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
        if self._handler.seeker is not None:
            self._handler.seeker.was_out = is_out

    def _hold(self, line: Lifeline | None) -> None:
        """The one before ends without a goodbye: nobody is to wait for the node that it spoke for."""
        if self.line is not None:
            self.line.close(says_bye=False)
        self.line = line

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
            address, store_port = self._handler.host()
            return Claim(node=self.node, address=address, port=store_port, lifeline=port)

        found = self._ask(partial(claim, scope=self._handler.scope, generation=generation, own=own))
        assert found is not None
        if found.node != self.node or found.refusal:
            self._handler.hosted = None
        return found

    def settle_loss(self, generation: int, lost: Sequence[int]) -> Claim:
        """This is the first node, and has lost others: the claim that counts."""
        scope = self._handler.scope
        return self._ask(partial(settle_loss, scope=scope, generation=generation, node=self.node, lost=lost))

    def agent_of(self, node: int) -> Agent | None:
        """What the agent of a node has said of itself in this attempt; None: nothing."""
        return self._ask(partial(who_is, scope=self._handler.scope, node=node))

    def follow(self, found: Claim, ranks: Sequence[int]) -> None:
        """`found` is the first node from now on. Raises OSError where it cannot be reached."""
        address = (found.address, found.lifeline)
        if found.node == self.node:
            self._hold(None)
        else:
            line = self._line_to(address, self.node, ranks)
            if not line.start():
                line.close(says_bye=False)
                raise OSError(f"node {found.node}, which hosts the workers' store now, does not answer at {address}")
            self._hold(line)
        self._handler.lifeline = address
        self.first = found.node
        self._first_agent, self._has_first_gone = None, False
        self._who_is_first()

    def keeper(self) -> dict[str, Any] | None:
        """For the board: where this node's agent hears ranks; None: it keeps no small records."""
        if self.host is None or self.node not in keepers(self.first, self.num_nodes):
            return None
        return {"address": self._handler.own_address, "port": self.host.port}
