"""Which nodes' agents are alive, as the first node's agent sees it.

Each other agent holds one connection to it (`Lifeline`) and says a word a second, which is answered. A connection that
ends without a goodbye, and is not there again within a second, is a lost node; silence may be one (`Gone.is_silent`):
the caller knows whether the job trains on. Time in which this process itself stood still counts against nobody. A node
that was given up is told so, at once or when it comes back (`Lifeline.is_out`): its place may be taken. The other
agents see in the same way that the first node is lost (`Lifeline.gone`).

Ranks of other nodes connect to it, too, and send their small records, which outlive their node here
(`LifelineHost.records_of`, `rejoin.small_records`). So each agent has a `LifelineHost`; agents connect to the first
node's only.

The first node's agent decides which other nodes are lost. Its own loss restarts the job.
The words are sealed with the job's key, if it has one (`agreement.sealed`).
"""

from __future__ import annotations

import json
import math
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.rejoin.small_records import Kept

__all__ = ["SILENCE_S", "Gone", "Lifeline", "LifelineHost"]

SILENCE_S = 10.0
"""So long a node may say nothing."""
_BEAT_S = 1.0
_BACK_S = 1.0  # a firewall that is reloaded ends connections, too
_EXPECTED_S = 5.0
_POLL_S, _STANDSTILL_S = 0.2, 2.0
_CONNECT_S, _AGAIN_S, _LATER_S, _PAUSE_S = 5.0, 0.2, 1.0, 0.05
_MANY_TRIES = 150
_MOST_BYTES, _PIECE_BYTES = 8192, 1 << 18
_BEAT, _BYE, _OUT = b".\n", b"bye\n", b"out\n"
_MOST_PENDING, _MOST_RANKS = 4096, 4096
_DESCRIPTORS = 1 << 14
_SHARE_OF_RANKS, _SHARE_OF_ALL = 0.5, 0.75  # of the descriptors that this process may have


@dataclass(frozen=True)
class Gone:
    """A node that gives no sign of life."""

    node: int
    name: str
    """Machine and process of its agent."""
    token: str
    ranks: tuple[int, ...]
    is_silent: bool
    """Its connection is still there, and nothing comes over it."""
    for_s: float = 0.0
    """Seconds since its last word, or since its connection has ended."""

    @property
    def words(self) -> str:
        return f"node {self.node} ({self.name}) is lost: its agent {'is silent' if self.is_silent else 'is gone'}"


@dataclass
class _Peer:
    """An agent of which there was a connection."""

    name: str
    ranks: tuple[int, ...]
    connection: socket.socket | None
    heard: float
    ended: float = 0.0
    has_left: bool = False
    is_out: bool = False


@dataclass
class _Talk:
    """What has come over one connection."""

    content: bytes = b""
    peer: _Peer | None = None
    kept: Kept | None = None
    """It is a rank's, which sends its small records."""
    token: str = field(default="", repr=False)


class LifelineHost:
    """The first node's side, and every other one's for small records. Main thread, where nothing else is said."""

    def __init__(self, scope: str, key: bytes | None) -> None:
        """`scope`: names the attempt. Raises OSError."""
        self._seal = Seal(key, f"lifeline/{scope}", 0)
        both = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        )
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        descriptors = _raise_limit()
        self._most_ranks = min(_MOST_RANKS, int(_SHARE_OF_RANKS * descriptors))
        self._most = int(_SHARE_OF_ALL * descriptors)
        self._num_ranks = self._num_refused = 0
        """Connections of ranks."""
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, str], _Peer] = {}
        self._kept: dict[int, Kept] = {}
        """By rank."""
        self._current: dict[int, str] = {}
        """The token of each node's agent."""
        self._looked = time.monotonic()
        """When the thread last saw what has come."""
        self.is_out = False
        """Another agent says that this node, the first one, was taken for lost, and must not go on."""
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = threading.Event()
        self._says_bye = True
        self._thread = threading.Thread(target=self._run, name="mindx-lifelines", daemon=True)
        self._thread.start()

    def gone(self) -> list[Gone]:
        """The nodes that give no sign of life now, and have not been put out. Any thread."""
        found: list[Gone] = []
        with self._lock:
            now = time.monotonic()
            if now - self._looked > _STANDSTILL_S:
                return found  # what has come meanwhile is still unread
            for node, token in self._current.items():
                peer = self._peers[node, token]
                if peer.has_left or peer.is_out:
                    continue
                is_silent = peer.connection is not None
                for_s = now - (peer.heard if is_silent else peer.ended)
                if for_s >= (SILENCE_S if is_silent else _BACK_S):
                    found.append(Gone(node, peer.name, token, peer.ranks, is_silent, for_s))
        return found

    @property
    def heard(self) -> list[int]:
        """The nodes that there is a connection to. Any thread."""
        with self._lock:
            return [node for node, token in self._current.items() if self._peers[node, token].connection is not None]

    def drain(self) -> None:
        """`fd` was readable."""
        with suppress(BlockingIOError):
            os.read(self.fd, 512)

    def put_out(self, gone: Gone) -> None:
        """This node does not belong to the job any more; it is told so when it can hear it."""
        with self._lock:
            peer = self._peers[gone.node, gone.token]
            peer.is_out = True
            if peer.connection is not None:
                with suppress(OSError):
                    peer.connection.send(_OUT)

    def expect(self, node: int, token: str) -> None:
        """The agent with this token has taken the place of a lost node."""
        with self._lock:
            self._current[node] = token
            late = _Peer("", (), None, 0.0, time.monotonic() + _EXPECTED_S)
            self._peers.setdefault((node, token), late)

    @property
    def ranks_kept(self) -> list[int]:
        """The ranks of which there are small records. Any thread."""
        with self._lock:
            return sorted(self._kept)

    def records_of(self, rank: int) -> dict[str, Any] | None:
        """What has come of this rank's small records; None: nothing. Any thread."""
        with self._lock:
            kept = self._kept.get(rank)
            return None if kept is None else kept.to_json()

    def close(self, *, says_bye: bool = True) -> None:
        """At the end of the attempt: this node leaves by itself."""
        self._says_bye = says_bye
        self._stopping.set()
        self._thread.join(2.0)
        self._server.close()
        if not self._thread.is_alive():
            os.close(self.fd)
            os.close(self._writer)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            talks: dict[socket.socket, _Talk] = {}
            while not self._stopping.is_set():
                ready = selector.select(_POLL_S)
                self._look_at_clock()
                for event, _ in ready:
                    connection = event.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._server:
                        if (new := self._accept()) is None:
                            continue
                        if len(talks) < min(self._most, self._num_ranks + _MOST_PENDING + len(self._current)):
                            talks[new] = _Talk()
                            selector.register(new, selectors.EVENT_READ)
                        else:
                            new.close()
                    elif not self._read(connection, talks[connection]):
                        selector.unregister(connection)
                        self._end(connection, talks.pop(connection))
                if self.gone():
                    with suppress(OSError):  # full: the main thread will wake up anyway
                        os.write(self._writer, b"!")
            for connection, talk in talks.items():
                with suppress(OSError):
                    if self._says_bye and talk.peer is not None:
                        connection.send(_BYE)
                connection.close()

    def _accept(self) -> socket.socket | None:
        try:
            new, _ = self._server.accept()
        except BlockingIOError:
            return None
        except OSError as error:  # no descriptor is left: the connection stays in the queue
            logger.debug("a connection cannot be accepted: %s", error)
            self._stopping.wait(_POLL_S)
            return None
        new.setblocking(False)
        return new

    def _look_at_clock(self) -> None:
        """After a standstill (SIGSTOP, a frozen container or job) all peers' times begin anew."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked > _STANDSTILL_S:
                for peer in self._peers.values():
                    peer.heard, peer.ended = max(peer.heard, now), max(peer.ended, now)
            self._looked = now

    def _read(self, connection: socket.socket, talk: _Talk) -> bool:
        """Whether the connection lives on."""
        try:
            content = connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not content:
            return False
        talk.content += content
        if talk.peer is None and talk.kept is None:
            line, ends, rest = talk.content.partition(b"\n")
            if not ends:
                return len(line) <= _MOST_BYTES
            talk.content = rest
            with self._lock:
                if not self._greet(connection, talk, line):
                    return False
        if talk.kept is not None:
            with self._lock:
                talk.content, makes_sense = talk.kept.take(talk.content)
            return makes_sense
        assert talk.peer is not None
        *lines, talk.content = talk.content.split(b"\n")
        if len(talk.content) > _MOST_BYTES:
            return False
        with self._lock:
            for line in lines:
                talk.peer.heard = time.monotonic()
                talk.peer.has_left = talk.peer.has_left or line + b"\n" == _BYE
                if line + b"\n" == _OUT:
                    self.is_out = True
                    with suppress(OSError):  # full: the main thread will wake up anyway
                        os.write(self._writer, b"!")
            if lines:
                with suppress(OSError):  # full: it does not read, and the answer is one of many
                    connection.send(_BEAT)
        return True

    def _greet(self, connection: socket.socket, talk: _Talk, line: bytes) -> bool:
        try:
            content = json.loads(self._seal.open("hello", line, limit=_MOST_BYTES))
            if "rank" in content and type(content["rank"]) is int:
                if self._num_ranks >= self._most_ranks:
                    self._num_refused += 1
                    if self._num_refused == 1:
                        logger.warning(
                            "small records of more than %d ranks are not kept: no more descriptors (ulimit -Hn)",
                            self._most_ranks,
                        )
                    return False
                self._num_ranks += 1
                # A new process of the rank begins anew: it sends all that its ring has got since.
                talk.kept = self._kept.setdefault(content["rank"], Kept()) if len(self._kept) < _MOST_RANKS else Kept()
                return True
            node, token, first, count = (content[name] for name in ("node", "token", "first", "count"))
            if not (type(node) is type(first) is type(count) is int and node >= 0 <= first and 0 < count < 1 << 16):
                raise ValueError(f"node {node}, {count} ranks from {first}")
            name, token = printable(str(content["name"]), 200), str(token)[:64]
        except (NotOursError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.debug("a connection that is no agent's of this job: %s", error)
            return False
        talk.token = token
        peer = self._peers.get((node, token))
        if peer is None:
            if len(self._peers) > 1 << 16:
                return False
            peer = self._peers[node, token] = _Peer(name, (), None, 0.0)
            self._current.setdefault(node, token)
        if peer.is_out:
            with suppress(OSError):
                connection.send(_OUT)
        peer.name, peer.ranks, peer.connection = name, tuple(range(first, first + count)), connection
        peer.ended, peer.heard = 0.0, time.monotonic()
        talk.peer = peer
        return True

    def _end(self, connection: socket.socket, talk: _Talk) -> None:
        with self._lock:
            self._num_ranks -= talk.kept is not None
            if talk.peer is not None and talk.peer.connection is connection:
                talk.peer.connection, talk.peer.ended = None, time.monotonic()
        connection.close()


def _raise_limit() -> int:
    """As many descriptors as this process may have, for a connection of each rank. Returns how many; its children get
    the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class Lifeline:
    """The side of every other node. Main thread."""

    def __init__(
        self, address: tuple[str, int], scope: str, key: bytes | None, *, node: int, token: str, ranks: Sequence[int]
    ) -> None:
        """`token`: of this agent, new for each attempt. `ranks`: of this node, one after the other."""
        self._address = address
        hello = {
            "node": node,
            "token": token,
            "name": f"{socket.gethostname()}, pid {os.getpid()}",
            "first": ranks[0],
            "count": len(ranks),
        }
        self._hello = Seal(key, f"lifeline/{scope}", node).close("hello", json.dumps(hello)).encode() + b"\n"
        self.is_out = False
        """This node was taken for lost, and must not go on."""
        self.fd, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._last_word = _BYE
        self._is_connected, self._stopping = threading.Event(), threading.Event()
        self._heard = self._looked = time.monotonic()
        """The last word of the first node's agent; when the thread last looked."""
        self._ended: float | None = None
        self._gone: tuple[bool, float] | None = None
        """Silent or without a connection, and since when."""
        self._host_has_left = False
        self._thread = threading.Thread(target=self._run, name="mindx-lifeline", daemon=True)

    def start(self) -> bool:
        """Whether the first node's agent can be reached."""
        self._thread.start()
        return self._is_connected.wait(_CONNECT_S)

    def gone(self) -> tuple[bool, float] | None:
        """Where the first node's agent gives no sign of life: whether it is only silent, and for how many seconds."""
        found = self._gone
        return None if found is None or self.is_out else (found[0], time.monotonic() - found[1])

    @property
    def is_heard(self) -> bool:
        """Whether there is a connection to the first node's agent."""
        return self._is_connected.is_set() and self._ended is None

    def drain(self) -> None:
        """`fd` was readable."""
        with suppress(BlockingIOError):
            os.read(self.fd, 512)

    def close(self, *, says_bye: bool = True, says_out: bool = False) -> None:
        """At the end of the attempt: this node leaves by itself. `says_out`: the other side was taken for lost, and
        must not go on, in case that it ever wakes up."""
        self._last_word = _OUT if says_out else _BYE if says_bye else b""
        self._stopping.set()
        self._wake()
        self._thread.join(_BEAT_S)
        if not self._thread.is_alive():
            os.close(self.fd)
            os.close(self._writer)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._writer, b"!")

    def _run(self) -> None:
        tries = 0  # since a connection that has lasted; who was cut off for hours must still hear that it is out
        while not self._stopping.is_set() and not self.is_out:
            tries += 1
            began = math.inf
            try:
                with socket.create_connection(self._address, _CONNECT_S) as connection:
                    self._looked = time.monotonic()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.sendall(self._hello)
                    self._is_connected.set()
                    self._heard = began = time.monotonic()
                    self._ended = None
                    self._talk(connection)
            except OSError as error:
                logger.debug("%s:%d cannot be reached: %s", *self._address, error)
                self._looked = time.monotonic()  # a machine that is gone does not answer for some seconds
            if time.monotonic() - began > _BEAT_S:
                tries = 0
            if self._ended is None:
                self._ended = time.monotonic()
            self._look()
            if tries > 1:
                self._stopping.wait(_AGAIN_S if tries < _MANY_TRIES else _LATER_S)

    def _look(self) -> None:
        """Is the other side gone? Time in which this thread stood still does not count."""
        now = time.monotonic()
        if now - self._looked > _STANDSTILL_S:
            self._heard = now
            self._ended = None if self._ended is None else now
        self._looked = now
        was, is_silent = self._gone, self._ended is None
        since = self._heard if self._ended is None else self._ended
        is_late = now - since >= (SILENCE_S if is_silent else _BACK_S)
        self._gone = (is_silent, since) if is_late and not self._host_has_left else None
        if was is None and self._gone is not None:
            self._wake()

    def _talk(self, connection: socket.socket) -> None:
        """Until the connection ends. Raises OSError."""
        content = b""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self.fd, selectors.EVENT_READ)
            beat = 0.0
            while not self._stopping.is_set():
                if time.monotonic() >= beat:
                    connection.sendall(_BEAT)
                    beat = time.monotonic() + _BEAT_S
                ready = [event.fileobj for event, _ in selector.select(max(0.0, beat - time.monotonic()))]
                self._look()
                if connection not in ready:
                    self._stopping.wait(_PAUSE_S if ready else 0.0)  # `fd` stays readable until it is drained
                    continue
                piece = connection.recv(_MOST_BYTES)
                content = (content + piece)[-_MOST_BYTES:]
                if _OUT in content:
                    self.is_out = True
                    self._wake()
                    return
                if not piece:
                    return
                self._heard = time.monotonic()
                self._host_has_left = _BYE in content
            if self._last_word:
                connection.sendall(self._last_word)
