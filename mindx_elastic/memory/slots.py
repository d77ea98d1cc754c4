"""Snapshots: a boundary's state in an arena slot, laid out as a finished checkpoint file.

Copying and sealing are apart. The copy is what training may have to wait for and runs at the speed of memory; the
digests, which take about as long, follow from the slot's own bytes, in the background or by whoever adopts the arena
of a killed process. A slot that was copied and not sealed holds all its bytes (see `memory.arena`).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from mindx_elastic.memory.arena import NUM_SLOTS, ArenaFile, RankArena, SlotRecord, SlotState
from mindx_elastic.persist.format import CheckpointInfo, TensorEntry, draft_header, flatten, place_tensors, seal_header
from mindx_elastic.persist.packed import flat_bytes

__all__ = ["Snapshot", "adopt_slots", "copy_snapshot", "lay_out", "reserve_slots", "seal_slot"]

_HASH_PIECE = 4 << 20


@dataclass(frozen=True)
class Snapshot:
    """What is to be copied, and where to."""

    info: CheckpointInfo
    header: bytes
    entries: list[TensorEntry]
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return len(self.header) + (self.entries[-1].end if self.entries else 0)


def lay_out(state: object, info: CheckpointInfo, layout: Mapping[str, Any] | None) -> Snapshot:
    """Find out what `state` will look like as a file; nothing is copied. Raises UnsupportedStateError."""
    tree, tensors = flatten(state)
    entries = place_tensors(tensors)
    return Snapshot(info, draft_header(info, tree, entries, layout), entries, tensors)


def copy_snapshot(
    arena: RankArena,
    snapshot: Snapshot,
    sequence: int,
    *,
    boundary_event: Any = None,
    at: Callable[[str], None],
    changed: Callable[[], object] = lambda: None,
) -> int | None:
    """Copy into the older slot, commit it, return its number. ``at(stage)`` is called at each stage (tests kill there).

    None, and nothing committed, when ``changed()`` says after the copy that the state was altered meanwhile. Raises
    ArenaError when there is no room; the other slot is untouched then. CPU tensors are moved in this thread, device
    tensors on a stream of their own that waits for `boundary_event` only.
    """
    index = arena.oldest()
    arena.set_record(index, SlotRecord(sequence=arena.record(index).sequence))
    at("wiped")
    memory = arena.slots[index].resize(snapshot.nbytes)
    arena.slots[index].bring_in()
    at("reserved")
    _copy_tensors(memory, snapshot, boundary_event, at)
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


def _copy_tensors(memory: mmap.mmap, snapshot: Snapshot, boundary_event: Any, at: Callable[[str], None]) -> None:
    base = len(snapshot.header)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    address = whole.data_ptr()
    streams: dict[torch.device, Any] = {}
    half = len(snapshot.entries) // 2
    for number, entry in enumerate(snapshot.entries):
        if number == half:
            at("copying")
        if not entry.nbytes:
            continue
        source = flat_bytes(snapshot.tensors[entry.name].detach())
        if source.device.type == "cpu":
            ctypes.memmove(address + base + entry.start, source.data_ptr(), entry.nbytes)
            continue
        target = whole[base + entry.start : base + entry.end]
        if source.device.type != "cuda":
            target.copy_(source)
            continue
        stream = streams.get(source.device)
        if stream is None:
            stream = streams[source.device] = torch.cuda.Stream(source.device)
            if boundary_event is not None:
                stream.wait_event(boundary_event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    for stream in streams.values():
        stream.synchronize()


def reserve_slots(arena: RankArena, nbytes: int, *, go_on: Callable[[], bool]) -> bool:
    """Get the memory for snapshots of `nbytes` ahead of their copies, which take a tenth of the time with it.

    False when ``go_on()`` became false first. A slot that holds a snapshot keeps it, whatever its size. Raises
    ArenaError when there is no room.
    """
    for index, file in enumerate(arena.slots):
        record = arena.record(index)
        file.resize(nbytes if record.state is SlotState.EMPTY else record.nbytes)
        if not file.bring_in(go_on):
            return False
    return True


def seal_slot(arena: RankArena, index: int, *, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Put the digests into a copied slot; False when ``go_on()`` became false (the slot is needed again)."""
    record = arena.record(index)
    memory = arena.slots[index].resize(record.nbytes)
    header = _sealed(memory, record, go_on)
    if header is None:
        return False
    # Half a header makes the file unreadable, and the record still says that the bytes are all there.
    memory[: len(header)] = header
    arena.set_record(index, replace(record, state=SlotState.SEALED))
    return True


def _sealed(memory: mmap.mmap, record: SlotRecord, go_on: Callable[[], bool]) -> bytes | None:
    draft = memory[: record.header_bytes]  # or half sealed, by a process that was killed over it: only digests differ
    content = json.loads(draft[8:])
    metadata = content.pop("__metadata__")
    digests: dict[str, str] = {}
    with memoryview(memory) as view:
        for name in json.loads(metadata["mindx.digests"]):
            start, end = content[name]["data_offsets"]
            digest = xxhash.xxh3_128()
            for position in range(start, end, _HASH_PIECE):
                if not go_on():
                    return None
                piece = view[record.header_bytes + position : record.header_bytes + min(position + _HASH_PIECE, end)]
                digest.update(piece)
                piece.release()
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
                file.close()  # a reader that finds damage takes the file away: the next copy opens it anew
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            notes.append(f"{file.path} is not used: {error}")
            arena.set_record(index, SlotRecord())
            _empty(file)
    return notes


def _empty(file: ArenaFile) -> None:
    file.close()
    file.path.unlink(missing_ok=True)
