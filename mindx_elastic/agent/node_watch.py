"""An agent's view of the other nodes' agents, over all attempts: who of them is heard, and who is lost."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mindx_elastic.agent.failure_detector import Lost
from mindx_elastic.agent.heartbeat import Heartbeat, HeartbeatServer
from mindx_elastic.agent.rendezvous import Agent, HostedStoreRendezvous
from mindx_elastic.core.events import logger
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.rejoin.board import board_key
from mindx_elastic.rejoin.small_records import FIRST, keepers

__all__ = ["NodeWatch"]

_ANSWER_S = 5.0


class NodeWatch:
    """Main thread. What asks the store of the rendezvous waits 5 s at most."""

    def __init__(self, handler: HostedStoreRendezvous, *, ranks: int) -> None:
        """`ranks`: processes of this node."""
        self._handler, handler.ranks = handler, ranks
        self._thread = ReadyThread("mindx-nodes")
        self.node = 0
        """Of this attempt."""
        self.job = ""
        """A name of the job that no other one has, as long as its rendezvous has the same store; empty: not known."""
        self.server: HeartbeatServer | None = None
        """Hears ranks of other nodes, and on the first node the other agents."""
        self.heartbeat: Heartbeat | None = None
        """To the first node's agent; None on the first node."""
        self.lost: dict[int, str] = {}
        """The nodes whose loss is taken care of, and the words for it."""
        self._first_agent: Agent | None = None

    def open(self, *, node: int, num_nodes: int, ranks: Sequence[int]) -> str:
        """The nodes have met. Where nodes keep small records of others' ranks (``MINDX_REJOIN_NODES``); empty: the loss
        of a node is not seen."""
        handler = self._handler
        self.server, self.node = handler.server, node
        self._first_agent, self.job, self.lost = None, "", {}
        with suppress(Exception):  # any of torch's
            self.job = self._identify()
        if not self._open_heartbeat(ranks):
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
        if self.node == FIRST:
            return self.server is not None
        if handler.first_server[1] == 0:
            return False
        heartbeat = Heartbeat(handler.first_server, handler.scope, board_key(), node=self.node, ranks=ranks)
        if heartbeat.start():
            self.heartbeat = heartbeat
            return True
        logger.warning("the first node's agent cannot be reached: the loss of this node is noticed later")
        heartbeat.close()
        return False

    def _identify(self) -> str:
        """The name of the rendezvous' very store, which no other one has; it gets one if it has none."""
        store: Any = getattr(self._handler.inner, "_store", None)  # below its rounds, in the torch known here
        key = f"mindx-elastic/{self._handler.get_run_id()}/store"
        name = self._thread.call(lambda: store.compare_set(key, "", secrets.token_hex(8)), _ANSWER_S)
        return bytes(name).decode(errors="replace")

    def close(self) -> None:
        """The attempt has ended."""
        for each in (self.heartbeat, self.server):
            if each is not None:
                each.close()
        self.heartbeat = self.server = self._handler.server = None

    def drain(self) -> None:
        """Something may have been heard."""
        for each in (self.server, self.heartbeat):
            if each is not None:
                each.wakeup.drain()

    def lost_now(self) -> list[Lost]:
        """The nodes that give no sign of life now, as far as this one sees it, and nobody has taken care of."""
        found: list[Lost] = []
        if self.server is not None and self.node == FIRST:
            found = self.server.lost()
        if self.heartbeat is not None and (first := self.heartbeat.lost()) is not None:
            agent = self._first_agent  # rank 0 is on the first node, also where that has not said who it is
            name, count = ("its agent", 1) if agent is None else (agent.name, agent.count)
            found.append(replace(first, name=name, ranks=tuple(range(count))))
        return [each for each in found if each.node not in self.lost]

    def note_lost(self, lost: Mapping[int, str]) -> None:
        """The job is restarted because of these nodes."""
        self.lost |= lost

    @property
    def heard(self) -> set[int]:
        """The nodes whose agents hold a connection to this one, or this one to them."""
        found = set(self.server.connected) if self.server is not None and self.node == FIRST else set()
        return found | ({FIRST} if self.heartbeat is not None and self.heartbeat.is_connected else set())
