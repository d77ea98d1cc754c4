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
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mindx_elastic.config import SharingSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust, user_ids
from mindx_elastic.core.posix import open_regular
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.errors import CheckpointError, SaveError
from mindx_elastic.inventory.facts import facts_of
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, read_ring
from mindx_elastic.memory.folders import job_folder, rank_folders
from mindx_elastic.memory.known_runs import claim_of, known_runs, usable_runs
from mindx_elastic.memory.memory_files import RING_COPY, own_rings, own_states
from mindx_elastic.memory.snapshots import adopt_slots
from mindx_elastic.persist.catalog import read_entry, scan
from mindx_elastic.persist.direct_io import BlockWriter, preallocate
from mindx_elastic.persist.directory_lock import hold_ranks
from mindx_elastic.persist.first_save import FirstSave
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.reader import verify_file
from mindx_elastic.persist.storage import (
    check_free_space,
    create_temp,
    fsync_dir,
    make_directory_durable,
    prepare_owned_directory,
    publish,
)
from mindx_elastic.persist.writer import keep_older
from mindx_elastic.plan.facts import FileFact, ResumePlan, World
from mindx_elastic.plan.planner import bases_of, order_of_moments, plan_resume, steps_before

__all__ = ["Flushed", "drop", "flush", "trust_in"]

_PIECE_BYTES = 4 << 20
_PATIENCE_S = 2.0  # for the lock of a worker that the kernel is still taking away; a living job keeps it anyway
_LASTS_S = 1800.0  # as long as a start waits for us at most; the lock ends with this process

_Slots = dict[Moment, tuple[Path, CheckpointInfo]]
"""The snapshots of one rank."""


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
            flushed.lines.append(f"{arena} belongs to {directory}, which is gone; `mindx-elastic clean` removes it")
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
        return _flush_all(directory, job, arenas, trust, flushed, alone=not problem)
    finally:
        if lock is not None:
            lock.close()


def _flush_all(
    directory: Path, job: Path, arenas: Mapping[int, RankArena], trust: Trust, flushed: Flushed, *, alone: bool
) -> set[int]:
    """The ranks whose memory has to stay. Raises OSError when something cannot be written; then all of it has to."""
    slots: dict[int, _Slots] = {}
    for rank, arena in arenas.items():
        flushed.lines += adopt_slots(arena)
        slots[rank] = _snapshots(arena)
    rings = {rank: ring for rank, arena in arenas.items() if (ring := arena.folder / BOUNDARIES_FILE).exists()}
    known = _usable_runs(directory, job, slots, rings, trust)
    if not known and (rings or any(slots.values())):
        # Emptied by somebody, or a disk that cannot be read at the moment: then this is all that is left.
        raise CheckpointError(
            f"{directory / 'events.jsonl'} does not know the run that it is of, nor does a file there (files of other "
            "users count if MINDX_TRUSTED_USERS names them for the agent, too); `mindx-elastic clean` removes it"
        )
    run = _newest_run(slots, known)
    slots = {rank: {m: slot for m, slot in found.items() if m[0] == run} for rank, found in slots.items()}
    machine = _Machine(directory, job, sorted(rank_folders(job)), slots, trust)
    wanted = _sound(machine, flushed)
    problems = _copy_rings(machine, rings, {run} if run else known)
    for step in wanted:
        _write(step, machine, flushed, alone=alone)
    if problems:
        raise problems[0]
    return _not_on_disk(machine, flushed)


def _snapshots(arena: RankArena) -> _Slots:
    entries = [read_entry(slot.path) for slot in arena.slots]
    infos = [(entry.path, entry.info) for entry in entries if entry is not None]
    return {info.moment: (path, info) for path, info in infos if info is not None and info.resumable}


def _usable_runs(
    directory: Path, job: Path, slots: Mapping[int, _Slots], rings: Mapping[int, Path], trust: Trust
) -> set[str]:
    """As by a start, of this machine alone; see `memory.known_runs`."""
    wanted = {info.run_id for found in slots.values() for _, info in found.values()}
    for ring in rings.values():
        with suppress(OSError):  # said when it is copied
            wanted |= {record.run_id for record in read_ring(ring)}
    known = known_runs([directory], wanted, trust)
    if not wanted <= known.keys():
        for step in scan(directory, owners=trust.of(directory)).steps:
            known[step.run_id] = max(step.created, known.get(step.run_id, 0.0))
    claim = claim_of(job, directory)
    return usable_runs(known, [] if claim is None else [claim])


def _newest_run(slots: Mapping[int, _Slots], known: set[str]) -> str:
    """The run that the job has gone on with last; others in memory were given up by whoever began anew."""
    infos = [info for found in slots.values() for _, info in found.values() if info.run_id in known]
    return max(infos, key=lambda info: info.created).run_id if infos else ""


# --- what there is ---


@dataclass
class _Step:
    """What memory and disk have of one moment."""

    moment: Moment
    world_size: int
    in_memory: dict[int, tuple[Path, CheckpointInfo]] = field(default_factory=dict)
    on_disk: set[int] = field(default_factory=set)
    """Ranks."""
    facts: list[FileFact] = field(default_factory=list)
    """Of both."""
    unforeseen: bool = False
    """It came out otherwise than its forecasts in the rings, as some rank's file says."""

    def has(self, rank: int) -> bool:
        return rank in self.in_memory or rank in self.on_disk

    @property
    def to_write(self) -> list[int]:
        """Ranks that have it in memory only."""
        return sorted(set(self.in_memory) - self.on_disk)

    @property
    def usable(self) -> bool:
        """Whether the planner could go on from it with what is here."""
        return self._works(self.facts)

    @property
    def usable_on_disk(self) -> bool:
        in_memory = {str(path) for path, _ in self.in_memory.values()}
        return self._works([fact for fact in self.facts if fact.path not in in_memory])

    def _works(self, facts: Sequence[FileFact]) -> bool:
        return isinstance(plan_resume(facts, World(self.world_size)), ResumePlan)


class _Machine:
    """This machine's view of the job, sorted as by a start."""

    def __init__(
        self, directory: Path, job: Path, ranks: Sequence[int], slots: Mapping[int, _Slots], trust: Trust
    ) -> None:
        self.directory, self.job, self.slots, self._trust = directory, job, slots, trust
        self.ranks = ranks
        """Those with a folder in memory, whether it could be opened or not."""
        self.look()

    def look(self) -> None:
        """Again, when memory or disk have changed."""
        steps: dict[Moment, _Step] = {}
        for rank, found in self.slots.items():
            for path, info in found.values():
                self._step_of(info, steps).in_memory[rank] = path, info
        on_disk = scan(self.directory, owners=self._trust.of(self.directory)).entries
        for entry in on_disk:
            if entry.info is not None and entry.info.resumable:
                self._step_of(entry.info, steps).on_disk.add(entry.info.rank)
        slots = [read_entry(path) for found in self.slots.values() for path, _ in found.values()]
        facts, _ = facts_of([*on_disk, *(entry for entry in slots if entry is not None)])
        for fact in facts:
            if fact.moment in steps:
                steps[fact.moment].facts.append(fact)
        self.order = order_of_moments(facts)
        """All moments; what a start takes first is in front."""
        self._bases = bases_of(facts)
        self.steps = [steps[moment] for moment in self.order if moment in steps]

    def _step_of(self, info: CheckpointInfo, steps: dict[Moment, _Step]) -> _Step:
        step = steps.setdefault(info.moment, _Step(info.moment, info.world_size))
        step.unforeseen |= info.coordinates.get("foreseen") == 0
        return step

    def lacking(self, step: _Step) -> list[int]:
        """Ranks of this machine without a file of `step`."""
        return [rank for rank in self.ranks if rank < step.world_size and not step.has(rank)]

    def wanted(self) -> list[_Step]:
        """What has to be on disk for a start elsewhere to go on as one from this memory could; the newest in front."""
        wanted: list[_Step] = []
        for step in self.steps:
            if step.usable:
                return [*wanted, step, *self._exact_before(step)]
            if all(self._has_moved(rank, step) for rank in self.lacking(step)):
                wanted.append(step)  # other machines have the rest of it, or of an older one: nobody here knows
        return wanted

    def _has_moved(self, rank: int, step: _Step) -> bool:
        """Whether this folder may be of an earlier attempt, and its rank be on another machine since."""
        attempts = [attempt for _, attempt, _ in self.slots.get(rank, ())]
        return bool(attempts) and max(attempts) < step.moment[1]

    def _exact_before(self, newest: _Step) -> list[_Step]:
        """Where a rank has nothing of its own of the newest step: the one just before that a start prefers then."""
        own = {rank: self._own(rank) for rank in self.ranks if rank < newest.world_size}

        def is_exact(step: _Step) -> bool:
            return all(step.has(rank) or own[rank](step) for rank in own)

        if is_exact(newest):
            return []
        steps = {step.moment: step for step in self.steps}
        near = [steps[moment] for moment in steps_before(newest.moment, self._bases) if moment in steps]
        return [step for step in near if step.usable and is_exact(step)][:1]

    def _own(self, rank: int) -> Callable[[_Step], bool]:
        rings = own_rings([self.directory], self.job, rank)
        states = [own_states(ring, self._trust.of(ring)) for ring in rings]

        def has(step: _Step) -> bool:
            found = [one[step.moment] for one in states if step.moment in one]
            return any(not (own.forecast and step.unforeseen) for own in found)

        return has


def _sound(machine: _Machine, flushed: Flushed) -> list[_Step]:
    """The steps to write. One that has rotted in memory does not stand in the way of an older one."""
    while True:
        wanted = [step for step in machine.wanted() if step.to_write]
        damaged = [(rank, step) for step in wanted for rank in step.to_write if _is_damaged(step, rank, flushed)]
        if not damaged:
            return wanted
        for rank, step in damaged:
            del machine.slots[rank][step.moment]
        machine.look()


def _is_damaged(step: _Step, rank: int, flushed: Flushed) -> bool:
    problems = verify_file(step.in_memory[rank][0])
    flushed.lines += problems[:1]
    return bool(problems)


def _not_on_disk(machine: _Machine, flushed: Flushed) -> set[int]:
    """Ranks whose newest snapshot is neither on disk nor less than what is: that is never thrown away."""
    machine.look()
    newest_usable = next((n for n, step in enumerate(machine.steps) if step.usable_on_disk), None)
    kept = set()
    for rank in machine.slots:
        number = next((n for n, step in enumerate(machine.steps) if rank in step.in_memory), None)
        if number is None or rank in machine.steps[number].on_disk:
            continue
        newest = machine.steps[number]
        if newest_usable is None or number < newest_usable:
            kept.add(rank)
            flushed.lines.append(
                f"the memory of rank {rank} is kept: its step {newest.moment[2]} is newer than what is on disk, and "
                f"{rank_list(machine.lacking(newest))} cannot give it; `mindx-elastic clean` removes it"
            )
    return kept


# --- writing ---


def _write(step: _Step, machine: _Machine, flushed: Flushed, *, alone: bool) -> None:
    _, attempt, number = step.moment
    for rank in step.to_write:
        source, info = step.in_memory[rank]
        folder = machine.directory / f"rank_{rank}" if info.world_size > 1 else machine.directory
        _copy_file(
            source, folder / f"memory-{info.epoch}_{info.step_in_epoch}_breakpoint.safetensors", info, alone=alone
        )
    if flushed.step is None and (step.usable or not machine.lacking(step)):
        flushed.step = number
    what = f"step {number} (attempt {attempt}) of {rank_list(step.to_write)}"
    flushed.lines.append(f"{what} is written from memory to {machine.directory}")


def _copy_rings(machine: _Machine, rings: Mapping[int, Path], runs: set[str]) -> list[OSError]:
    """What could not be copied; the snapshots matter more."""
    problems: list[OSError] = []
    newest = next((step for step in machine.steps if step.moment[0] in runs), None)
    if newest is not None and newest.world_size == 1:
        return problems  # whoever has the one file has it all
    for rank, ring in rings.items():
        try:
            if {record.run_id for record in read_ring(ring)} & runs:
                _copy_file(ring, machine.directory / f"rank_{rank}" / RING_COPY)
        except OSError as error:
            problems.append(error)
    return problems


def _copy_file(source: Path, target: Path, info: CheckpointInfo | None = None, *, alone: bool = True) -> None:
    """`source` lies in memory; `target` appears whole and durable, or not at all. Raises SaveError.

    `info`: of a checkpoint file; another moment's file of the same name is kept, as by every save. `alone`: no other
    process can be in its first save there.
    """
    try:
        memory = open_regular(source)
        try:
            make_directory_durable(target.parent)
            _copy(memory, target, info, alone=alone)
        finally:
            os.close(memory)
    except OSError as error:
        problem = f"{target}: cannot be written from memory, where a start on this machine finds it: "
        raise SaveError(f"{problem}{error.strerror or error}", path=target) from error


def _copy(memory: int, target: Path, info: CheckpointInfo | None, *, alone: bool) -> None:
    size = os.fstat(memory).st_size
    fd, temp = create_temp(target)
    try:
        if not preallocate(fd, size):
            check_free_space(target.parent, size)
        with closing(BlockWriter(fd, 0)) as blocks:
            _pour(memory, size, blocks)
            blocks.finish()
        os.ftruncate(fd, size)  # direct I/O writes whole blocks
        os.fsync(fd)
        if info is not None:
            keep_older(target, info)
        if info is not None:
            first_save = FirstSave(target.parent, info.run_id)
            if alone:
                first_save.before_publish(temp)
            else:  # one note cannot name the files of two processes
                first_save.withdraw()
        publish(temp, target)
        fsync_dir(target.parent)
        if info is not None:
            first_save.after_publish()
    finally:
        temp.unlink(missing_ok=True)
        os.close(fd)


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
