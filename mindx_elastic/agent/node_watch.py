"""An agent's view of the other nodes' agents, over all attempts: where they are heard, and what they have told each
other in the store of torch's rendezvous."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
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
    identify,
    offer,
    root_store,
    say_who,
    tell_nodes,
    who_is,
)
from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.lost_node import FIRST, keepers

__all__ = ["NodeWatch", "first_place"]

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
        self.job = ""
        """A name of the job that no other one has, as long as its rendezvous has the same store; empty: not known."""
        self.host: LifelineHost | None = None
        """Hears ranks of other nodes, and on the first node the other agents."""
        self.line: Lifeline | None = None
        """To the first node's agent; None on the first node."""
        self.lost: dict[int, str] = {}
        """The nodes that are lost and whose places are free, and the words for it."""
        self._first_agent: Agent | None = None
        self._has_first_gone = False
        handler.seeker = Seeker(handler.inner, self._claim_place, self._why_not, stand_by)

    @property
    def place(self) -> Vacancy | None:
        """Of a lost node, which this one has in this attempt."""
        return self._handler.place

    @property
    def scope(self) -> str:
        """A name of the attempt that is the same on all nodes."""
        return self._handler.scope

    @property
    def is_first(self) -> bool:
        return self.node == FIRST

    def open(self, *, node: int, num_nodes: int, ranks: Sequence[int]) -> str:
        """The nodes have met. What the workers need to know of the nodes (``MINDX_REJOIN_NODES``); empty: the loss of a
        node is not seen."""
        handler = self._handler
        self.host, self.node, self.num_nodes = handler.lifelines, node, num_nodes
        self._first_agent, self._has_first_gone, self.job, self.lost = None, False, "", {}
        with suppress(Exception):  # any of torch's; then this node keeps no small records of others
            self._ask(partial(say_who, scope=handler.scope, agent=self._own(ranks)))
        with suppress(Exception):
            self.job = self._ask(identify)
        if self.place is None and not self._open_line(ranks):
            return ""
        address, port = handler.lifeline
        told, patience_s = [f"{FIRST}={address}:{port}"], _PATIENCE_S if self.place is None else 0.0
        for other in keepers(num_nodes):
            with suppress(Exception):
                agent = self._ask(partial(who_is, scope=handler.scope, node=other, patience_s=patience_s))
                if agent is not None and other == FIRST:
                    self._first_agent = agent
                elif agent is not None and agent.lifeline:
                    told.append(f"{other}={agent.address}:{agent.lifeline}")
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
        if self.line is not None:  # a first node that was lost must not go on, in case that it ever wakes up
            self.line.close(says_out=self._has_first_gone)
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

    # --- who is lost --------------------------------------------------------------------------------------------------

    def gone(self) -> list[Gone]:
        """The nodes that give no sign of life now, as far as this one has to see to it."""
        found: list[Gone] = []
        if self.host is not None:
            self.host.drain()
            found = self.host.gone() if self.is_first else []
        if self.line is not None and not self._has_first_gone:
            self.line.drain()
            if (since := self.line.gone()) is not None:
                agent = self._first_agent  # rank 0 is on the first node, also where that has not said who it is
                name, ranks = ("its agent", (0,)) if agent is None else (agent.name, tuple(agent.ranks))
                found.append(Gone(FIRST, name, "", ranks, *since))
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
        return found | ({FIRST} if self.line is not None and self.line.is_heard else set())

    def note_first_gone(self) -> None:
        """It is taken care of."""
        self._has_first_gone = True

    def keeper(self) -> dict[str, Any] | None:
        """For the board: where this node's agent hears ranks; None: it keeps no small records."""
        if self.host is None or self.node not in keepers(self.num_nodes):
            return None
        return {"address": self._handler.own_address, "port": self.host.port}


def first_place(nodes: NodeWatch | None, address: str, port: int, *, attempt: int) -> Vacancy:
    """Of node 0 in recovery 0 of an attempt: what all its places have in common. `address`, `port`: of the workers'
    store."""
    if nodes is None:
        raise ValueError("the agents do not hear each other, and no place is offered")
    return Vacancy(
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
