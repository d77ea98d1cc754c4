"""An agent's view of the other nodes' agents, over all attempts: who of them is heard, who is lost, whose place this
node has."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mindx_elastic.agent.boards import connect
from mindx_elastic.agent.failure_detector import Lost
from mindx_elastic.agent.heartbeat import Heartbeat, HeartbeatServer
from mindx_elastic.agent.rendezvous import Agent, HostedStoreRendezvous, agent_name
from mindx_elastic.agent.standby import NodePlace, Standby, identify, offer, root_store, tell_nodes
from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.lost_node import FIRST, keepers

__all__ = ["NodeWatch"]

_ANSWER_S = 5.0
_T = TypeVar("_T")


class NodeWatch:
    """Main thread. What asks the store of the rendezvous waits 5 s at most, and raises what torch raises, TimeoutError,
    ValueError, KeyError, TypeError."""

    def __init__(
        self, handler: HostedStoreRendezvous, *, ranks: int, can_join: bool, stand_by: Callable[[], None]
    ) -> None:
        """`ranks`: processes of this node. can_join: they can be started as new processes of a running job. `stand_by`
        is called when this node begins to wait for a place."""
        self._handler, self._can_join, handler.ranks = handler, can_join, ranks
        self._thread = ReadyThread("mindx-places")
        self.node, self.num_nodes, self.name = 0, 1, agent_name()
        """Of this attempt."""
        self.job = ""
        """A name of the job that no other one has, as long as its rendezvous has the same store; empty: not known."""
        self.server: HeartbeatServer | None = None
        """Hears ranks of other nodes, and on the first node the other agents."""
        self.heartbeat: Heartbeat | None = None
        """To the first node's agent; None on the first node."""
        self.lost: dict[int, str] = {}
        """The nodes that are lost and whose places are free, and the words for it."""
        self._first_agent: Agent | None = None
        self.has_first_gone = False
        """The first node is lost, and the workers' store with it; this is taken care of."""
        handler.standby = Standby(handler.inner, self._claim_place, self._why_not, stand_by)

    @property
    def place(self) -> NodePlace | None:
        """Of a lost node, which this one has in this attempt."""
        return self._handler.place

    def place_of_any(self, address: str, port: int, *, attempt: int) -> NodePlace:
        """What all places of an attempt have in common. `address`, `port`: of the workers' store."""
        return NodePlace(
            name="none",
            node=0,
            num_nodes=self.num_nodes,
            ranks=0,
            first=0,
            address=address,
            port=port,
            agent_port=0 if self.server is None else self.server.port,
            scope=self._handler.scope,
            generation=0,
            attempt=attempt,
        )

    def open(self, *, node: int, num_nodes: int, ranks: Sequence[int]) -> str:
        """The nodes have met. What the workers need to know of the nodes (``MINDX_REJOIN_NODES``); empty: the loss of a
        node is not seen."""
        handler = self._handler
        self.server, self.node, self.num_nodes = handler.server, node, num_nodes
        self._first_agent, self.has_first_gone, self.job, self.lost = None, False, "", {}
        with suppress(Exception):  # any of torch's
            self.job = self._ask(identify)
        if self.place is None and not self._open_heartbeat(ranks):
            return ""
        address, port = handler.first_server
        told = [f"{FIRST}={address}:{port}"]
        for other in keepers(num_nodes):
            with suppress(Exception):  # then its agent keeps no small records of this node's ranks
                agent = self._thread.call(partial(handler.agent, other), _ANSWER_S)
                if agent is not None and other == FIRST:
                    self._first_agent = agent
                elif agent is not None and agent.port:
                    told.append(f"{other}={agent.address}:{agent.port}")
        return " ".join(told)

    def _open_heartbeat(self, ranks: Sequence[int]) -> bool:
        handler = self._handler
        self._hold(None)  # it had a place, and could not start there
        if self.node == FIRST:
            with suppress(Exception):  # any of torch's: then a late node goes into the rendezvous, as ever
                self._ask(lambda store, run_id: tell_nodes(store, run_id, self.num_nodes))
                self.offer(None)
            return self.server is not None
        if handler.first_server[1] == 0:
            return False
        token, key = secrets.token_hex(8), board_key()
        heartbeat = Heartbeat(handler.first_server, handler.scope, key, node=self.node, token=token, ranks=ranks)
        if heartbeat.start():
            self.heartbeat = heartbeat
            return True
        logger.warning("the first node's agent cannot be reached: the loss of this node restarts the job")
        heartbeat.close()
        return False

    def offer(self, place: NodePlace | None) -> None:
        """None: no place is offered any more."""
        self._ask(lambda store, run_id: offer(store, run_id, place))

    def _ask(self, work: Callable[[Any, str], _T]) -> _T:
        """Do `work` with the store of the rendezvous and the name of the job; the store may never answer."""
        store, run_id = root_store(self._handler.inner), self._handler.get_run_id()
        return self._thread.call(lambda: work(store, run_id), _ANSWER_S)

    def close(self, *, is_out: bool = False) -> None:
        """The attempt has ended. is_out: because this node was taken for lost."""
        if self.heartbeat is not None:  # a first node that was lost must not go on, in case that it ever wakes up
            self.heartbeat.close(says_out=self.has_first_gone)
        if self.server is not None:
            self.server.close(says_bye=not is_out)
        self.heartbeat = self.server = self._handler.server = None
        if self._handler.standby is not None:
            self._handler.standby.was_out = is_out

    def _hold(self, heartbeat: Heartbeat | None) -> None:
        """The one before ends without a goodbye: nobody is to wait for the node that it spoke for."""
        if self.heartbeat is not None:
            self.heartbeat.close(says_bye=False)
        self.heartbeat = heartbeat

    # --- a place ------------------------------------------------------------------------------------------------------

    def _why_not(self, place: NodePlace) -> str:
        if not self._can_join:
            return "its program is not run by this Python interpreter"
        if place.ranks != self._handler.ranks:
            have = f"this one has {self._handler.ranks} (--nproc-per-node)"
            return f"it needs {place.ranks} processes on the node, and {have}"
        return ""

    def _claim_place(self, place: NodePlace) -> bool:
        token, ranks = secrets.token_hex(8), range(place.first, place.first + place.ranks)
        address = (place.address, place.agent_port)
        heartbeat = Heartbeat(address, place.scope, board_key(), node=place.node, token=token, ranks=ranks)
        has_it = False
        try:
            if not heartbeat.start():
                raise OSError(f"the first node's agent does not answer at {place.address}:{place.agent_port}")
            store: Any = connect(place.address, place.port, place.scope)
            scope, number = f"{place.scope}/{place.generation}", place.generation
            board = Board(store, key=board_key(), scope=scope, writer=place.first)
            if not board.read([f"{number}/over"]):
                note = board.write(f"{number}/taken/{place.node}", {"token": token, "name": self.name})
                has_it = note.get("token") == token
        finally:
            if has_it:
                self._hold(heartbeat)
            else:
                heartbeat.close(says_bye=False)
        return has_it

    # --- who is lost --------------------------------------------------------------------------------------------------

    @property
    def is_out(self) -> bool:
        """Another agent says that this node was taken for lost."""
        return any(each is not None and each.is_out for each in (self.server, self.heartbeat))

    def drain(self) -> None:
        """Something may have been heard."""
        for each in (self.server, self.heartbeat):
            if each is not None:
                each.wakeup.drain()

    def lost_now(self) -> list[Lost]:
        """The nodes that give no sign of life now, as far as this one has to see to it."""
        found: list[Lost] = []
        if self.server is not None and self.node == FIRST:
            found = self.server.lost()
        if self.heartbeat is not None and not self.has_first_gone and (first := self.heartbeat.lost()) is not None:
            agent = self._first_agent  # rank 0 is on the first node, also where that has not said who it is
            name, count = ("its agent", 1) if agent is None else (agent.name, agent.count)
            found.append(replace(first, name=name, ranks=tuple(range(count))))
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
        found = set(self.server.connected) if self.server is not None and self.node == FIRST else set()
        return found | ({FIRST} if self.heartbeat is not None and self.heartbeat.is_connected else set())

    def note_first_lost(self) -> None:
        """The loss of the first node is taken care of."""
        self.has_first_gone = True

    def keeper(self) -> dict[str, Any] | None:
        """For the board: where this node's agent hears ranks; None: it keeps no small records."""
        if self.server is None or self.node not in keepers(self.num_nodes):
            return None
        return {"address": self._handler.own_address, "port": self.server.port}
