"""A rank's small records on two other nodes as well, so that they outlive the rank's own node.

What replicas do not share (random streams, buffers, counters) is in the rank's boundary ring, in its node's memory.
Each record of the ring goes to two other nodes' agents in the same moment (`Courier`; `keepers` says which), which keep
the newest of each kind (`Kept`). They are a few kilobytes. Nothing waits for it: what does not fit into the buffer of
the connection is left out. If the node is lost, the agents bring them to the checkpoint directory (`put_into_ring`),
where the next start finds them: then all ranks go on bit for bit, as where only a process has died.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.agreement.sealed import Seal
from mindx_elastic.core.events import logger
from mindx_elastic.core.frames import frame
from mindx_elastic.memory.boundaries import (
    NUM_BOUNDARIES,
    NUM_FORECASTS,
    NUM_PINNED,
    BoundaryRecord,
    BoundaryRing,
    read_ring,
)
from mindx_elastic.rejoin.board import board_key

__all__ = [
    "MOST_BYTES",
    "MOST_MESSAGE_BYTES",
    "Courier",
    "Couriers",
    "Kept",
    "greeting_scope",
    "keepers",
    "put_into_ring",
]


_NUM_KEEPERS = 2

_HEAD = struct.Struct("<qqQ16s")  # attempt, step, flags, digest
_FORECAST, _TRUSTED, _PINNED = 1, 2, 4
_RUN_BYTES = 64
MOST_BYTES = 1 << 18
"""A larger record is not sent."""
MOST_MESSAGE_BYTES = _HEAD.size + _RUN_BYTES + MOST_BYTES
_BUFFER_BYTES = 4 << 20
_CONNECT_S = 2.0
_SPARE = 2


def keepers(num_nodes: int, node: int | None = None) -> tuple[int, ...]:
    """The nodes whose agents keep the small records of the ranks of `node`: two others, the first one among them, so
    that the loss of two nodes of which one is the first leaves no rank without. `node` None: all that keep some."""
    some = tuple(range(min(num_nodes, _NUM_KEEPERS + 1)))
    return some if node is None else tuple(each for each in some if each != node)[:_NUM_KEEPERS]


def greeting_scope(scope: str) -> str:
    """What a rank's greeting is sealed for. `scope`: of the attempt."""
    return f"records/{scope}"


class Courier:
    """A rank's side. Training thread."""

    def __init__(self, address: tuple[str, int], scope: str, key: bytes | None, rank: int) -> None:
        """`address`: of another node's `agent.record_keeper`. `scope`: of the attempt. Never raises OSError."""
        self._left = b""
        self._socket: socket.socket | None = None
        hello = Seal(key, greeting_scope(scope), rank).close("hello", json.dumps({"rank": rank}))
        try:
            self._socket = socket.create_connection(address, _CONNECT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._socket.sendall(frame(hello.encode()))
            self._socket.setblocking(False)
        except OSError as error:
            self._give_up(error)

    def send(
        self,
        run_id: str,
        attempt: int,
        step: int,
        state: bytes,
        *,
        forecast: bool,
        trusted: bool,
        pinned: bool,
    ) -> None:
        """What the ring has just got. Never raises OSError, never waits."""
        if self._socket is None:
            return
        try:
            self._flush()
            if self._left:
                return  # the other side does not read fast enough: it has what was sent before
            if len(state) <= MOST_BYTES:
                record = BoundaryRecord(run_id, attempt, step, state, forecast, trusted, pinned)
                self._left = frame(_pack(record))
                self._flush()
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        while self._left and self._socket is not None:
            try:
                sent = self._socket.send(self._left)
            except BlockingIOError:
                return
            self._left = self._left[sent:]

    def _give_up(self, error: OSError) -> None:
        logger.debug("this rank's small records are not kept on another node: %s", error)
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether the connection has not failed."""
        return self._socket is not None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Couriers:
    """A rank's connections to all that keep its records. Training thread."""

    def __init__(self, addresses: str, num_nodes: int, node: int, scope: str, rank: int) -> None:
        """`addresses`: ``MINDX_REJOIN_NODES``, where nodes' agents hear ranks. `node`: of this rank."""
        known = {}
        for each in addresses.split():
            number, _, address = each.partition("=")
            host, _, port = address.rpartition(":")
            known[int(number)] = (host, int(port))
        self._wanted = [known[other] for other in keepers(num_nodes, node) if other in known]
        self._scope, self._rank = scope, rank
        self._open: dict[tuple[str, int], Courier] = {}

    def connect(self) -> Callable[..., None] | None:
        """At each entry: connect again where a connection has failed. Returns what sends a record; None: nobody keeps
        any."""
        for address in self._wanted:
            if address not in self._open or not self._open[address].is_open:
                self._open[address] = Courier(address, self._scope, board_key(), self._rank)
        return self._send if self._open else None

    def _send(self, *record: Any, **kind: Any) -> None:
        for courier in self._open.values():
            courier.send(*record, **kind)


def _pack(record: BoundaryRecord) -> bytes:
    """As it goes over a connection."""
    content = record.run_id.encode()[:_RUN_BYTES].ljust(_RUN_BYTES, b"\0") + record.content
    flags = _FORECAST * record.forecast | _TRUSTED * record.trusted | _PINNED * record.pinned
    digest = xxhash.xxh3_128_digest(content)
    return _HEAD.pack(record.attempt, record.step, flags, digest) + content


def _unpack(data: bytes) -> BoundaryRecord:
    """Raises ValueError."""
    if not _HEAD.size + _RUN_BYTES <= len(data) <= MOST_MESSAGE_BYTES:
        raise ValueError("what has come is no small record")
    attempt, step, flags, digest = _HEAD.unpack_from(data)
    content = data[_HEAD.size :]
    if xxhash.xxh3_128_digest(content) != digest:
        raise ValueError("a small record was damaged on its way")
    forecast, trusted, pinned = (bool(flags & flag) for flag in (_FORECAST, _TRUSTED, _PINNED))
    run_id = content[:_RUN_BYTES].rstrip(b"\0").decode("utf-8", "replace")
    return BoundaryRecord(run_id, attempt, step, content[_RUN_BYTES:], forecast, trusted, pinned)


class Kept:
    """The other node's side, of one rank: its newest records. One thread at a time."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bool, bool], deque[BoundaryRecord]] = {
            (False, False): deque(maxlen=NUM_BOUNDARIES),
            (True, False): deque(maxlen=NUM_FORECASTS),
            (False, True): deque(maxlen=NUM_PINNED),
        }

    def take(self, message: bytes) -> bool:
        """A message has come: keep the record. Whether it is one."""
        try:
            record = _unpack(message)
        except ValueError:
            return False
        self._kinds[record.forecast, record.pinned and not record.forecast].append(record)
        return True

    @property
    def records(self) -> list[BoundaryRecord]:
        """The oldest first."""
        found = [record for kind in self._kinds.values() for record in kind]
        return sorted(found, key=lambda record: (record.attempt, record.step, record.forecast))


def put_into_ring(records: Sequence[BoundaryRecord], ring_path: Path) -> int:
    """Put a rank's records, of the run of the newest, into its ring, unless that has newer ones. Returns how many.
    Raises ArenaError, OSError."""
    if not records:
        return 0
    run_id = records[-1].run_id
    records = [record for record in records if record.run_id == run_id]
    there: list[BoundaryRecord] = []
    with suppress(FileNotFoundError):
        there = [record for record in read_ring(ring_path) if record.run_id == run_id]
    own = max(((record.attempt, record.step) for record in there), default=(-1, -1))
    if own >= max((record.attempt, record.step) for record in records):
        return 0
    ring = BoundaryRing(ring_path, run_id, _SPARE * max(len(record.content) for record in records))
    try:
        for record in records:
            ring.write_again(record)
    finally:
        ring.close()
    return len(records)
