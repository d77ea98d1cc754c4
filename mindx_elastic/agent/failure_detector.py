"""Which of the agents that a node hears are alive. Pure: times are passed in (seconds of any monotonic clock).

What is heard are events: a greeting, a word, a goodbye, the end of a connection. An agent is lost when its connection
has ended without a goodbye and is not there again within `BACK_S`. One whose connection stands and that says nothing
for `SILENCE_S` may be lost (`Lost.is_silent`): the caller knows whether the job trains on. All are judged as of the
moment up to which the listener has read what has come (`look`): where it stood still, more may be unread. Time in which
it stood still for long counts against nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BACK_S", "SILENCE_S", "FailureDetector", "Lost"]

SILENCE_S = 10.0
"""So long an agent may say nothing."""
BACK_S = 1.0
"""So long a connection may be away: a firewall that is reloaded ends connections, too."""
STANDSTILL_S = 2.0
"""A listener that looks later than this has stood still for long."""
_MOST = 1 << 16


@dataclass(frozen=True)
class Lost:
    """A node whose agent gives no sign of life."""

    node: int
    name: str
    """Machine and process of its agent."""
    ranks: tuple[int, ...]
    is_silent: bool
    """Its connection is still there, and nothing comes over it."""
    for_s: float = 0.0
    """Seconds from its last word, or the end of its connection, to the last look."""

    @property
    def words(self) -> str:
        return f"node {self.node} ({self.name}) is lost: its agent {'is silent' if self.is_silent else 'is gone'}"


@dataclass
class _Peer:
    """An agent that was heard."""

    name: str = ""
    ranks: tuple[int, ...] = ()
    connection: int = 0
    """The number of the newest one; 0: that has ended."""
    since: float = 0.0
    """Of its last word while there is a connection, else of the end of the last one."""
    has_left: bool = False


class FailureDetector:
    """What one listener knows of the others in an attempt. One thread at a time."""

    def __init__(self, now: float) -> None:
        self._peers: dict[int, _Peer] = {}
        """By node."""
        self._looked = now
        self._num_connections = 0

    @property
    def nodes(self) -> list[int]:
        """Those of which an agent was heard."""
        return list(self._peers)

    @property
    def connected(self) -> list[int]:
        """The nodes to whose agents there is a connection."""
        return [node for node, peer in self._peers.items() if peer.connection]

    def look(self, now: float) -> None:
        """The listener has read all that had come by `now`. It is to call this every `STANDSTILL_S` at least."""
        if now - self._looked > STANDSTILL_S:
            for peer in self._peers.values():
                peer.since = max(peer.since, now)
        self._looked = now

    def go_on(self, now: float) -> None:
        """The listener has waited for something else, which was no standstill."""
        self._looked = now

    def greet(self, node: int, now: float, *, name: str, ranks: tuple[int, ...]) -> int:
        """An agent has opened a connection. Its number; 0: there are too many agents, and this one is not heard."""
        if node not in self._peers and len(self._peers) >= _MOST:
            return 0
        peer = self._peers.setdefault(node, _Peer())
        self._num_connections += 1
        peer.name, peer.ranks, peer.since, peer.connection = name, ranks, now, self._num_connections
        return peer.connection

    def hear(self, node: int, now: float, *, goodbye: bool = False) -> None:
        """A word over its connection."""
        peer = self._peers[node]
        peer.since, peer.has_left = now, peer.has_left or goodbye

    def end(self, node: int, now: float, *, connection: int) -> None:
        """This connection has ended; there may be a newer one."""
        peer = self._peers[node]
        if peer.connection == connection:
            peer.connection, peer.since = 0, now

    def lost(self) -> list[Lost]:
        """Who gave no sign of life at the last look."""
        found: list[Lost] = []
        for node, peer in self._peers.items():
            for_s, is_silent = self._looked - peer.since, peer.connection > 0
            if not peer.has_left and for_s >= (SILENCE_S if is_silent else BACK_S):
                found.append(Lost(node, peer.name, peer.ranks, is_silent, for_s))
        return found
