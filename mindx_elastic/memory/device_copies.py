"""A rank's buffers on a device in its boundary ring: the BatchNorm statistics of rank 0 must not die with its process.

The program is ahead of the device, so it cannot wait for the values. It queues their copies into the ring instead, in
the order of the device's work: at the end of a forward, as a forecast, and at the boundary. Each is followed by a stamp
that the device sets, so that a reader sees whether the device has come to it. The forecast lies before the step's
gradients are reduced: when a survivor's device holds the step, this rank's had taken part in its reduction, and the
forecast is there.

Whether forecasts come true is found out on the device, too, and lies beside the stamp as the *doubt*: -1 none has come
out yet, 0 all have come true, 1 one has not. Where the device has not come to a boundary that its program has passed,
the forecast of it stands in, if the program could say at the boundary that nothing seems to have changed since
(`Addition.forecast_stands_in`).

A place's room begins with 64 bytes: stamp, doubt, 16 bytes for a digest (of a ring that was copied to disk; zeros:
none). The content follows: the length of a JSON text in 8 bytes, the text (see `Collector.copy_from_device`), and the
bytes of the buffers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

from mindx_elastic.capture.buffer_block import view_of
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.graph_replays import is_capturing
from mindx_elastic.core.events import logger

__all__ = ["ROOM_HEAD", "Addition", "DeviceCopies", "landed_bytes", "put_landed", "seal_room", "tensors_of"]

ROOM_HEAD = 64
_STAMPS = struct.Struct("<qq16s")
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 16
_NO_DIGEST = bytes(16)
_UNKNOWN = -1
_MOST_BYTES = 8 << 20
"""The ring has ten places, and its memory is page-locked."""


@dataclass(frozen=True)
class Addition:
    """What a device writes beside a record."""

    nbytes: int
    device: torch.device
    put: Callable[[torch.Tensor], int]
    """Lets the device write into the place's room, which it is given. Returns the stamp that it will set there."""
    forecast_stands_in: bool = False
    """The record is of a boundary, and as far as the program sees the last forecast of it has come true."""


class _Ring(Protocol):
    """Of a `BoundaryRing`: what is needed of it here."""

    @property
    def last_stamp(self) -> int: ...

    def admits(self, device: torch.device) -> bool: ...

    def close(self) -> None: ...


class DeviceCopies:
    """Queues the copies. Training thread. Nothing here waits for the device, but for the opening of a ring."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._ring: _Ring | None = None
        self._stamps: torch.Tensor | None = None  # stamp and doubt, on the device
        self._last_stamp = 0
        self._foreseen: tuple[bytes, Sequence[torch.Tensor]] | None = None
        self._has_forward_since = False
        self._forecast_room: torch.Tensor | None = None
        self._queued: dict[int, torch.cuda.Event] = {}  # the last one of each stream
        self._is_doubted = self._is_off = False

    def note_forward(self) -> None:
        """A forward has ended of which no forecast is made."""
        self._has_forward_since = True

    def collect(self, modules: Collection[str], *, forecast: bool) -> Addition | None:
        """What to queue beside the next record: the modules' buffers as they are now, or those of the boundary. None:
        there is nothing."""
        if self._is_off or (forecast and self._has_doubt()):
            return None
        if is_capturing():
            self._is_doubted = True  # a graph's replays run no hooks
            return None
        if (nbytes := self._collector.device_nbytes(modules)) > _MOST_BYTES:
            self.turn_off(f"they have {nbytes >> 20} MiB, and {_MOST_BYTES >> 20} are the most")
            return None
        layout, runs = self._collector.copy_from_device(modules, ahead=forecast)
        if not runs or len({run.device for run in runs}) > 1:  # two devices keep no order
            return None
        stands_in = False
        if forecast:
            self._foreseen, self._has_forward_since = (layout, runs), False
        elif self._foreseen is not None:
            as_laid_out = self._compare(self._foreseen, (layout, runs))
            stands_in = as_laid_out and not self._has_forward_since and self._collector.device_is_as_ahead(modules)
            self._foreseen = None
        head = _LENGTH.pack(len(layout)) + layout
        head += b" " * (-len(head) % _ALIGNMENT)
        nbytes = len(head) + sum(run.numel() for run in runs)
        return Addition(nbytes, runs[0].device, lambda room: self._queue(room, head, runs, forecast), stands_in)

    def turn_off(self, why: str) -> None:
        """From here on they are not kept, which is said."""
        self._is_off = True
        logger.info(
            "buffers on the device are not kept at each boundary (%s): a killed rank goes on with another one's. "
            "--snapshot-every 1 keeps them",
            why,
        )

    def _has_doubt(self) -> bool:
        if not self._is_doubted and self._forecast_room is not None:
            self._is_doubted = int(self._forecast_room[8:16].view(torch.int64)) > 0
        return self._is_doubted

    @torch.no_grad()
    def _compare(
        self, foreseen: tuple[bytes, Sequence[torch.Tensor]], found: tuple[bytes, Sequence[torch.Tensor]]
    ) -> bool:
        """At the boundary: let the device find out whether the forecast has come true. Returns whether it is laid out
        alike."""
        if self._stamps is None:
            return False
        if foreseen[0] != found[0]:
            self._is_doubted = True
            self._stamps[1:].fill_(1)
            return False
        for ahead, run in zip(foreseen[1], found[1], strict=True):
            differs = torch.ne(ahead.view(torch.int64), run.view(torch.int64)).any()
            torch.maximum(self._stamps[1:], differs.to(torch.int64), out=self._stamps[1:])
        return True

    def attach(self, ring: _Ring, device: torch.device) -> bool:
        """Use `ring` from here on. Returns whether `device` is to write into it."""
        if self._is_off:
            return False
        if self._ring is ring and self._stamps is not None and self._stamps.device == device:
            return True
        if not ring.admits(device):
            self.turn_off("CUDA cannot page-lock the ring's memory")
            return False
        if self._stamps is None or self._stamps.device != device:
            self._stamps = torch.full((2,), _UNKNOWN, dtype=torch.int64, device=device)
        self._last_stamp = max(self._last_stamp, ring.last_stamp)
        self._ring = ring
        return True

    @torch.no_grad()
    def _queue(self, room: torch.Tensor, head: bytes, runs: Sequence[torch.Tensor], forecast: bool) -> int:
        assert self._stamps is not None
        self._last_stamp += 1
        self._stamps[:1].fill_(self._last_stamp)
        start = ROOM_HEAD + len(head)
        room[ROOM_HEAD:start] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for run in runs:
            room[start : start + run.numel()].copy_(run, non_blocking=True)
            start += run.numel()
        room[:16].view(torch.int64).copy_(self._stamps, non_blocking=True)
        if forecast:
            self._forecast_room = room
        if self._stamps.is_cuda:
            stream = torch.cuda.current_stream(self._stamps.device)
            self._queued.setdefault(stream.cuda_stream, torch.cuda.Event()).record(stream)
        return self._last_stamp

    def leave(self, ring: _Ring) -> None:
        """Close `ring`, as soon as the device writes into it no more."""
        queued, self._queued = list(self._queued.values()), {}
        self._ring = self._forecast_room = None
        _left.append((ring, queued))
        for each in list(_left):
            if all(map(_is_done, each[1])):
                _left.remove(each)
                each[0].close()


_left: list[tuple[_Ring, list[torch.cuda.Event]]] = []
"""Rings that a device may still write into. Their memory stays."""


def _is_done(event: torch.cuda.Event) -> bool:
    """False also where the device has failed."""
    try:
        return bool(event.query())
    except RuntimeError:
        return False


# --- reading ---


def landed_bytes(room: memoryview, stamp: int, length: int, *, forecast: bool) -> bytes:
    """The content of a place's `room`; empty where the device had not come to `stamp`, where the rank's forecasts are
    not known to come true, or where it is damaged."""
    found, doubt, digest = _STAMPS.unpack_from(room, 0)
    if stamp == 0 or found != stamp or (forecast and doubt != 0):
        return b""
    content = bytes(room[ROOM_HEAD : ROOM_HEAD + length])
    return content if digest == _NO_DIGEST or digest == xxhash.xxh3_128_digest(content) else b""


def put_landed(content: bytes, room: torch.Tensor) -> int:
    """Write `content` into a place's `room`, as a device has left it in another ring. Returns the stamp."""
    room[:ROOM_HEAD] = 0
    room[0] = 1  # the stamp; no doubt
    room[ROOM_HEAD : ROOM_HEAD + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return 1


def seal_room(room: memoryview, length: int) -> None:
    """Put a digest to the content of a ring whose process has ended, before the ring is copied."""
    stamp, doubt, _ = _STAMPS.unpack_from(room, 0)
    digest = xxhash.xxh3_128_digest(bytes(room[ROOM_HEAD : ROOM_HEAD + length]))
    _STAMPS.pack_into(room, 0, stamp, doubt, digest)


def tensors_of(content: bytes) -> dict[str, dict[str, torch.Tensor]]:
    """The buffers of each module, by name. Raises ValueError, LookupError, TypeError, RuntimeError, AttributeError for
    what is no such content."""
    length = _LENGTH.unpack_from(content)[0] if len(content) >= _LENGTH.size else 0
    start = _LENGTH.size + length
    layout = json.loads(content[_LENGTH.size : start])
    start += -start % _ALIGNMENT
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for module, (nbytes, parts) in layout.items():
        run = whole[start : start + nbytes]
        found[module] = {str(name): view_of(run, part) for name, part in parts}
        start += nbytes
    return found
