"""A rank's buffers on a device in its boundary ring: the BatchNorm statistics of rank 0 must not die with its process.

The program is ahead of the device, so it cannot wait for the values. It queues their copies into the ring instead, in
the order of the device's work: at the end of a forward, as a forecast, and at the boundary. Each is followed by a stamp
that the device counts up, so that a reader sees whether the device has come to it. The forecast lies before the step's
gradients are reduced: when a survivor's device holds the step, this rank's had taken part in its reduction, and the
forecast is there. Whether forecasts come true is found out on the device, too, and lies beside the stamp.

A place's room begins with 64 bytes: stamp, doubt (0: all forecasts before this one have come true), 16 bytes for a
digest (of a ring that was copied to disk; zeros: none). The bytes follow.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

import torch
import xxhash

from mindx_elastic.capture.collector import Collector

__all__ = ["ROOM_HEAD", "DeviceBuffers", "landed_bytes", "put_landed", "seal_room"]

ROOM_HEAD = 64
_STAMPS = struct.Struct("<qq16s")
_NO_DIGEST = bytes(16)
_Place = Sequence[torch.Tensor]


class DeviceBuffers:
    """Queues the copies. Training thread; nothing here waits for the device."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._ahead: list[torch.Tensor] | None = None
        self._stamps: torch.Tensor | None = None
        self._last_stamp = 0
        self._forecast_room: torch.Tensor | None = None
        self._queued: torch.cuda.Event | None = None
        self._is_doubted = False

    def collect(self, modules: Collection[str], *, ahead: bool) -> tuple[str, list[torch.Tensor]]:
        """What to queue, and what it holds as JSON: the modules' buffers as they are now, or those of the boundary."""
        if ahead and self._has_doubt():
            return "", []
        places, runs = self._collector.buffers_on_device(modules, ahead=ahead)
        if runs and runs[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._is_doubted = True  # a graph's replays run no hooks
            return "", []
        if len({run.device for run in runs}) > 1:  # two devices keep no order
            return "", []
        if ahead:
            self._ahead = runs
        elif self._ahead is not None:
            self._compare(self._ahead, runs)
            self._ahead = None
        return places, runs

    def _has_doubt(self) -> bool:
        if not self._is_doubted and self._forecast_room is not None:
            self._is_doubted = bool(self._forecast_room[8:16].any())
        return self._is_doubted

    @torch.no_grad()
    def _compare(self, ahead: _Place, runs: _Place) -> None:
        """At the boundary: let the device find out whether the forecast has come true."""
        if self._stamps is None:
            return
        if [run.numel() for run in ahead] != [run.numel() for run in runs]:
            self._is_doubted = True
            self._stamps[1:].add_(1)
            return
        for foreseen, run in zip(ahead, runs, strict=True):
            self._stamps[1:].add_(torch.ne(foreseen.view(torch.int64), run.view(torch.int64)).any())

    def begin(self, device: torch.device, first_stamp: int) -> None:
        """The ring is open. `first_stamp`: higher than any in it."""
        if self._stamps is None or self._stamps.device != device:
            self._stamps = torch.tensor([first_stamp, int(self._is_doubted)], dtype=torch.int64, device=device)
            self._last_stamp = first_stamp

    @torch.no_grad()
    def queue(self, room: torch.Tensor, runs: _Place, *, forecast: bool) -> int:
        """Queue copies of `runs` into a place's `room`, and the stamp that tells that they are there. Returns it."""
        assert self._stamps is not None
        self._stamps[:1].add_(1)
        self._last_stamp += 1
        start = ROOM_HEAD
        for run in runs:
            room[start : start + run.numel()].copy_(run, non_blocking=True)
            start += run.numel()
        room[:16].view(torch.int64).copy_(self._stamps, non_blocking=True)
        if forecast:
            self._forecast_room = room
        if self._stamps.is_cuda:
            if self._queued is None:
                self._queued = torch.cuda.Event()
            self._queued.record(torch.cuda.current_stream(self._stamps.device))
        return self._last_stamp

    @property
    def is_done(self) -> bool:
        """Whether the device writes into the ring no more. False also where it has failed."""
        try:
            return self._queued is None or self._queued.query()
        except RuntimeError:
            return False

    def forget_room(self) -> None:
        """The ring is closed."""
        self._forecast_room = None


def landed_bytes(room: memoryview, stamp: int, length: int, *, forecast: bool) -> bytes:
    """The bytes in a place's `room`; empty where the device had not come to `stamp`, the forecasts of the rank do not
    come true, or they are damaged."""
    found, doubt, digest = _STAMPS.unpack_from(room, 0)
    if stamp == 0 or found != stamp or (forecast and doubt != 0):
        return b""
    content = bytes(room[ROOM_HEAD : ROOM_HEAD + length])
    return content if digest in (_NO_DIGEST, xxhash.xxh3_128_digest(content)) else b""


def put_landed(content: bytes, room: torch.Tensor) -> int:
    """Write `content` into a place's `room`, as a device has left it in another ring. Returns the stamp."""
    room[:ROOM_HEAD] = 0
    room[0] = 1  # the stamp; no doubt
    room[ROOM_HEAD : ROOM_HEAD + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return 1


def seal_room(room: memoryview, length: int) -> None:
    """Put a digest to the bytes of a ring whose process has ended, before the ring is copied."""
    stamp, doubt, _ = _STAMPS.unpack_from(room, 0)
    digest = xxhash.xxh3_128_digest(bytes(room[ROOM_HEAD : ROOM_HEAD + length]))
    _STAMPS.pack_into(room, 0, stamp, doubt, digest)
