"""Keeps small records of other nodes' ranks, so that they outlive their node (`rejoin.small_records`).

Each rank connects to two other nodes' agents and sends its records in frames (`core.frames`), the first of which is a
greeting, sealed with the job's key, if it has one (`agreement.sealed`).
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mindx_elastic.agreement.sealed import NotOursError, Seal
from mindx_elastic.core.events import logger
from mindx_elastic.core.frames import FrameError, Frames
from mindx_elastic.memory.boundaries import BoundaryRecord
from mindx_elastic.rejoin.small_records import MOST_MESSAGE_BYTES, Kept, greeting_scope

__all__ = ["RecordKeeper"]

_POLL_S = 0.2
_MOST_BYTES, _PIECE_BYTES = 8192, 1 << 18
_MOST_RANKS, _MOST_PENDING = 4096, 4096
_DESCRIPTORS = 1 << 14
_SHARE_OF_RANKS, _SHARE_OF_ALL = 0.5, 0.75  # of the descriptors that this process may have


@dataclass
class _Talk:
    """One connection, and what has come over it."""

    frames: Frames = field(default_factory=lambda: Frames(_MOST_BYTES))
    kept: Kept | None = None
    """Of its rank; None: it has not greeted."""


class RecordKeeper:
    """A daemon thread that listens. `close` it."""

    def __init__(self, scope: str, key: bytes | None) -> None:
        """`scope`: names the attempt. Raises OSError."""
        self._seal = Seal(key, greeting_scope(scope), 0)
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
        self._talks: dict[socket.socket, _Talk] = {}
        self._kept: dict[int, Kept] = {}
        """By rank."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mindx-records", daemon=True)
        self._thread.start()

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
        """At the end of the attempt."""
        self._stopping.set()
        self._thread.join(2.0)
        self._server.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._stopping.is_set():
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
                        self._num_ranks -= self._talks.pop(connection).kept is not None
                        connection.close()
            for connection in self._talks:
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
        if len(self._talks) >= min(self._most, self._num_ranks + _MOST_PENDING):
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
        try:
            return bool(content) and all(self._hear(talk, said) for said in talk.frames.feed(content))
        except FrameError as error:
            logger.debug("a connection that is none of this job: %s", error)
            return False

    def _hear(self, talk: _Talk, said: bytes) -> bool:
        """Whether the connection lives on."""
        with self._lock:
            return self._greet(talk, said) if talk.kept is None else talk.kept.take(said)

    def _greet(self, talk: _Talk, said: bytes) -> bool:
        try:
            rank = json.loads(self._seal.open("hello", said, limit=_MOST_BYTES))["rank"]
            if type(rank) is not int:
                raise ValueError("no rank")
        except (NotOursError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.debug("a connection that is no rank's of this job: %s", error)
            return False
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
