"""The holder: brings to disk what the dead workers of a machine have left in shared memory.

Called when the job ends here without another start, for the memory goes with the container. It looks at memory and disk
as a start does, of the newest run only, and writes what a start would take and the disk does not have: the newest step
that the planner can go on from with what is here, or may be able to where some ranks live on other machines. Each
rank's ring of boundaries goes along, so that a replica's file can stand in for a killed rank bit for bit on another
machine too. Memory is given up rank by rank, and only where the disk is at least as far.

Whose files count is what a start would say (`trust_in`). The ranks' bytes of the directory's lock are held meanwhile,
so that a start on another machine waits for what is being written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mindx_elastic.config import SharingSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.folders import rank_folder
from mindx_elastic.core.owners import Trust, user_ids
from mindx_elastic.core.posix import open_regular
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.errors import CheckpointError, SaveError
from mindx_elastic.memory.arena import RankArena, ranks_here
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, read_ring
from mindx_elastic.memory.folders import job_folder, rank_folders, read_owner
from mindx_elastic.memory.memory_files import RING_COPY
from mindx_elastic.memory.snapshots import adopt_slots
from mindx_elastic.persist.direct_io import BlockWriter
from mindx_elastic.persist.directory_lock import hold_ranks
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.reader import verify_file
from mindx_elastic.persist.storage import prepare_owned_directory
from mindx_elastic.persist.writer import copied_file
from mindx_elastic.start.facts import FileFact
from mindx_elastic.start.findings import list_files, scan
from mindx_elastic.start.inventory import Inventory, SavedStep, until_sound
from mindx_elastic.start.planner import bases_of, steps_before

__all__ = ["Flushed", "drop", "flush", "seal", "trust_in"]

_PIECE_BYTES = 4 << 20
_PATIENCE_S = 2.0  # for the lock of a worker that the kernel is still taking away; a living job keeps it anyway
_LASTS_S = 1800.0  # as long as a start waits for us at most; the lock ends with this process


@dataclass
class Flushed:
    """What `flush` has done."""

    lines: list[str] = field(default_factory=list)
    """For the log."""
    step: int | None = None
    """The newest step that it wrote, and that all ranks of this machine have; None: it wrote none."""


def flush(arena: Path) -> Flushed:
    """Write what the job's folder `arena` holds to its checkpoint directory, then remove it.

    Main thread of the agent, when its workers are gone; blocks on the disk. Never raises: the agent has to come to its
    end. What could not be written, and is not superseded by the disk, stays in memory, and a line says so.
    """
    flushed = Flushed()
    arenas: dict[int, RankArena] = {}
    try:
        directory = _owner(arena)
        if directory is None:
            return flushed  # removed by the workers: everything is on disk
        base = arena.parent.parent
        if job_folder(base, directory) != arena or not directory.is_dir():
            flushed.lines.append(
                f"{arena} belongs to {directory}, which is gone; `mindx-elastic clean --yes` removes it"
            )
            return flushed
        for rank in rank_folders(arena):
            try:
                arenas[rank] = RankArena(base, directory, rank)
            except OSError as error:
                flushed.lines.append(f"the memory of rank {rank} is kept: {error}")
        kept = _flush_locked(directory, arena, arenas, flushed)
    except Exception as error:
        flushed.lines.append(f"{arena} is kept: {error}")
        logger.debug("flush of %s", arena, exc_info=True)
        kept = set(arenas)
    for rank, one in arenas.items():
        if rank in kept:
            one.close()
        else:
            one.remove()
    return flushed


def _owner(arena: Path) -> Path | None:
    try:
        return Path(read_owner(arena)["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seal(arena: Path, first: int) -> None:
    """Make the snapshots of the ranks from `first` on readable for others: no process will take them over. Main thread
    of the agent, when its workers are gone. Never raises."""
    directory = _owner(arena)
    for rank, folder in rank_folders(arena).items():
        if directory is None or rank < first:
            continue
        try:
            one = RankArena(arena.parent.parent, directory, rank)
            try:
                for note in adopt_slots(one):
                    logger.warning("%s", note)
            finally:
                one.close()
        except OSError as error:
            logger.warning("%s: what it holds may be of no use to the ranks that are left: %s", folder, error)


def drop(arena: Path) -> None:
    """The job has finished: remove its folder. Main thread of the agent, when its workers are gone."""
    directory = _owner(arena)
    for rank, folder in rank_folders(arena).items():
        try:
            if directory is not None:
                RankArena(arena.parent.parent, directory, rank).remove()
        except OSError as error:
            logger.warning(
                "%s cannot be removed: %s; `mindx-elastic clean --all` lists it, and --yes removes it", folder, error
            )


def trust_in(directory: Path) -> Trust:
    """Whose files count in the checkpoint directory, as a start says it: learnt from a file that is made there.

    What a program names in ``trusted_users=`` is not known here, what MINDX_TRUSTED_USERS names is. Raises SaveError
    where nothing can be written, UsageError for a user that is not known.
    """
    trusted = user_ids(SharingSettings.from_env().trusted_users)
    # Whether the directory is accepted was for the workers to decide.
    _, owners = prepare_owned_directory(directory, allow_shared=True, trusted=trusted)
    return Trust({directory: owners}, trusted, allow_shared=True)


def _flush_locked(directory: Path, job: Path, arenas: Mapping[int, RankArena], flushed: Flushed) -> set[int]:
    """As `_flush_all`, with the ranks' bytes of the directory's lock."""
    trust = trust_in(directory)
    lock, problem = hold_ranks(directory, arenas, trust.of(directory), patience_s=_PATIENCE_S, lasts_s=_LASTS_S)
    if problem:
        # Kept, the memory would go with the container.
        flushed.lines.append(
            f"{problem}; the memory is brought to disk all the same. A start that has looked for a step already does "
            "not see it, and goes on from an older one; resume=PATH takes a file that is named below"
        )
    try:
        return _flush_all(directory, job, arenas, trust, flushed)
    finally:
        if lock is not None:
            lock.close()


def _flush_all(directory: Path, job: Path, arenas: Mapping[int, RankArena], trust: Trust, flushed: Flushed) -> set[int]:
    """The ranks whose memory has to stay. Raises OSError when something cannot be written; then all of it has to."""
    for arena in arenas.values():
        flushed.lines += adopt_slots(arena)
    machine = _Machine(directory, job, arenas, trust)
    rings = {rank: ring for rank, arena in arenas.items() if (ring := arena.folder / BOUNDARIES_FILE).exists()}
    if not machine.inventory.runs and (rings or machine.snapshots):
        # Emptied by somebody, or a disk that cannot be read at the moment: then this is all that is left.
        raise CheckpointError(
            f"{directory / 'events.jsonl'} does not know the run that it is of, nor does a file there (files of other "
            "users count if MINDX_TRUSTED_USERS names them for the agent, too); `mindx-elastic clean --all` lists it, "
            "and --yes removes it"
        )
    wanted = _sound(machine, flushed)
    problems = _copy_rings(machine, rings)
    for step in wanted:
        _write(step, machine, flushed)
    if problems:
        raise problems[0]
    return _not_on_disk(machine, flushed)


# --- what there is ---


class _Machine:
    """This machine's view of the job, sorted as by a start."""

    def __init__(self, directory: Path, job: Path, arenas: Mapping[int, RankArena], trust: Trust) -> None:
        self.directory, self.job, self._arenas, self._trust = directory, job, arenas, trust
        self.ranks = sorted(ranks_here(job))
        """Those that live here and have a folder in memory, whether it could be opened or not."""
        self.damaged: set[str] = set()
        """Snapshots."""
        self.look()

    def look(self) -> None:
        """Again, when memory or disk have changed."""
        slots = [slot.path for arena in self._arenas.values() for slot in arena.slots if slot.path.exists()]
        listing = list_files([self.directory], self.job)
        self._where = listing.machine
        found = scan(listing, trust=self._trust, snapshots=[slot for slot in slots if str(slot) not in self.damaged])
        self.snapshots = found.in_memory
        """Of all runs."""
        # The run that the job has gone on with last; others in memory were given up by a run that started over.
        known = [fact for fact in found.in_memory if fact.moment[0] in found.known]
        newest = max(known, key=lambda fact: fact.created, default=None)
        self.run = "" if newest is None else newest.moment[0]
        found.in_memory = []
        self.on_disk = Inventory.merge([found])
        found.in_memory = [fact for fact in known if fact.moment[0] == self.run]
        self.inventory = Inventory.merge([found])

    def is_in_memory(self, fact: FileFact) -> bool:
        return fact.where == self._where

    @property
    def steps(self) -> list[SavedStep]:
        """What a start takes first is in front."""
        return [self.inventory.judge(moment) for moment in self.inventory.moments]

    def in_memory(self, step: SavedStep) -> dict[int, FileFact]:
        """By rank."""
        return {fact.rank: fact for fact in reversed(step.facts) if self.is_in_memory(fact)}

    def to_write(self, step: SavedStep) -> list[FileFact]:
        """What is in memory only, by rank."""
        on_disk = {fact.rank for fact in step.facts if not self.is_in_memory(fact)}
        return [fact for rank, fact in sorted(self.in_memory(step).items()) if rank not in on_disk]

    def lacking(self, step: SavedStep) -> list[int]:
        """Ranks of this machine without a file of `step`."""
        return [rank for rank in self.ranks if rank < step.world_size and rank not in step.ranks]

    def wanted(self) -> list[SavedStep]:
        """What has to be on disk for a start elsewhere to go on as one from this memory could; the newest in front."""
        wanted: list[SavedStep] = []
        for step in self.steps:
            if step.is_usable:
                return [*wanted, step, *self._exact_before(step)]
            if all(self._has_moved(rank, step) for rank in self.lacking(step)):
                wanted.append(step)  # other machines have the rest of it, or of an older one: that is not known here
        return wanted

    def _has_moved(self, rank: int, step: SavedStep) -> bool:
        """Whether this folder may be of an earlier attempt, and its rank be on another machine since."""
        attempts = [fact.moment[1] for fact in self.inventory.facts if self.is_in_memory(fact) and fact.rank == rank]
        return bool(attempts) and max(attempts) < step.moment[1]

    def _exact_before(self, newest: SavedStep) -> list[SavedStep]:
        """Where a rank has no own state of the newest step: the one just before that a start prefers then."""

        def is_exact(step: SavedStep) -> bool:
            return step.ranks.union(step.own_states).issuperset(r for r in self.ranks if r < newest.world_size)

        if is_exact(newest):
            return []
        there = set(self.inventory.moments)
        before = steps_before(newest.moment, bases_of(self.inventory.facts))
        near = [self.inventory.judge(moment) for moment in before if moment in there]
        return [step for step in near if step.is_usable and is_exact(step)][:1]


def _sound(machine: _Machine, flushed: Flushed) -> list[SavedStep]:
    """The steps to write. One that has rotted in memory does not stand in the way of an older one."""

    def choose() -> list[SavedStep]:
        return [step for step in machine.wanted() if machine.to_write(step)]

    def check(steps: list[SavedStep]) -> Iterator[tuple[None, FileFact, str]]:
        for fact in (fact for step in steps for fact in machine.to_write(step)):
            problems = verify_file(Path(fact.path))
            if problems:
                machine.damaged.add(fact.path)
                flushed.lines.append(problems[0])
                yield None, fact, problems[0]

    return until_sound(machine.inventory, choose, check)


def _not_on_disk(machine: _Machine, flushed: Flushed) -> set[int]:
    """Ranks whose newest snapshot is neither on disk nor less than what is: that is never thrown away."""
    machine.look()
    there, steps = set(machine.on_disk.moments), machine.steps
    usable = (
        n for n, step in enumerate(steps) if step.moment in there and machine.on_disk.judge(step.moment).is_usable
    )
    newest_usable = next(usable, len(steps))
    kept = set()
    for rank in sorted({rank for step in steps for rank in machine.in_memory(step)}.intersection(machine.ranks)):
        number, newest = next((n, step) for n, step in enumerate(steps) if rank in machine.in_memory(step))
        if number < newest_usable and any(fact.rank == rank for fact in machine.to_write(newest)):
            kept.add(rank)
            flushed.lines.append(
                f"the memory of rank {rank} is kept: its step {newest.moment[2]} is newer than what is on disk, and "
                f"{rank_list(machine.lacking(newest))} cannot give it; `mindx-elastic clean --all` lists "
                "it, and --yes removes it"
            )
    return kept


# --- writing ---


def _write(step: SavedStep, machine: _Machine, flushed: Flushed) -> None:
    _, attempt, number = step.moment
    facts = machine.to_write(step)
    for fact in facts:
        info = machine.inventory.entries[fact.path].info
        assert info is not None  # it has given the fact
        folder = rank_folder(machine.directory, fact.rank, fact.world_size)
        name = f"memory-{fact.epoch}_{fact.step_in_epoch}_breakpoint.safetensors"
        _copy_file(Path(fact.path), folder / name, info)
    if flushed.step is None and (step.is_usable or not machine.lacking(step)):
        flushed.step = number
    what = f"step {number} (attempt {attempt}) of {rank_list([fact.rank for fact in facts])}"
    flushed.lines.append(f"{what} is written from memory to {machine.directory}")


def _copy_rings(machine: _Machine, rings: Mapping[int, Path]) -> list[OSError]:
    """What could not be copied; the snapshots matter more."""
    problems: list[OSError] = []
    runs = {machine.run} if machine.run else machine.inventory.runs
    newest = next((step for step in machine.steps if step.moment[0] in runs), None)
    if newest is not None and newest.world_size == 1:
        return problems  # a rank that has the one file has it all
    for rank, ring in rings.items():
        try:
            if {record.run_id for record in read_ring(ring)} & runs:
                _copy_file(ring, machine.directory / f"rank_{rank}" / RING_COPY)
        except OSError as error:
            problems.append(error)
    return problems


def _copy_file(source: Path, target: Path, info: CheckpointInfo | None = None) -> None:
    """`source` is in memory; `target` appears whole and durable, or not at all. Raises SaveError.

    `info`: of a checkpoint file; another moment's file of the same name is kept, as by every save.
    """
    try:
        memory = open_regular(source)
        try:
            size = os.fstat(memory).st_size
            with copied_file(target, size, lambda temp: info) as blocks:
                _pour(memory, size, blocks)
        finally:
            os.close(memory)
    except OSError as error:
        problem = f"{target}: cannot be written from memory, where a start on this machine finds it: "
        raise SaveError(f"{problem}{error.strerror or error}", path=target) from error


def _pour(memory: int, size: int, blocks: BlockWriter) -> None:
    # Read, not mapped: reading cannot change the source, and reports what is wrong instead of a SIGBUS.
    piece = bytearray(_PIECE_BYTES)
    data = torch.frombuffer(piece, dtype=torch.uint8)
    done = 0
    while count := os.readv(memory, [piece]):
        blocks.put(data[:count])
        done += count
    if done != size:
        raise OSError(errno.EIO, "it has changed while it was read")
