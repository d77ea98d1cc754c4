"""What a worker keeps in shared memory, so that a killed process takes nothing with it.

Two things in the rank's arena (`memory.arena`): snapshots of the whole state now and then (`snapshots`), and in a
replicated job the small own state of every boundary (`boundaries`). Neither ever stops a training: an error is logged
once, and the job goes on without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from torch import nn

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.config import MemorySettings, RankInfo
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.errors import ArenaError
from mindx_elastic.memory.arena import COPY_FILE, STEPS_FILE, RankArena
from mindx_elastic.memory.boundaries import BoundaryLog, StepCounter
from mindx_elastic.memory.folders import job_folder
from mindx_elastic.memory.memory_files import RING_COPY, known_runs
from mindx_elastic.memory.snapshot_schedule import SnapshotSchedule
from mindx_elastic.memory.snapshots import Neighbours, Snapshotter, adopt_slots
from mindx_elastic.persist.format import CheckpointInfo

__all__ = ["Memory", "open_memory"]


class Memory:
    """One per guard, and only where there is something to keep. Main thread."""

    def __init__(
        self,
        arena: RankArena,
        directory: Path,
        snapshot_every: int | None,
        *,
        local_rank: int = 0,
        is_known: bool = False,
    ) -> None:
        """`is_known`: this process has had the arena open all the time."""
        self.arena, self._directory, self._local_rank = arena, directory, local_rank
        self._every = snapshot_every
        self._log: BoundaryLog | None = None
        self._snapshotter: Snapshotter | None = None
        (arena.folder / COPY_FILE).unlink(missing_ok=True)  # the rank may have come here from another node
        for note in () if is_known else adopt_slots(arena):
            logger.warning("%s", note)

    @property
    def takes_snapshots(self) -> bool:
        """Whether this rank or another one of the machine copies the state now and then."""
        return self._snapshotter is not None and not self._snapshotter.broken

    @property
    def folder(self) -> Path:
        """The job's folder: this rank's arena and those of the other ranks of the machine."""
        return self.arena.job

    @property
    def steps_file(self) -> Path:
        """In this rank's arena, see `memory.arena`."""
        return self.arena.folder / STEPS_FILE

    def start(
        self,
        collector: Collector,
        update_gate: UpdateGate,
        exchange: Exchange,
        events: EventLog,
        *,
        replicas: Iterable[nn.Module],
        counter: StepCounter,
        describe: Callable[[], CheckpointInfo],
        resumed: CheckpointInfo | None = None,
        all_alike: bool = True,
        donates: bool = False,
        begins_again: bool = False,
        tell_interval: Callable[[int], None] = lambda every: None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """The state is back, from `resumed`, and training begins. `replicas`: the modules that other ranks hold too;
        `all_alike`: every rank does. `donates`: `donate` may be called, also where no snapshots are taken.
        `begins_again`: after a recovery in place. `tell_interval`: called with the number of steps between two
        snapshots, when it is known."""
        if resumed is not None:
            self.arena.keep(resumed.attempt, resumed.step)
        try:
            self.arena.describe(self._directory, events.run_id)
        except OSError as error:
            logger.warning("%s: cannot be written to (%s)", self.arena.job, error)
        if not events.is_recorded and events.run_id not in known_runs([self._directory], [events.run_id]):
            logger.warning(
                "%s: not even which run this is can be written there; should it be killed before that works again, a "
                "start does not use what it has kept in memory. Make room there",
                self._directory,
            )
        modules = list(replicas)
        if modules:
            self._log = BoundaryLog(self.arena, collector, modules, counter)
            if begins_again and resumed is not None:
                self._log.begin_again(events.run_id, events.attempt, resumed.moment)
            else:
                self._log.begin(events.run_id, events.attempt, has_resumed=resumed is not None)
        if self._every != 0 or donates:
            schedule = SnapshotSchedule(self._every, start=collector.position.step)
            # Replicas would copy the same bytes: one a machine does, the others keep what is their own.
            instead = None if self._log is None or self._local_rank == 0 or not all_alike else self._log.pin
            self._snapshotter = Snapshotter(
                self.arena,
                collector,
                update_gate,
                schedule,
                describe,
                exchange,
                events,
                instead=instead,
                all_alike=all_alike,
                tell=tell_interval,
                neighbours=neighbours,
            )

    def at_boundary(self, step: int, *, tail_follows: bool = False, after_tail: bool = False) -> None:
        """Training thread: the boundary `step` was passed.

        `tail_follows`: code that belongs to it is still to come, and snapshots wait for `after_tail`: it is the same
        boundary, with what has come of that code.
        """
        if self._log is not None:
            self._log.at_boundary(after_tail=after_tail)
        if self._snapshotter is not None and not tail_follows:
            self._snapshotter.at_boundary(step)

    def keep_boundary(self) -> None:
        """Training thread: the boundary was passed, and code of the program follows that belongs to it. A rank that is
        killed there has it all the same."""
        if self._log is not None:
            self._log.keep()

    def take_last(self) -> bool:
        """The training has ended by itself. Keep its last boundary: what the program does next may still fail."""
        return self._snapshotter is not None and self._snapshotter.take_last()

    def keep(self, timeout_s: float, *, whole: bool) -> bool:
        """See `Snapshotter.keep`."""
        return self._snapshotter is not None and self._snapshotter.keep(timeout_s, whole=whole)

    def finish_copy(self) -> None:
        """Wait for a snapshot in progress; there is no other until the next boundary. Training thread."""
        if self._snapshotter is not None:
            self._snapshotter.finish_copy()

    def donate(self) -> Path | None:
        """Put the last boundary where other processes of the machine can take it; None: it could not be done. Training
        thread, with the update gate held."""
        return None if self._snapshotter is None else self._snapshotter.donate()

    def release(self) -> RankArena:
        """Close all but the arena, which this process goes on with at once: what is mapped stays mapped."""
        if self._snapshotter is not None:
            self._snapshotter.close()
        if self._log is not None:
            self._log.close()
        return self.arena

    def close(self, *, keep: bool) -> None:
        """`keep`: the next start may need what is there; else everything is removed."""
        self.release()
        if keep and not self.arena.is_empty:
            self.arena.close()
        else:
            self.arena.remove()
            with suppress(OSError):
                (self._directory / self.arena.folder.name / RING_COPY).unlink(missing_ok=True)


def open_memory(
    settings: MemorySettings, directory: Path, ranks: RankInfo, *, replicated: bool, kept: RankArena | None = None
) -> Memory | None:
    """The memory of this rank; None where nothing is to be kept, or nothing can be (said once). `kept`: the arena that
    this process has still open."""
    if kept is not None:
        if settings.base is not None and kept.job == job_folder(settings.base, directory):
            return Memory(kept, directory, settings.snapshot_every, local_rank=ranks.local_rank, is_known=True)
        kept.close()
    if settings.base is None:
        return None
    if settings.snapshot_every == 0 and not replicated and not job_folder(settings.base, directory).exists():
        return None
    try:
        arena = RankArena(settings.base, directory, ranks.rank)
        try:
            return Memory(arena, directory, settings.snapshot_every, local_rank=ranks.local_rank)
        except BaseException:
            if arena.is_empty:
                arena.remove()
            else:
                arena.close()
            raise
    except (ArenaError, OSError) as error:
        logger.warning("%s; nothing is kept in memory, checkpoints on disk are not affected", error)
        return None
