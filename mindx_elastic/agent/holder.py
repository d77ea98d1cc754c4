"""The holder: brings to disk what the dead workers of a machine have left in shared memory.

Called when the job ends here without another start, for the memory goes with the container: the newest snapshot that
all ranks of the machine have, unless something newer is on disk already, and each rank's ring of boundaries, so that a
replica's file can stand in for a killed rank bit for bit on another machine too.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mindx_elastic.boundary_log import BOUNDARIES_FILE
from mindx_elastic.capture.arena import ArenaFile, RankArena, job_folder, rank_folders
from mindx_elastic.errors import CheckpointError, SaveError
from mindx_elastic.events import logger
from mindx_elastic.persist.catalog import scan
from mindx_elastic.persist.direct_io import BlockWriter, preallocate
from mindx_elastic.persist.format import CheckpointInfo, Moment, read_header
from mindx_elastic.persist.slots import adopt_slots
from mindx_elastic.persist.storage import create_temp, fsync_dir, publish
from mindx_elastic.resume.memory_files import RING_COPY

__all__ = ["Flushed", "drop", "flush"]

_Slots = dict[Moment, tuple[Path, CheckpointInfo]]


@dataclass
class Flushed:
    """What `flush` has done."""

    lines: list[str] = field(default_factory=list)
    """For the log."""
    step: int | None = None
    """The newest step that it wrote; None: it wrote no state."""


def flush(arena: Path) -> Flushed:
    """Write what the job's folder `arena` holds to its checkpoint directory, then remove it.

    Main thread of the agent, when its workers are gone; blocks on the disk. Never raises: the agent has to come to its
    end. Whatever could not be written stays in memory, and a line says so.
    """
    flushed = Flushed()
    open_arenas: dict[int, RankArena] = {}
    try:
        directory = _owner(arena)
        if directory is None:
            return flushed  # removed by the workers: everything is on disk
        base = arena.parent.parent
        if job_folder(base, directory) != arena or not directory.is_dir():
            flushed.lines.append(f"{arena} belongs to {directory}, which is gone; `mindx-elastic clean` removes it")
            return flushed
        for rank in rank_folders(arena):
            open_arenas[rank] = RankArena(base, directory, rank)
        _flush_all(directory, open_arenas, flushed)
    except Exception as error:
        flushed.lines.append(f"{arena} is kept: {error}")
        logger.debug("flush of %s", arena, exc_info=True)
        for one in open_arenas.values():
            one.close()
        return flushed
    for one in open_arenas.values():
        one.remove()
    return flushed


def _owner(arena: Path) -> Path | None:
    try:
        return Path(json.loads((arena / "owner.json").read_text())["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def drop(arena: Path) -> None:
    """The job has finished: remove its folder. Main thread of the agent, when its workers are gone."""
    for rank, folder in rank_folders(arena).items():
        try:
            directory = _owner(arena)
            if directory is not None:
                RankArena(arena.parent.parent, directory, rank).remove()
        except OSError as error:
            logger.warning("%s cannot be removed: %s; `mindx-elastic clean` does it", folder, error)


def _flush_all(directory: Path, arenas: dict[int, RankArena], flushed: Flushed) -> None:
    slots: dict[int, _Slots] = {}
    for rank, arena in arenas.items():
        flushed.lines += adopt_slots(arena)
        slots[rank] = _snapshots(arena)
    world_size = max((info.world_size for found in slots.values() for _, info in found.values()), default=1)
    for rank, arena in arenas.items():
        folder = _folder(directory, rank, world_size if slots[rank] else max(world_size, len(arenas)))
        _copy_ring(arena.folder / BOUNDARIES_FILE, folder)
    wanted = _wanted(slots, world_size, _newest_on_disk(directory))
    for rank, found in slots.items():
        for moment in wanted:
            if moment in found:
                source, info = found[moment]
                name = f"memory-{info.epoch}_{info.step_in_epoch}_breakpoint.safetensors"
                _copy_file(source, _folder(directory, rank, world_size) / name)
    for _, attempt, step in wanted:
        flushed.step = max(step, flushed.step or 0)
        flushed.lines.append(
            f"step {step} (attempt {attempt}) of the killed workers is written from memory to {directory}"
        )


def _snapshots(arena: RankArena) -> _Slots:
    found: _Slots = {}
    for slot in arena.slots:
        try:
            info = read_header(slot.path).info
        except (CheckpointError, OSError):
            continue
        found[info.moment] = (slot.path, info)
    return found


def _wanted(slots: dict[int, _Slots], world_size: int, on_disk: Moment | None) -> list[Moment]:
    """The moments to write, newer than what the disk has: the last one that all ranks of this machine have.

    With ranks on other machines nobody here knows which one those have, so that all are written.
    """
    copiers = [set(found) for found in slots.values() if found]
    replicated = any(info.coordinates.get("replicas") == world_size for f in slots.values() for _, info in f.values())
    if not copiers or (len(copiers) < len(slots) and not replicated):
        return []
    common = set.intersection(*copiers)
    newer = [m for m in common if on_disk is None or m[0] != on_disk[0] or m[1:] > on_disk[1:]]
    newer.sort(key=lambda moment: moment[1:], reverse=True)
    return newer[:1] if len(slots) == world_size else newer


def _newest_on_disk(directory: Path) -> Moment | None:
    """The newest step on disk that is whole, or that replicas make whole."""
    for step in scan(directory).steps:
        replicated = step.resumable and step.info.coordinates.get("replicas") == step.world_size
        if step.complete or replicated:
            return step.moment
    return None


def _folder(directory: Path, rank: int, world_size: int) -> Path:
    folder = directory / f"rank_{rank}" if world_size > 1 else directory
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _copy_ring(ring: Path, folder: Path) -> None:
    if ring.exists():
        _copy_file(ring, folder / RING_COPY)


def _copy_file(source: Path, target: Path) -> None:
    """`source` lies in memory; `target` appears whole and durable, or not at all. Raises OSError."""
    size = os.stat(source).st_size
    if size == 0:
        return
    memory = ArenaFile(source)
    fd, temp = create_temp(target)
    try:
        preallocate(fd, size)
        with closing(BlockWriter(fd, 0)) as blocks:
            blocks.put(torch.frombuffer(memory.resize(size), dtype=torch.uint8))
            blocks.finish()
        os.ftruncate(fd, size)
        os.fsync(fd)
        publish(temp, target)
        fsync_dir(target.parent)
    except OSError as error:
        raise SaveError(f"{target}: cannot be written from memory: {error.strerror}", path=target) from error
    finally:
        temp.unlink(missing_ok=True)
        os.close(fd)
        memory.close()
