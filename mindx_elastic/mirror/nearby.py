"""Snapshots in the memory of other nodes, for ranks whose state no other rank holds (FSDP, ZeRO, state of their own).

Each new snapshot of a rank goes to its partners (`partners`), beside the training: `Nearby` sends it from the rank's
own slot, `Keeper` puts it into an arena beside the partner's own, where a start finds it like any other snapshot, and
`receive` is also how a new node takes it back. A rank keeps two copies a source, as of its own: one is whole while the
other one comes in. In a slot the header is wiped first and written last, and then its record: what is cut off, by a
death or because the source's slot is needed again, counts for nothing. A copy that is there is not sent again, and
the snapshots of the node's own ranks have room first.

The ranks resume from a step that all of them have, and each keeps two snapshots. So a copy has to be there before the
second snapshot after its own: the interval ``auto`` sees to it, and too short a given one is told.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import xxhash

from mindx_elastic.core.events import logger
from mindx_elastic.core.posix import open_regular, size_of
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.errors import ArenaError, CheckpointError, CorruptCheckpointError
from mindx_elastic.memory.arena import NUM_SLOTS, SLOT_FILES, RankArena, SlotRecord, SlotState, ranks_here
from mindx_elastic.memory.snapshots import sealed_header
from mindx_elastic.mirror.wire import MAX_FILE_BYTES, PATIENCE_S, Channel
from mindx_elastic.persist.format import read_header

__all__ = ["Keeper", "Nearby", "receive"]

_SHARE = 0.5
"""Part of the time in which a copy is sent: what the training's own messages have to share the network with."""
_LATE = 8  # in a row: a machine that is busy for a moment is no reason to warn
_TURN_S = 2.0


class _OvertakenError(Exception):
    """The slot is needed for a newer snapshot."""


class Nearby:
    """Sends the snapshots of this rank; `copy_newest` from any thread."""

    def __init__(
        self,
        arena: RankArena,
        partners: Sequence[int],
        request: Callable[[int, int, bytes], AbstractContextManager[Channel]],
        fail: Callable[[int, Exception, str], None],
    ) -> None:
        """`request(partner, size, header)` asks a rank to keep a snapshot of `size` bytes with this header.
        `fail(partner, error, what)` logs that a copy has failed."""
        self._arena, self._partners, self._request, self._fail = arena, tuple(partners), request, fail
        self._thread = ReadyThread("mindx-mirror-memory")
        self._failing: set[int] = set()
        self._began: float | None = None
        self._sending_s = 0.0  # of the copy under way, and the part of it that has been sent
        self._part = 0.0
        self._took_s = 0.0
        self._sent = -1
        self._late = 0
        self._is_said = self._is_warned = self._is_trouble_said = self._closed = False

    @property
    def took_s(self) -> float:
        """Seconds that the last copy has taken, or would have, had it not been overtaken; or the one that is under way;
        0: there was none."""
        began = self._began
        return max(self._took_s, 0.0 if began is None else time.monotonic() - began)

    def copy_newest(self) -> None:
        """Copy the newest snapshot to all partners, in the background; what is older and still waits is left out."""
        if self._thread.num_waiting < 2 and not self._closed:
            try:
                self._thread.submit(self._copy)
            except RuntimeError as error:  # the process is at its limit
                self._closed = True
                self._warn_once(error)

    def close(self) -> None:
        """The copy under way has been broken off."""
        self._closed = True
        self._thread.close(5.0)

    def _copy(self) -> None:
        record = self._arena.newest()
        if self._closed or record.state is SlotState.EMPTY or record.sequence == self._sent:
            return
        self._sent, self._began = record.sequence, time.monotonic()
        self._sending_s = self._part = 0.0
        try:
            self._copy_slot(record)
        except _OvertakenError:
            left_s = 0.0 if self._part == 0 else self._sending_s * (1 / self._part - 1)
            self._took_s = time.monotonic() - self._began + left_s
            self._note_lateness(record)
        except OSError as error:  # somebody has emptied the memory
            self._warn_once(error)
        except Exception:
            logger.exception("copying a snapshot to another node met an unexpected error")
        else:
            self._took_s = time.monotonic() - self._began
            self._note_lateness(record)
        finally:
            self._began = None

    def _copy_slot(self, record: SlotRecord) -> None:
        index = next(index for index in range(NUM_SLOTS) if self._arena.record(index).sequence == record.sequence)

        def go_on() -> bool:
            now = self._arena.record(index)
            is_same = now._replace(state=record.state) == record and now.state is not SlotState.EMPTY
            return is_same and not self._closed

        fd = open_regular(self._arena.slots[index].path)
        try:
            # Read, not mapped: the training thread may cut the file off.
            def read(start: int, end: int) -> bytes:
                return os.pread(fd, end - start, start)

            # The digests of a sealed one are older than this moment, and tell what has happened to it since.
            sealed = record.state is SlotState.SEALED
            header = read(0, record.header_bytes) if sealed else sealed_header(read, record, go_on)
            if header is None or not go_on():
                raise _OvertakenError
            for partner in self._partners:
                try:
                    self._send(partner, fd, header, record, go_on)
                except (OSError, CheckpointError) as error:
                    if self._closed:
                        return
                    if partner not in self._failing:
                        self._fail(partner, error, "keeps no snapshots of this rank in memory")
                    self._failing.add(partner)
                else:
                    self._failing.discard(partner)
                    self._say(partner, record)
        except (LookupError, ValueError, TypeError) as error:
            if go_on():
                raise
            raise _OvertakenError from error
        finally:
            os.close(fd)

    def _send(self, partner: int, fd: int, header: bytes, record: SlotRecord, go_on: Callable[[], bool]) -> None:
        with self._request(partner, record.nbytes, header) as channel:
            if channel.answer().get("have"):
                return
            channel.patience_s = PATIENCE_S

            def pace(count: int, took_s: float) -> None:
                self._part += count / (record.nbytes * len(self._partners))
                self._sending_s += took_s / _SHARE
                if not go_on():
                    raise _OvertakenError
                time.sleep(took_s * (1 / _SHARE - 1))

            channel.send_file(fd, record.nbytes, header=header, pace=pace)
            channel.answer()

    def _say(self, partner: int, record: SlotRecord) -> None:
        if not self._is_said and self._began is not None:
            self._is_said = True
            took_s = max(time.monotonic() - self._began, 1e-6)
            logger.info(
                "this rank's snapshots go to the memory of rank %d on another node, too: %s bytes in %.2f s, sending "
                "in at most %d%% of the time",
                *(partner, f"{record.nbytes:,}", took_s, 100 * _SHARE),
            )

    def _warn_once(self, error: Exception) -> None:
        if not self._is_trouble_said:
            self._is_trouble_said = True
            logger.warning("this rank's snapshots go to no other node: %s; the training goes on", error)

    def _note_lateness(self, record: SlotRecord) -> None:
        """`record` is there, or overtaken. Two newer ones: a rank that lives has not got it any more."""
        newest = self._arena.newest()
        self._late = self._late + 1 if newest.sequence - record.sequence >= 2 else 0
        if self._late >= _LATE and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "the copy of a snapshot (%s bytes) takes longer to the memory of another node than to the second "
                "snapshot after it: should a node be lost meanwhile, the job may have to go on from the disk. Use "
                "--snapshot-every %d or more, or auto",
                *(f"{record.nbytes:,}", 2 * max(1, newest.step - record.step)),
            )


class Keeper:
    """Keeps the snapshots of other nodes' ranks in this node's memory. Any thread."""

    def __init__(self, arena: RankArena, world_size: int) -> None:
        """`arena`: this rank's own, which says where."""
        self._own, self._world_size = arena, world_size
        self._arenas: dict[int, RankArena] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()  # over both

    @contextmanager
    def _arena_of(self, source: int) -> Iterator[RankArena]:
        with self._lock:
            lock = self._locks.setdefault(source, threading.Lock())
        if not lock.acquire(timeout=_TURN_S):  # a connection that was broken off needs a moment to end
            raise OSError("an earlier snapshot is still coming in")
        try:
            if source not in self._arenas:
                try:
                    self._arenas[source] = self._own.of_neighbour(source)
                except ArenaError as error:
                    raise OSError(f"{error}; nodes that share one memory need no copies in it") from error
            yield self._arenas[source]
        finally:
            lock.release()

    def keep(self, channel: Channel, source: int, size: int, head: int, header: str) -> None:
        """Receive a snapshot of the rank `source`, whose header has the digest `header`. Raises OSError, also where
        there is no room, or CheckpointError."""
        with self._arena_of(source) as arena:
            if _has(arena, size, head, header):
                channel.send({"have": True})
                return
            self._leave_room(arena.slots[arena.oldest()].path, size)
            receive(channel, arena, size, head, source, self._world_size, ready=lambda: channel.send({"send": True}))
            channel.send({})

    def _leave_room(self, path: Path, size: int) -> None:
        """Raise OSError where a file of `size` bytes at `path` would take the room that the snapshots of this node's
        own ranks still need: a rank that finds none takes no more."""
        needed = size - size_of(path)
        for rank, folder in ranks_here(self._own.job).items():
            if rank < self._world_size:
                own = [size_of(folder / name) for name in SLOT_FILES]
                needed += sum((max(own) or size) - each for each in own)
        status = os.statvfs(self._own.job)
        if status.f_blocks > 0 and needed > status.f_bavail * status.f_frsize:  # 0: without a limit
            raise OSError(
                f"no room for a snapshot of {size:,} bytes in shared memory beside those of its own ranks "
                f"({status.f_bavail * status.f_frsize:,} bytes free, {needed:,} needed)"
            )

    def close(self, *, keep: bool) -> None:
        """After the server has ended. `keep`: the next start may need what is there."""
        for arena in self._arenas.values():
            if keep and not arena.is_empty:
                arena.close()
            else:
                arena.remove()
        self._arenas.clear()


def _has(arena: RankArena, size: int, head: int, header: str) -> bool:
    """Whether the snapshot is there. It is the last one to be overwritten then, as in its rank's own memory: after a
    start the other one is of no use."""
    for index, slot in enumerate(arena.slots):
        record = arena.record(index)
        if (record.state, record.nbytes, record.header_bytes) == (SlotState.SEALED, size, head):
            fd = open_regular(slot.path)
            try:
                is_same = xxhash.xxh3_128_hexdigest(os.pread(fd, head, 0)) == header
            finally:
                os.close(fd)
            if is_same:
                arena.keep(record.attempt, record.step)
                return True
    return False


def receive(
    channel: Channel,
    arena: RankArena,
    size: object,
    head: object,
    rank: int,
    world_size: int,
    *,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Take a snapshot of `rank` into the older slot of `arena`, and return the slot's number.

    `size` and `head`: bytes of the file and of its header. `ready` is called when the room for it is there. Raises
    OSError, CorruptCheckpointError; then the slot is empty.
    """
    if type(size) is not int or type(head) is not int or not 0 < head <= size <= MAX_FILE_BYTES:
        raise OSError(f"a snapshot of {size!r} bytes with a header of {head!r} cannot be")
    index = arena.oldest()
    slot = arena.slots[index]
    arena.set_record(index, SlotRecord(sequence=arena.record(index).sequence))
    memory = slot.resize(size)
    slot.bring_in()
    memory[:head] = bytes(head)
    ready()
    with memoryview(memory) as view:
        header = channel.receive_behind(view, head)
    memory[:head] = header
    try:
        info = read_header(slot.path).info
        if (info.rank, info.world_size) != (rank, world_size):
            raise CorruptCheckpointError(f"a snapshot of rank {info.rank} of {info.world_size}", path=slot.path)
    except BaseException:
        memory[:head] = bytes(head)
        raise
    sequence = arena.newest().sequence + 1
    arena.set_record(index, SlotRecord(SlotState.SEALED, info.attempt, info.step, sequence, size, head))
    return index
