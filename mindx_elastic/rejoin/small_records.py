"""A rank's small records on two other nodes as well, so that they outlive the rank's own node.

What replicas do not share (random streams, buffers, counters) is in the rank's boundary ring, in its node's memory.
Each record of the ring goes to two other nodes' agents in the same moment (`Courier`; `lost_node.keepers` says which),
which keep the newest of each kind (`Kept`). They are a few kilobytes. Nothing waits for it: what does not fit into the
connection's buffer is left out. If the node is lost, the new processes of its ranks find their records on the board,
and put them into rings of their own (`put_into_ring`): then they go on bit for bit, as where only a process has died.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.agreement.sealed import Seal
from mindx_elastic.core.events import logger
from mindx_elastic.core.frames import frame
from mindx_elastic.memory.boundaries import (
    BOUNDARIES_FILE,
    NUM_BOUNDARIES,
    NUM_FORECASTS,
    NUM_PINNED,
    BoundaryRecord,
    BoundaryRing,
    read_ring,
)

__all__ = ["MOST_BYTES", "MOST_MESSAGE_BYTES", "Courier", "Kept", "newest", "put_into_ring", "records_in"]

_HEAD = struct.Struct("<qqQ16s")  # attempt, step, flags, digest
_FORECAST, _TRUSTED, _PINNED = 1, 2, 4
_RUN_BYTES = 64
MOST_BYTES = 1 << 18
"""A larger record is not sent."""
MOST_MESSAGE_BYTES = _HEAD.size + _RUN_BYTES + MOST_BYTES
_BUFFER_BYTES = 4 << 20
_CONNECT_S = 2.0
_MOST_NOTE_BYTES = 700_000  # less than a board takes, in base64
_SPARE = 2


class Courier:
    """A rank's side. Training thread."""

    def __init__(self, address: tuple[str, int], scope: str, key: bytes | None, rank: int) -> None:
        """`address`: of another node's `agent.heartbeat`. `scope`: of the attempt. Never raises OSError."""
        self._left = b""
        self._socket: socket.socket | None = None
        hello = Seal(key, f"heartbeat/{scope}", rank).close("hello", json.dumps({"rank": rank}))
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


def _pack(record: BoundaryRecord) -> bytes:
    """As it goes over a connection, and on the board."""
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

    def to_json(self) -> dict[str, Any]:
        """For the board: the oldest first. What would be too long for it is left out, the oldest first."""
        records = [record for kind in self._kinds.values() for record in kind]
        records.sort(key=lambda record: (record.attempt, record.step, record.forecast))
        while records and sum(len(record.content) for record in records) > _MOST_NOTE_BYTES:
            del records[0]
        return {"records": [base64.b64encode(_pack(record)).decode() for record in records]}


def records_in(content: Mapping[str, Any]) -> list[BoundaryRecord]:
    """What `Kept.to_json` has written. Raises ValueError, KeyError, TypeError for anything else."""
    return [_unpack(base64.b64decode(text, validate=True)) for text in content["records"]]


def newest(content: Mapping[str, Any]) -> tuple[int, int, int]:
    """To compare what several nodes have kept of one rank. Raises ValueError, KeyError, TypeError for anything else."""
    records = records_in(content)
    return max(((each.attempt, each.step, len(records)) for each in records), default=(-1, -1, 0))


def put_into_ring(content: Mapping[str, Any], run_id: str, folder: Path) -> int:
    """Put a rank's records of `run_id` into the ring in its `folder` in shared memory, unless that has newer ones: the
    rank had been on this very machine. Returns how many. Raises ValueError, KeyError, TypeError for anything else than
    records, and ArenaError, OSError."""
    records = [record for record in records_in(content) if record.run_id == run_id]
    there: list[BoundaryRecord] = []
    with suppress(FileNotFoundError):
        there = [record for record in read_ring(folder / BOUNDARIES_FILE) if record.run_id == run_id]
    own = max(((record.attempt, record.step) for record in there), default=(-1, -1))
    if not records or own >= max((record.attempt, record.step) for record in records):
        return 0
    ring = BoundaryRing(folder / BOUNDARIES_FILE, run_id, _SPARE * max(len(record.content) for record in records))
    try:
        for record in records:
            ring.write_again(record)
    finally:
        ring.close()
    return len(records)
