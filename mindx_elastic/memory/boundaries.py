"""A rank's volatile state at its last boundaries, in shared memory, written at every step.

Where every rank holds the same weights (DDP), the weights of a killed rank live on in the others; what dies with it are
its own random generators, buffers and counters. They are a few kilobytes, so they are kept for every boundary. The last
places of the ring hold the *forecast*: generators and buffers as they were at the end of the newest forward, before the
gradients were reduced. The survivors of a rank that was killed in its update have passed the boundary that it did not
reach; a rank whose random generators do not move between forward and boundary, which is checked at every boundary,
would have reached it with exactly these. Two more places are *pinned*: the boundaries of the last two snapshots that
another rank of the machine has taken of the weights that all share.

The ring is a file of fixed places. A place holds: sequence (odd while it is written), attempt, step, length, flags,
digest, bytes. What is on a device is not in it: the program is ahead of the device and cannot wait for it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import nn
from torch.distributed import ProcessGroup

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.device_progress import forward_fits_queue
from mindx_elastic.capture.rng import unpack_raw_rng
from mindx_elastic.core.events import logger
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Owners, open_trusted
from mindx_elastic.core.posix import read_small
from mindx_elastic.errors import ArenaError, CorruptCheckpointError, UnsupportedStateError
from mindx_elastic.memory.arena import ArenaFile, RankArena
from mindx_elastic.persist.packer import StatePacker, unpack_sections

__all__ = [
    "BOUNDARIES_FILE",
    "BoundaryLog",
    "BoundaryRecord",
    "BoundaryRing",
    "OwnState",
    "StepCounter",
    "read_ring",
]


_NUM_BOUNDARIES, _NUM_FORECASTS, _NUM_PINNED = 4, 2, 2
_NUM_PLACES = _NUM_BOUNDARIES + _NUM_FORECASTS + _NUM_PINNED
_MAGIC = b"mindxbr2"
_TOP = struct.Struct("<8sQ64s")  # magic, bytes of a record at most, run id
_TOP_ROOM = 128
_HEAD = struct.Struct("<QqqQQ16s")  # sequence, attempt, step, length, flags, digest
_HEAD_ROOM = 64
_LINE = 64
_SEQUENCE = struct.Struct("<Q")
_FORECAST, _TRUSTED, _IS_PINNED = 1, 2, 4
_BOUNDARIES = range(_NUM_BOUNDARIES)
_FORECASTS = range(_NUM_BOUNDARIES, _NUM_BOUNDARIES + _NUM_FORECASTS)
_PINNED = range(_NUM_BOUNDARIES + _NUM_FORECASTS, _NUM_PLACES)


@dataclass(frozen=True)
class OwnState:
    """A rank's own small state of one step, still packed."""

    content: bytes
    forecast: bool
    """It never reached this boundary; the state is what it would have been there (see above)."""
    trusted: bool = True
    """Of a forecast: others of this rank have come true before. False in a process's first step: then it may be used
    only where the boundary has come out as forecast on another rank."""

    @property
    def is_whole(self) -> bool:
        """Whether it has all that this rank may have otherwise than another: not where weights were too large for it.
        Raises CorruptCheckpointError."""
        return not self.forecast and not self.unpack().get("moves")

    def unpack(self) -> dict[str, Any]:
        """Raises CorruptCheckpointError."""
        state = unpack_sections(self.content)
        if not isinstance(state, dict) or not isinstance(state.get("rng"), dict) or "buffers" not in state:
            raise CorruptCheckpointError("a record of the boundary ring does not hold what it should")
        try:
            return {**state, "rng": unpack_raw_rng(state["rng"])}
        except ValueError as error:
            raise CorruptCheckpointError(f"a record of the boundary ring: {error}") from None


@dataclass(frozen=True, kw_only=True)
class BoundaryRecord(OwnState):
    """One boundary in a ring, or the forecast of one."""

    run_id: str
    attempt: int
    step: int
    pinned: bool = False
    """Kept because of a snapshot; the same boundary may be there a second time."""

    @property
    def moment(self) -> Moment:
        return (self.run_id, self.attempt, self.step)


class BoundaryRing:
    """The writer's side, training thread only. `capacity` is the room of one place in bytes."""

    def __init__(self, path: Path, run_id: str, capacity: int) -> None:
        """Open or make the file; what an earlier process of the run wrote is kept until it is overwritten.

        Raises ArenaError when there is no room.
        """
        capacity += -capacity % _LINE
        self._run_id = run_id.encode()[:64]
        there, room = _read_top(path)
        if there == run_id and room >= capacity:
            self._map_file(path, room)
            return
        kept = read_ring(path) if there == run_id else []
        larger = path.with_name(f"{path.name}.new")  # not in place: a kill now must not cost the older boundaries
        larger.unlink(missing_ok=True)
        self._map_file(larger, capacity)
        for record in reversed(kept):
            kind = {"forecast": record.forecast, "trusted": record.trusted, "pinned": record.pinned}
            self.write(record.attempt, record.step, record.content, **kind)
        os.replace(larger, path)

    def _map_file(self, path: Path, capacity: int) -> None:
        self._file, self.capacity = ArenaFile(path), capacity
        self._stride = _HEAD_ROOM + capacity
        self._map = self._file.resize(_TOP_ROOM + _NUM_PLACES * self._stride)
        self._next = max(map(self._sequence, range(_NUM_PLACES))) // 2 + 1
        self._newest: tuple[int, int] | None = None
        # Each begins with the place that is written next, the oldest.
        kinds = (_BOUNDARIES, _FORECASTS, _PINNED)
        self._boundaries, self._forecasts, self._pinned = (deque(sorted(k, key=self._sequence)) for k in kinds)
        self._map[: _TOP.size] = _TOP.pack(_MAGIC, capacity, self._run_id)

    def write(
        self,
        attempt: int,
        step: int,
        content: bytes,
        *,
        forecast: bool = False,
        trusted: bool = True,
        pinned: bool = False,
    ) -> bool:
        """Keep one record in the oldest place of its kind; False when it does not fit (`capacity`)."""
        length = len(content)
        if length > self.capacity:
            return False
        places = self._pinned if pinned else self._forecasts if forecast else self._boundaries
        place = places[0]
        places.rotate(-1)
        if places is self._boundaries:
            if self._newest == (attempt, step):  # the same once more: the next one goes over the first writing of it
                places.rotate(1)
                places[0], places[-1] = places[-1], place
            self._newest = attempt, step
        start = _TOP_ROOM + place * self._stride
        sequence, self._next = self._next, self._next + 1
        _SEQUENCE.pack_into(self._map, start, 2 * sequence - 1)
        self._map[start + _HEAD_ROOM : start + _HEAD_ROOM + length] = content
        flags = _FORECAST * forecast | _TRUSTED * trusted | _IS_PINNED * pinned
        digest = xxhash.xxh3_128_digest(content)
        _HEAD.pack_into(self._map, start, 2 * sequence - 1, attempt, step, length, flags, digest)
        _SEQUENCE.pack_into(self._map, start, 2 * sequence)
        return True

    def close(self) -> None:
        self._file.close()

    def _sequence(self, place: int) -> int:
        return int(_SEQUENCE.unpack_from(self._map, _TOP_ROOM + place * self._stride)[0])


def read_ring(path: Path, owners: Owners | None = None) -> list[BoundaryRecord]:
    """Every sound record of a ring, however its writer ended; the newest first. `owners`: whose files count.

    Raises OSError, UntrustedFileError.
    """
    fd = open_trusted(path, owners)
    try:
        size = os.fstat(fd).st_size
        if size < _TOP_ROOM:
            return []
        with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
            # Of several forecasts of a step (two forwards) the last one counts.
            found = sorted(_records(data, size), key=lambda r: (r[1].attempt, r[1].step, not r[1].forecast, r[0]))
        return [record for _, record in reversed(found)]
    finally:
        os.close(fd)


def _read_top(path: Path) -> tuple[str | None, int]:
    try:
        return _parse_top(read_small(path, _TOP_ROOM))
    except OSError:
        return None, 0


def _parse_top(data: bytes) -> tuple[str | None, int]:
    """The run, and the room of a place; None: it is not a ring."""
    if len(data) < _TOP.size:
        return None, 0
    magic, capacity, run_id = _TOP.unpack(data[: _TOP.size])
    return (run_id.rstrip(b"\0").decode("utf-8", "replace"), capacity) if magic == _MAGIC else (None, 0)


def _records(data: mmap.mmap, size: int) -> Iterator[tuple[int, BoundaryRecord]]:
    """Sound records, and the place of each in the order of writing."""
    run_id, capacity = _parse_top(data[:_TOP_ROOM])
    stride = _HEAD_ROOM + capacity
    if run_id is None or size != _TOP_ROOM + _NUM_PLACES * stride:
        return
    for start in range(_TOP_ROOM, size, stride):
        sequence, attempt, step, length, flags, digest = _HEAD.unpack_from(data, start)
        if sequence == 0 or sequence % 2 or length > capacity:
            continue
        content = data[start + _HEAD_ROOM : start + _HEAD_ROOM + length]
        if xxhash.xxh3_128_digest(content) == digest:
            forecast, trusted, pinned = (bool(flags & flag) for flag in (_FORECAST, _TRUSTED, _IS_PINNED))
            yield (
                sequence,
                BoundaryRecord(content, forecast, trusted, run_id=run_id, attempt=attempt, step=step, pinned=pinned),
            )


BOUNDARIES_FILE = "boundaries"
_SPARE = 2.0  # room for a state that grows (lists of numbers in a scheduler or a callback)
_LEAST = 1 << 16


class StepCounter(Protocol):
    """Who counts the steps, also those that end without a boundary."""

    step: int
    """The last one that has ended."""


class BoundaryLog:
    """Writes the ring: at each boundary, and at the end of each forward. One per guard of a replicated job.

    Training thread only.
    """

    def __init__(
        self,
        arena: RankArena,
        collector: Collector,
        modules: Iterable[nn.Module],
        counter: StepCounter,
    ) -> None:
        """`modules`: the wrapped ones (their forward ends before gradients are reduced)."""
        self._arena, self._collector, self._counter = arena, collector, counter
        self._ring: BoundaryRing | None = None
        self._packers = {forecast: StatePacker("plain", "extras", frozen="rng") for forecast in (False, True)}
        self._run_id, self._attempt = "", 0
        self._trusted = False
        followed = list(modules)
        # Once a forecast was wrong, none is trusted any more. PowerSGD's state changes after the forward, on each rank.
        self._doubted = any(
            state is not None and not isinstance(state, ProcessGroup)
            for module in followed
            for _, state in getattr(module, "_comm_hooks", ())
        )
        self._broken = False
        collector.devices.waits_in_forward = forward_fits_queue(followed)
        # Not the method itself: a program that copies its model (to average weights) would copy this object with it.
        self._handles = [module.register_forward_hook(lambda *_: self._forward_ended()) for module in followed]

    def begin(self, run_id: str, attempt: int, *, has_resumed: bool = False) -> None:
        """Keep all boundaries from here on. `has_resumed`: and the one that the job has resumed from. It is in a file,
        but a recovery in place takes only what is in memory, and goes on from there when a rank dies before the next
        one."""
        self._run_id, self._attempt = run_id, attempt
        if has_resumed:
            self.keep()

    def begin_again(self, run_id: str, attempt: int, moment: Moment) -> None:
        """As `begin`, after a recovery in place at the boundary `moment`: no file has this rank's state of it, so it is
        kept: for the next recovery, and pinned for a restart from the snapshot that another rank has made of it."""
        self._trusted = _was_trusted(self._arena.folder / BOUNDARIES_FILE, run_id)
        self._run_id, self._attempt = run_id, moment[1]
        self.pin()
        self._attempt = attempt
        self.keep()

    def pin(self) -> None:
        """Keep the boundary that was just written for longer: another rank has taken a snapshot of it."""
        if self._run_id and not self._broken:
            self._write(self._collector.position.step, self._collector.volatile, pinned=True)

    def at_boundary(self, *, after_tail: bool = False) -> None:
        """A boundary has just been copied by the collector. `after_tail`: once more, after code that follows it."""
        if not after_tail:  # that code was no part of the forecast
            came_true = self._collector.forecast_correct = self._collector.forecast_came_true()
            if came_true is False and not self._doubted:
                self._doubt()
            elif came_true:
                self._trusted = not self._doubted
        self._write(self._collector.position.step, self._collector.volatile)

    def keep(self) -> None:
        """Write down the boundary that the collector has copied."""
        self._write(self._collector.position.step, self._collector.volatile)

    def _doubt(self) -> None:
        """A forecast was wrong: trust none any more, nor may a later process (`_was_trusted`)."""
        self._doubted, self._trusted = True, False
        for _ in _FORECASTS:
            self._write(self._collector.position.step, self._collector.volatile, forecast=True)

    def _forward_ended(self) -> None:
        # Without gradients this is an evaluation: what it draws shows at the boundary, as a forecast that failed.
        if self._run_id and not self._broken and not self._doubted and torch.is_grad_enabled():
            self._write(self._counter.step + 1, self._collector.copy_ahead, forecast=True)
        devices = self._collector.devices
        if devices.keeps_older:
            devices.end_forward()

    def _write(
        self, step: int, collect: Callable[[], dict[str, Any]], *, forecast: bool = False, pinned: bool = False
    ) -> None:
        if self._broken:
            return
        try:
            content = self._packers[forecast].pack(collect())
            kind = {"forecast": forecast, "trusted": self._trusted or not forecast, "pinned": pinned}
            ring = self._ring
            if ring is None or not ring.write(self._attempt, step, content, **kind):
                self._leave_ring()
                path, capacity = self._arena.folder / BOUNDARIES_FILE, max(_LEAST, int(_SPARE * len(content)))
                ring = self._ring = BoundaryRing(path, self._run_id, capacity)
                ring.write(self._attempt, step, content, **kind)
        except Exception as error:  # any error: training must go on
            self._broken = True
            expected = isinstance(error, (ArenaError, UnsupportedStateError, OSError))
            remedy = "boundaries are no longer kept in memory, training goes on"
            logger.warning("%s; %s", error, remedy, exc_info=not expected)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._collector.devices.waits_in_forward = False
        self._leave_ring()

    def _leave_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()


def _was_trusted(path: Path, run_id: str) -> bool:
    """Whether the process that has written the ring last had found its forecasts to come true, up to its end."""
    try:
        records = [record for record in read_ring(path) if record.run_id == run_id]
    except OSError:
        return False
    forecasts = [record for record in records if record.forecast]
    newest = max((record.step for record in records if not record.forecast), default=-1)
    last = max(forecasts, key=lambda record: (record.attempt, record.step), default=None)
    return last is not None and last.trusted and last.step >= newest
