"""How the agents of several nodes hear that the others live (`failure_detector` decides who does).

Each other agent holds one connection to the first node's (`Heartbeat`) and says a word a second, which is answered; so
the first node's agent hears all of them, and each of them hears it. The loss of a node restarts the job.

Ranks of other nodes connect to it, too, and send their small records, which outlive their node here
(`HeartbeatServer.records_of`, `rejoin.small_records`). So each agent has a `HeartbeatServer`; agents connect to the
first node's only.

What they say goes in frames (`core.frames`): a greeting, which is sealed with the job's key, if it has one
(`agreement.sealed`), and then words or records.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from mindx_elastic.agent.failure_detector import FailureDetector, Lost
from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Between, Words, read
from mindx_elastic.core.frames import FrameError, Frames, frame
from mindx_elastic.core.wakeup import Wakeup
from mindx_elastic.memory.boundaries import BoundaryRecord
from mindx_elastic.rejoin.small_records import FIRST, MOST_MESSAGE_BYTES, Kept

__all__ = ["Heartbeat", "HeartbeatServer"]

_BEAT_S, _POLL_S = 1.0, 0.2
_CONNECT_S, _TRY_S, _AGAIN_S, _PAUSE_S = 5.0, 2.0, 0.2, 0.05
_MOST_BYTES, _PIECE_BYTES = 8192, 1 << 18
_BEAT, _BYE = b".", b"bye"
_MOST_PENDING, _MOST_RANKS = 4096, 4096
_DESCRIPTORS = 1 << 14
_SHARE_OF_RANKS, _SHARE_OF_ALL = 0.5, 0.75  # of the descriptors that this process may have


@dataclass(frozen=True)
class _Greeting:
    """An agent's first frame."""

    node: int
    name: Annotated[str, Words(200)]
    first: int
    """Of its ranks."""
    count: Annotated[int, Between(1, (1 << 16) - 1)]


@dataclass
class _Talk:
    """One connection, and what has come over it."""

    frames: Frames = field(default_factory=lambda: Frames(_MOST_BYTES))
    agent: int | None = None
    """The node of an agent."""
    number: int = 0
    """Of the agent's connection; see `FailureDetector.greet`."""
    kept: Kept | None = None
    """It is a rank's, which sends its small records."""


class HeartbeatServer:
    """The first node's side, and every other one's for small records. Main thread, where nothing else is said."""

    def __init__(self, scope: str, key: bytes | None) -> None:
        """`scope`: names the attempt. Raises OSError."""
        self._seal = Seal(key, f"heartbeat/{scope}", 0)
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
        self._agents = FailureDetector(time.monotonic())
        self._talks: dict[socket.socket, _Talk] = {}
        self._kept: dict[int, Kept] = {}
        """By rank."""
        self.wakeup = Wakeup()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mindx-heartbeats", daemon=True)
        self._thread.start()

    def lost(self) -> list[Lost]:
        """The nodes that give no sign of life now. Any thread."""
        with self._lock:
            return self._agents.lost()

    @property
    def connected(self) -> list[int]:
        """The nodes that there is a connection to. Any thread."""
        with self._lock:
            return self._agents.connected

    @property
    def ranks_kept(self) -> list[int]:
        """The ranks of which there are small records. Any thread."""
        with self._lock:
            return sorted(self._kept)

    def records_of(self, rank: int) -> list[BoundaryRecord]:
        """What has come of this rank's small records, the oldest first. Any thread."""
        with self._lock:
            return self._kept[rank].records if rank in self._kept else []

    def close(self) -> None:
        """At the end of the attempt: this node leaves by itself."""
        self._stopping.set()
        self._thread.join(2.0)
        self._server.close()
        if not self._thread.is_alive():
            self.wakeup.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._stopping.is_set():
                began = time.monotonic()  # what had come by now is ready, also where this process stops in `select`
                ready: list[Any] = [event.fileobj for event, _ in selector.select(_POLL_S)]
                if self._server in ready:
                    ready.remove(self._server)
                    for new in iter(self._accept, None):  # each may have sent its greeting already
                        self._talks[new] = _Talk()
                        selector.register(new, selectors.EVENT_READ)
                        ready.append(new)
                for connection in ready:
                    if not self._read(connection, self._talks[connection]):
                        selector.unregister(connection)
                        self._end(connection)
                with self._lock:
                    self._agents.look(began)
                if self.lost():
                    self.wakeup.ring()
            for connection, talk in self._talks.items():
                if talk.agent is not None:
                    _say(connection, _BYE)
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
        if len(self._talks) >= min(self._most, self._num_ranks + _MOST_PENDING + len(self._agents.nodes)):
            new.close()
            return None
        new.setblocking(False)
        return new

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
        try:
            return all(self._hear(connection, talk, said) for said in talk.frames.feed(content))
        except FrameError as error:
            logger.debug("a connection that is none of this job: %s", error)
            return False

    def _hear(self, connection: socket.socket, talk: _Talk, said: bytes) -> bool:
        """Whether the connection lives on."""
        with self._lock:
            if talk.kept is not None:
                return talk.kept.take(said)
            if talk.agent is None:
                return self._greet(talk, said)
            self._agents.hear(talk.agent, time.monotonic(), goodbye=said == _BYE)
        _say(connection, _BEAT)
        return True

    def _greet(self, talk: _Talk, said: bytes) -> bool:
        try:
            content = json.loads(self._seal.open("hello", said, limit=_MOST_BYTES))
            if "rank" in content and type(content["rank"]) is int:
                return self._greet_rank(talk, content["rank"])
            hello = read(_Greeting, content)
        except (NotOursError, ValueError, TypeError, RecursionError) as error:
            logger.debug("a connection that is no agent's of this job: %s", error)
            return False
        ranks = tuple(range(hello.first, hello.first + hello.count))
        talk.number = self._agents.greet(hello.node, time.monotonic(), name=hello.name, ranks=ranks)
        talk.agent = hello.node if talk.number else None
        return talk.agent is not None

    def _greet_rank(self, talk: _Talk, rank: int) -> bool:
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
        talk.kept = self._kept.setdefault(rank, Kept()) if len(self._kept) < _MOST_RANKS else Kept()
        talk.frames.most = MOST_MESSAGE_BYTES
        return True

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            talk = self._talks.pop(connection)
            self._num_ranks -= talk.kept is not None
            if talk.agent is not None:
                self._agents.end(talk.agent, time.monotonic(), connection=talk.number)
        connection.close()


def _say(connection: socket.socket, word: bytes) -> None:
    message = frame(word)
    with suppress(OSError):  # full: it does not read, and the answer is one of many
        if connection.send(message) < len(message):  # the next frame would not be found behind a part of this one
            connection.shutdown(socket.SHUT_RDWR)


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


class Heartbeat:
    """The side of every other node. Main thread."""

    def __init__(
        self, address: tuple[str, int], scope: str, key: bytes | None, *, node: int, ranks: Sequence[int]
    ) -> None:
        """`ranks`: of this node, one after the other."""
        self._address = address
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        hello = json.dumps(asdict(_Greeting(node, name, ranks[0], len(ranks))))
        self._hello = frame(Seal(key, f"heartbeat/{scope}", node).close("hello", hello).encode())
        self.wakeup = Wakeup()
        self._is_connected, self._stopping = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._first = FailureDetector(time.monotonic())
        """Knows the first node's agent alone."""
        self._was_lost = False
        self._thread = threading.Thread(target=self._run, name="mindx-heartbeat", daemon=True)

    def start(self) -> bool:
        """Whether the first node's agent can be reached."""
        self._thread.start()
        return self._is_connected.wait(_CONNECT_S)

    def lost(self) -> Lost | None:
        """The first node, where its agent gives no sign of life; of its name and ranks nothing is known here."""
        with self._lock:
            found = self._first.lost()
        return found[0] if found else None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the first node's agent."""
        with self._lock:
            return bool(self._first.connected)

    def close(self) -> None:
        """At the end of the attempt: this node leaves by itself."""
        self._stopping.set()
        self.wakeup.ring()
        self._thread.join(_BEAT_S)
        if not self._thread.is_alive():
            self.wakeup.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            number = 0
            try:
                with socket.create_connection(self._address, _TRY_S) as connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.sendall(self._hello)
                    with self._lock:
                        number = self._first.greet(FIRST, time.monotonic(), name="", ranks=())
                    self._is_connected.set()
                    self._talk(connection)
            except OSError as error:
                logger.debug("%s:%d cannot be reached: %s", *self._address, error)
            now = time.monotonic()
            with self._lock:
                self._first.go_on(now)  # a machine that is gone does not answer for some seconds
                if number:
                    self._first.end(FIRST, now, connection=number)
            self._look(now)
            self._stopping.wait(_AGAIN_S)

    def _look(self, now: float) -> None:
        """Is the other side lost, as of what had come by `now`?"""
        with self._lock:
            self._first.look(now)
        was, self._was_lost = self._was_lost, self.lost() is not None
        if self._was_lost and not was:
            self.wakeup.ring()

    def _talk(self, connection: socket.socket) -> None:
        """Until the connection ends. Raises OSError."""
        frames = Frames(_MOST_BYTES)
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self.wakeup.fd, selectors.EVENT_READ)
            beat = 0.0
            while not self._stopping.is_set():
                began = time.monotonic()
                if began >= beat:
                    connection.sendall(frame(_BEAT))
                    beat = time.monotonic() + _BEAT_S
                ready = [event.fileobj for event, _ in selector.select(max(0.0, beat - time.monotonic()))]
                if connection in ready:
                    piece = connection.recv(_MOST_BYTES)
                    if not piece:
                        return
                    words = list(frames.feed(piece))
                    with self._lock:
                        self._first.hear(FIRST, time.monotonic(), goodbye=_BYE in words)
                elif ready:
                    self._stopping.wait(_PAUSE_S)  # the wakeup stays readable until it is drained
                self._look(began)
            connection.sendall(frame(_BYE))
