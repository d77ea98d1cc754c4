"""Snapshots: the last boundary's state, copied into a slot of the arena during the training.

`Snapshotter` decides with its `SnapshotSchedule` when to take one. The training thread lends the update gate to the
copy and goes on with forward and backward; `optimizer.step()` waits if the copy is not done by then. With ``every=1``
the copy is made before the step ends instead: then a step that is over is kept, whatever happens next.

A slot is laid out as a finished checkpoint file. Copying and sealing are apart. The copy is what training may have to
wait for and runs at the speed of memory; the digests, which take about as long, follow from the slot's own bytes, in
the background or by the process that adopts the arena of a killed one. A slot that was copied and not sealed holds all
its bytes (see `memory.arena`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.validation import whole_number
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.ready_thread import ReadyThread
from mindx_elastic.core.tensor_memory import flat_bytes
from mindx_elastic.errors import ArenaError, UnsupportedStateError
from mindx_elastic.memory.arena import NUM_SLOTS, ArenaFile, RankArena, SlotRecord, SlotState, bytes_of
from mindx_elastic.memory.snapshot_schedule import SnapshotSchedule
from mindx_elastic.persist.entries import TensorEntry, place_tensors
from mindx_elastic.persist.flatten import flatten
from mindx_elastic.persist.format import CheckpointInfo, HeaderDraft, seal_header

__all__ = [
    "NO_SNAPSHOTS",
    "Neighbours",
    "SnapshotLayout",
    "Snapshotter",
    "adopt_slots",
    "copy_snapshot",
    "lay_out",
    "reach",
    "seal_slot",
    "sealed_header",
]


NO_SNAPSHOTS = "0"
"""The proposal of a rank that takes no snapshots: the others' are larger."""

_DEVICE_S = 5.0
_MOST_QUEUED = 256
_AGREEMENT_S, _ASK_AGAIN_S = 20.0, 0.002  # ranks pass a step at about the same time


def reach(stage: str) -> None:
    """Called at each stage of a copy; does nothing. Tests put a kill here."""


class Neighbours(Protocol):
    """Keep a rank's snapshots in the memory of other nodes; the package's own implementation is `mirror.nearby`."""

    @property
    def took_s(self) -> float:
        """Seconds that a copy takes; 0 while that is not known."""

    def copy_newest(self) -> None:
        """There is a new snapshot: copy it, in the background. Training or snapshot thread."""


class Snapshotter:
    """One per guard. `at_boundary` belongs to the training thread."""

    def __init__(
        self,
        arena: RankArena,
        collector: Collector,
        update_gate: UpdateGate,
        schedule: SnapshotSchedule,
        describe: Callable[[], CheckpointInfo],
        exchange: Exchange,
        events: EventLog,
        *,
        instead: Callable[[], None] | None = None,
        all_alike: bool = True,
        tell: Callable[[int], None] = lambda every: None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """`describe` gives the header facts of the collector's current boundary. `all_alike`: the ranks hold the same.

        `instead`: what to do in place of a copy, where another rank of the machine copies a state that all share.
        `tell`: called with the interval in steps, when it is known.
        """
        self._instead, self._all_alike, self._tell, self._neighbours = instead, all_alike, tell, neighbours
        if schedule.every:
            tell(schedule.every)
        self._arena, self._collector, self._gate = arena, collector, update_gate
        self.schedule, self._describe, self._exchange, self._events = schedule, describe, exchange, events
        self._sequence = arena.newest().sequence
        self._taken = -1  # step of the last snapshot of ours
        self._thread = ReadyThread("mindx-snapshot")
        self._copying = self._closed = False
        self._step_began: float | None = None
        self._extra = False
        self._one_copy = threading.Lock()  # a dying save may come in parallel with the training thread
        self._laid_out: SnapshotLayout | None = None
        self._hurry = False
        self.broken = False
        """Shared memory has no room, or the state has no form; said once, training goes on without snapshots."""

    def at_boundary(self, step: int) -> None:
        """The boundary `step` has just been passed, its volatile state is copied. Once more for the same one, with more
        that belongs to it: a snapshot that was taken of it is taken again."""
        if self.broken:
            if self.schedule.every is None:
                self.schedule.every = 0
                self._exchange.tell("snapshot_every", NO_SNAPSHOTS)
            return
        now = time.perf_counter()
        is_known = step == self.schedule.newest
        if self._step_began is not None and not is_known:
            self.schedule.note(now - self._step_began, extra=self._extra)
        self._extra = self.schedule.due(step)
        if self._extra:
            self._collector.before_keeping()
            if is_known:
                self.finish_copy()
        if self._extra and self._instead is not None:
            self._instead()
        elif self._extra and (self.schedule.synchronous or self._gate.unguarded):
            self._hurry = True
            self.drain()  # the copier's digests: it may have had the last one
            self._gate.settle()
            if self._copy() is not None and self._neighbours is not None:
                self._neighbours.copy_newest()
            self._hurry = False
        elif self._extra:
            self._hand_over()
        elif (proposal := self.schedule.proposal(self._neighbours.took_s if self._neighbours else 0.0)) is not None:
            self._agree(proposal)
        self._step_began = now if self._extra else time.perf_counter()

    def _hand_over(self) -> None:
        if self._copying:
            self._events.emit("snapshot", step=self._collector.position.step, outcome="skipped: still busy")
            return
        try:
            self._thread.start()
        except RuntimeError as error:  # the process is at its limit
            self._give_up(error)
            return
        self._gate.lend()
        self._copying = True  # a seal in progress gives way
        self._thread.submit(self._copy_in_background)

    def _copy_in_background(self) -> None:
        try:
            index = None if self.broken else self._copy()  # no room was found meanwhile: it is said
        finally:
            self._copying = False
            self._gate.give_back()
        if index is not None:
            self._seal(index)
            if self._neighbours is not None:
                self._neighbours.copy_newest()

    def _copy(self) -> int | None:
        """Training thread, the copier while the gate is lent, or who holds the gate. The slot, if the copy is good."""
        with self._one_copy:
            collector, changed, sequence = self._collector, self._why_changed, self._sequence + 1
            try:
                with collector.devices.reading():
                    snapshot = lay_out(collector.state(), self._describe(), collector.layout(), self._laid_out)
                    self._laid_out = snapshot._replace(tensors={})  # keeps no tensor alive
                    index = copy_snapshot(self._arena, snapshot, sequence, at=reach, changed=changed)
            except Exception as error:  # any error, also of the user's own `state_dict`: training goes on
                self._give_up(error)
                return None
            if index is None:
                self._events.emit("snapshot", step=snapshot.info.step, outcome=f"dropped: {changed()}")
            else:
                self._sequence, self._taken = sequence, snapshot.info.step
            return index

    def _why_changed(self) -> str | None:
        """Why what was copied is not a boundary; None: it is."""
        if self._collector.devices.has_gone_back:
            return "the device lags the program, and an older boundary counts"
        return self._gate.why_changed()

    def _seal(self, index: int) -> None:
        try:
            # A slot that is not sealed serves the next process as well. A snapshot that is skipped does not: the other
            # ranks would take it.
            if seal_slot(self._arena, index, go_on=lambda: not (self._closed or self._copying or self._hurry)):
                reach("sealed")
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.broken = True
        expected = isinstance(error, (ArenaError, UnsupportedStateError, OSError))
        others = "" if self._all_alike else "; those of ranks that hold other parts are of no use without them"
        remedy = f"training goes on without snapshots, checkpoints on disk are not affected{others}"
        logger.error("%s; %s", error, remedy, exc_info=not expected)
        self._events.emit("snapshot", step=self._collector.position.step, outcome=f"failed: {error}")

    def _agree(self, proposal: int) -> None:
        """Once a job: all ranks come here after the same step, and take up the same interval at the same step.

        A rank that took it up later would hold other steps than the others, and no step would be whole.
        """
        end = time.monotonic() + _AGREEMENT_S
        try:
            self._exchange.tell("snapshot_every", str(proposal))
            while (found := self._exchange.try_collect("snapshot_every")) is None:
                if gone := self._exchange.gone():
                    # No rank is waited for: the recovery or the stop that follows must not come 20 s later.
                    logger.info("the ranks do not agree on a snapshot interval: rank %d is gone", gone[0])
                    self.schedule.every = 0
                    return
                if time.monotonic() > end:
                    raise TimeoutError(f"a rank is {_AGREEMENT_S:g} s late")
                time.sleep(_ASK_AGAIN_S)
            intervals = [whole_number(text, 0, 10**9) for text in found]
        except Exception as error:
            logger.warning("the ranks could not agree on a snapshot interval (%s); there are no snapshots", error)
            self.schedule.every = 0
            return
        without = [rank for rank, text in enumerate(found) if text == NO_SNAPSHOTS]
        if without and not self._all_alike and self._events.rank == 0:
            logger.warning(
                "no snapshots are taken of %s (see the log there): where ranks hold different parts, those of the "
                "others are of no use",
                rank_list(without),
            )
        self.schedule.agree(intervals)
        interval = self.schedule.every or 0
        self._tell(interval)
        logger.info("a snapshot in memory every %d steps costs less than 1%% of the step time", interval)
        self._events.emit("snapshot_every", step=self._collector.position.step, outcome=str(interval))

    def take_last(self) -> bool:
        """Keep the last boundary, due or not. False: it could not be, or the state has been changed since."""
        self.drain()
        with self._gate.hold(0.0) as problem:
            position = self._collector.position
            if problem or self.broken or position.step == 0 or not self._collector.devices.comes_here(_DEVICE_S):
                return False
            if self._instead is not None:
                self._instead()
                return True
            if self._taken != position.step:  # what is there may be another run's
                self._copy()
            return not self.broken

    def keep(self, timeout_s: float, *, whole: bool) -> bool:
        """Keep the last boundary, due or not, because it could not be written to disk. Any thread that holds the update
        gate and has found it clean. Waits `timeout_s` for a copy in progress. `whole`: also what another rank of the
        machine would copy for all. Returns whether it is there."""
        self._hurry = True
        try:
            self.drain(timeout_s)
            if self.broken or self._thread.busy:
                return False
            if self._instead is not None and not whole:
                return True  # what is this rank's own is in its ring since the boundary
            step = self._collector.position.step
            if self._taken != step:
                self._copy()
            return self._taken == step
        finally:
            self._hurry = False

    def donate(self) -> Path | None:
        """Copy the last boundary for other processes of the machine, which map it, and return the file. None: it could
        not be. Training thread, nothing else running.

        It may have no digests yet: its record says so.
        """
        self.finish_copy()
        if self.broken:
            return None
        index = self._index_of_boundary() if self._taken == self._collector.position.step else None
        index = self._copy() if index is None else index
        return None if index is None else self._arena.slots[index].path

    def _index_of_boundary(self) -> int | None:
        """The slot with the last boundary, where a snapshot of it was due; the copier may just have ended with it."""
        if self._gate.why_changed():
            return None
        records = {index: self._arena.record(index) for index in range(NUM_SLOTS)}
        return next((index for index, record in records.items() if record.sequence == self._sequence), None)

    def finish_copy(self) -> None:
        """Wait for a copy in progress; its digests are broken off. Training thread."""
        self._hurry = True
        self.drain()
        self._hurry = False

    def drain(self, timeout_s: float = 60.0) -> None:
        """Wait for a copy in progress and its digests."""
        if self._thread.busy:
            with suppress(TimeoutError):
                self._thread.call(lambda: None, timeout_s)

    def close(self) -> None:
        """End the thread after the copy in progress; a seal in progress is broken off. Training thread."""
        self._closed = True
        self._thread.close(60.0)


# --- slots ---


_HASH_PIECE = 4 << 20


class SnapshotLayout(NamedTuple):
    """What is to be copied, and where to."""

    info: CheckpointInfo
    header: bytes
    entries: Sequence[TensorEntry]
    tensors: dict[str, torch.Tensor]
    draft: HeaderDraft
    kinds: Sequence[object]
    """The kinds of the tensors, by name: snapshots with the same ones have the same entries."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + (self.entries[-1].end if self.entries else 0)


def lay_out(
    state: object,
    info: CheckpointInfo,
    layout: Mapping[str, Any] | None,
    earlier: SnapshotLayout | None = None,
) -> SnapshotLayout:
    """Find out what `state` will look like as a file; nothing is copied. `earlier`: one whose places are taken over
    where the tensors are of the same names, types and shapes. Raises UnsupportedStateError."""
    tree, tensors = flatten(state)
    kinds = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    if earlier is not None and earlier.kinds == kinds:
        entries, draft = earlier.entries, earlier.draft
    else:
        entries = place_tensors(tensors)
        draft = HeaderDraft(entries)
    return SnapshotLayout(info, draft.header(info, tree, layout), entries, tensors, draft, kinds)


def copy_snapshot(
    arena: RankArena,
    snapshot: SnapshotLayout,
    sequence: int,
    *,
    at: Callable[[str], None],
    changed: Callable[[], object] = lambda: None,
) -> int | None:
    """Copy into the older slot, commit it, return its number. ``at(stage)`` is called at each stage (tests kill there).

    None, and nothing committed, when ``changed()`` says after the copy that the state was altered meanwhile. Raises
    ArenaError when there is no room; the other slot is untouched then. Tensors on a CUDA device are copied on this
    thread's current stream.
    """
    index = arena.oldest()
    arena.set_record(index, SlotRecord(sequence=arena.record(index).sequence))
    at("wiped")
    memory = arena.slots[index].resize(snapshot.nbytes)
    arena.slots[index].bring_in()
    if (device := next((t.device for t in snapshot.tensors.values() if t.is_cuda), None)) is not None:
        arena.slots[index].pin(device)
    at("reserved")
    _copy_tensors(memory, snapshot, at)
    if changed():
        return None
    at("copied")
    memory[: len(snapshot.header)] = snapshot.header
    at("headed")
    info = snapshot.info
    record = SlotRecord(SlotState.COPIED, info.attempt, info.step, sequence, snapshot.nbytes, len(snapshot.header))
    arena.set_record(index, record)
    at("committed")
    return index


def _copy_tensors(memory: mmap.mmap, snapshot: SnapshotLayout, at: Callable[[str], None]) -> None:
    base = len(snapshot.header)
    whole = bytes_of(memory)
    start, memmove = whole.data_ptr() + base, ctypes.memmove
    devices: set[torch.device] = set()
    half, queued = len(snapshot.entries) // 2, 0
    for number, entry in enumerate(snapshot.entries):
        if number == half:
            at("copying")
        if entry.start == entry.end:
            continue
        tensor = snapshot.tensors[entry.name]
        # In most states all are: views of their bytes would take longer than the bytes of a small one.
        source = tensor if tensor.is_cpu and tensor.is_contiguous() else flat_bytes(tensor.detach())
        if source.is_cpu:
            memmove(start + entry.start, source.data_ptr(), entry.end - entry.start)
            continue
        target = whole[base + entry.start : base + entry.end]
        if source.device.type != "cuda":
            target.copy_(source)
            continue
        devices.add(source.device)
        target.copy_(source, non_blocking=True)
        queued += 1
        if queued % _MOST_QUEUED == 0:  # after a boundary that a device never comes to they would fill its queue
            torch.cuda.current_stream(source.device).synchronize()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def seal_slot(arena: RankArena, index: int, *, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Put the digests into a copied slot; False when ``go_on()`` became false (the slot is needed again)."""
    record = arena.record(index)
    memory = arena.slots[index].resize(record.nbytes)
    with memoryview(memory) as view:
        header = sealed_header(lambda start, end: view[start:end], record, go_on)
    if header is None:
        return False
    # Half a header makes the file unreadable, and the record still says that the bytes are all there.
    memory[: len(header)] = header
    arena.set_record(index, record._replace(state=SlotState.SEALED))
    return True


def sealed_header(
    read: Callable[[int, int], bytes | memoryview], record: SlotRecord, go_on: Callable[[], bool]
) -> bytes | None:
    """The header of a copied slot with the digests of what `read(start, end)` returns; None when ``go_on()`` became
    false. Raises ValueError, LookupError, TypeError for a slot that has changed meanwhile."""
    draft = bytes(read(0, record.header_bytes))  # or half sealed, by a process that was killed over it
    content = json.loads(draft[8:])
    metadata = content.pop("__metadata__")
    digests: dict[str, str] = {}
    for name in json.loads(metadata["mindx.digests"]):
        start, end = content[name]["data_offsets"]
        digest = xxhash.xxh3_128()
        for position in range(start, end, _HASH_PIECE):
            if not go_on():
                return None
            digest.update(read(record.header_bytes + position, record.header_bytes + min(position + _HASH_PIECE, end)))
        digests[name] = digest.hexdigest()
    return seal_header(draft, digests)


def adopt_slots(arena: RankArena) -> list[str]:
    """At a start: make the slots of a killed process readable as files, empty the useless ones. Notes for the log."""
    notes = []
    for index in range(NUM_SLOTS):
        record, file = arena.record(index), arena.slots[index]
        if record.state is SlotState.EMPTY:
            _empty(file)
            continue
        try:
            if os.stat(file.path).st_size != record.nbytes:
                raise ValueError(f"it has {os.stat(file.path).st_size} bytes instead of {record.nbytes}")
            if record.state is SlotState.COPIED:
                seal_slot(arena, index)
                file.close()  # a reader that finds damage takes the file away: the next copy opens it again
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            notes.append(f"{file.path} is not used: {error}")
            arena.set_record(index, SlotRecord())
            _empty(file)
    return notes


def _empty(file: ArenaFile) -> None:
    file.close()
    file.path.unlink(missing_ok=True)
