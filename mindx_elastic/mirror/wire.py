"""The protocol between two ranks when a checkpoint file is copied, and how long they wait.

Every connection carries one request and its answers, each a JSON object in a frame (`core.frames`):

=========  =========================================  ============================================================
``op``     further fields                             then
=========  =========================================  ============================================================
``here``                                              ``{}``; the connection stays open for as long as files come
``put``    ``root, name, size, header``               ``{"have": true}``, or ``{"send": true}``, a file, ``{}``
``keep``   ``size, head, header``                     ``{"have": true}``, or ``{"send": true}``, a snapshot, ``{}``
``get``    ``root, name``                             ``{"size": n, "head": n}`` and a file or snapshot
``drop``   ``root, name, run_id``                     ``{}``
=========  =========================================  ============================================================

A file, or snapshot, is its bytes and the 16 bytes of their xxh3-128. An answer with ``error`` is the end. No object but
`MirrorRequest` is ever built from a message.

Where the job has a key, the store does not hold the token itself: only what the ranks derive it from
(`Exchange.derive`).
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import xxhash

from mindx_elastic.core.fields import Between, Text
from mindx_elastic.core.folders import STEP_FOLDER
from mindx_elastic.core.frames import HEAD_BYTES, content_length, frame
from mindx_elastic.errors import CorruptCheckpointError
from mindx_elastic.persist.direct_io import BlockWriter
from mindx_elastic.persist.format import CheckpointInfo, Header, read_header
from mindx_elastic.persist.writer import copied_file

__all__ = [
    "MAX_FILE_BYTES",
    "MAX_MESSAGE_BYTES",
    "PATIENCE_S",
    "Channel",
    "Endpoint",
    "MirrorRequest",
    "ask",
    "header_digest",
    "incoming",
    "rank_of",
]

MAX_MESSAGE_BYTES = 16 << 10
MAX_FILE_BYTES = 1 << 46
PATIENCE_S = 20.0
"""Longest wait for the next bytes; a disk that flushes gigabytes needs some of it."""
CONNECT_S = 3.0

_PIECE_BYTES = 1 << 20
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}  # seconds, and how often
_RANK_FOLDER = re.compile(r"rank_(0|[1-9][0-9]{0,8})")
_FILE_NAME = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,200}\.safetensors")


def rank_of(name: object) -> int | None:
    """The rank whose file the relative path `name` is; None for a path that our writer does not make.

    ``rank_{r}/{file}.safetensors``, and the same below the folder of a step; nothing else.
    """
    if not isinstance(name, str):
        return None
    *above, folder, file = ["", *name.split("/")]  # one more, so that there are two at least
    in_rank = _RANK_FOLDER.fullmatch(folder)
    if len(above) not in (1, 2) or (len(above) == 2 and not STEP_FOLDER.fullmatch(above[1])):
        return None
    return int(in_rank[1]) if in_rank is not None and _FILE_NAME.fullmatch(file) else None


def header_digest(fd: int, header: Header) -> str:
    """Names the content of a checkpoint file: its header holds the digests of all tensors."""
    return xxhash.xxh3_128_hexdigest(os.pread(fd, header.data_start, 0))


@dataclass(frozen=True)
class Endpoint:
    """Where a rank's server listens."""

    host: Annotated[str, Text(255, r"[A-Za-z0-9_.:%-]+")]
    port: Annotated[int, Between(1, 65535)]
    token: Annotated[str, Text(64, "[A-Za-z0-9]+")]


@dataclass(frozen=True, kw_only=True)
class MirrorRequest:
    """What a rank asks for."""

    op: Literal["here", "put", "keep", "get", "drop"]
    token: str
    """The one that the server has published."""
    rank: int
    """Who asks."""
    root: int = -1
    """Number of the directory."""
    name: str = ""
    """Relative path of the file."""
    size: int = 0
    head: int = 0
    """Bytes before the data section."""
    header: str = ""
    """xxh3-128 of the bytes before the data section, which hold the digests of all tensors: it names the content."""
    run_id: str = ""


class Channel:
    """One connection. Every wait ends after `patience_s` seconds, and at `deadline` (`time.monotonic`): TimeoutError.

    All other errors are OSErrors too. One thread, except `abort`.
    """

    def __init__(self, sock: socket.socket, *, deadline: float = math.inf, patience_s: float = PATIENCE_S) -> None:
        self._socket, self.deadline, self.patience_s = sock, deadline, patience_s

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.abort()
        self._socket.close()

    def abort(self) -> None:
        """End the connection, for the other side and for a thread that waits in it. Any thread.

        Not by closing alone: a forked child (a loader's worker) may hold the same connection.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {len(text)} bytes is too long")
        self._send(frame(text))

    def receive(self) -> dict[str, Any]:
        length = content_length(self._receive_exactly(HEAD_BYTES), MAX_MESSAGE_BYTES)
        try:
            content = json.loads(self._receive_exactly(length))
        except (ValueError, RecursionError):
            raise ConnectionError("the other side has sent a message that is not JSON") from None
        if not isinstance(content, dict):
            raise ConnectionError("the other side has sent a message that is not an object")
        return content

    def answer(self) -> dict[str, Any]:
        """The next message; raises ConnectionError with the other side's words when it says no."""
        content = self.receive()
        if "error" in content:
            raise ConnectionError(str(content["error"])[:500])
        return content

    def send_file(
        self,
        fd: int,
        size: int,
        *,
        header: bytes = b"",
        pace: Callable[[int, float], None] = lambda count, took_s: None,
    ) -> None:
        """Send the first `size` bytes of `fd`, and their digest. `header`: what goes in the place of the first of them.
        `pace` is called after each piece with its bytes and the seconds that it took, and may raise to break off."""
        digest, buffer = xxhash.xxh3_128(header), memoryview(bytearray(_PIECE_BYTES))
        self._send(header)
        sent = len(header)
        while sent < size:
            count = os.preadv(fd, [buffer[: min(_PIECE_BYTES, size - sent)]], sent)
            if count == 0:
                raise OSError("the file was cut off while it was read")
            digest.update(buffer[:count])
            began = time.perf_counter()
            self._send(buffer[:count])
            pace(count, time.perf_counter() - began)
            sent += count
        self._send(digest.digest())

    def receive_file(self, blocks: BlockWriter, size: int) -> None:
        """Write what `send_file` sends. Raises CorruptCheckpointError for a digest that differs."""
        digest, buffer = xxhash.xxh3_128(), torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu")
        view = buffer.numpy().data
        left = size
        while left:
            count = self._receive_some(view[: min(_PIECE_BYTES, left)])
            digest.update(view[:count])
            blocks.put(buffer[:count])
            left -= count
        if self._receive_exactly(digest.digest_size) != digest.digest():
            raise CorruptCheckpointError("the file was damaged on its way")

    def receive_behind(self, memory: memoryview, head: int) -> bytes:
        """Put what `send_file` sends into `memory`, but for its first `head` bytes, which are returned. Raises
        CorruptCheckpointError for a digest that differs."""
        header = self._receive_exactly(head)
        digest, done = xxhash.xxh3_128(header), head
        while done < len(memory):
            count = self._receive_some(memory[done : done + _PIECE_BYTES])
            digest.update(memory[done : done + count])
            done += count
        if self._receive_exactly(digest.digest_size) != digest.digest():
            raise CorruptCheckpointError("the snapshot was damaged on its way")
        return header

    def wait_for_end(self) -> None:
        """Block until the other side, or `abort`, ends the connection, or its machine answers no more. The only wait
        here without a bound."""
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        with suppress(OSError):
            self._socket.recv(1)

    def _arm(self) -> None:
        left = min(self.patience_s, self.deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("no time is left")
        self._socket.settimeout(left)

    def _send(self, data: bytes | memoryview) -> None:
        self._arm()
        self._socket.sendall(data)

    def _receive_some(self, view: memoryview) -> int:
        self._arm()
        count = self._socket.recv_into(view)
        if count == 0:
            raise ConnectionError("the other side has ended the connection")
        return count

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            done += self._receive_some(view[done:])
        return bytes(data)


def ask(endpoint: Endpoint, rank: int, op: str, *, deadline: float = math.inf, **fields: Any) -> Channel:
    """Connect and send a `MirrorRequest`; the caller reads the answer and closes. Raises OSError."""
    connect_s = min(CONNECT_S, deadline - time.monotonic())
    if connect_s <= 0:
        raise TimeoutError("no time is left")
    channel = Channel(socket.create_connection((endpoint.host, endpoint.port), connect_s), deadline=deadline)
    try:
        channel.send({"token": endpoint.token, "rank": rank, "op": op, **fields})
    except BaseException:
        channel.close()
        raise
    return channel


@contextmanager
def incoming(path: Path, size: object, *, rank: int, world_size: int) -> Iterator[Callable[[Channel], None]]:
    """A file of `rank` that is coming in, see `copied_file`; yields what takes its bytes from a channel. Raises OSError
    when there is no room, or for a size that cannot be, CheckpointError for no file of `rank`."""
    if type(size) is not int or not 0 < size <= MAX_FILE_BYTES:
        raise OSError(f"{size!r} is not a size of a file")

    def look(temp: Path) -> CheckpointInfo:
        info = read_header(temp).info
        if (info.rank, info.world_size) != (rank, world_size):
            problem = f"a file of rank {info.rank} of {info.world_size}, not of {rank} of {world_size}"
            raise CorruptCheckpointError(f"{path.name}: {problem}", path=path)
        return info

    with copied_file(path, size, look) as blocks:
        yield lambda channel: channel.receive_file(blocks, size)
