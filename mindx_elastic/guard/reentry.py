"""What a guard takes in place of files when it is entered again, after a recovery in place.

A survivor of the boundary's step takes its own state, which is in its objects already; what changes within a step
(generators, buffers, positions) is put back from the copy of the boundary. A rank that lacks the state takes a
replica's snapshot from shared memory and its own small state from its ring, as a rank does that was killed and is
restarted. Where all ranks go back to a boundary, each has a snapshot of its own, or takes a replica's likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.config import RankInfo
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import CorruptCheckpointError, MismatchError
from mindx_elastic.memory.memory_files import SmallRecord, find_snapshot, own_rings, own_states, small_records
from mindx_elastic.persist.reader import Checkpoint, map_checkpoint
from mindx_elastic.rejoin.copies import DONOR_RING
from mindx_elastic.rejoin.member import Entry, Found, RejoinFailed
from mindx_elastic.start.facts import ResumePlan, World
from mindx_elastic.start.restore import FollowedPart, Resumed

__all__ = ["ReentryPart"]


class ReentryPart(FollowedPart):
    """Stands in for the plan of a start (`start.restore.PlanPart`): what to go on from is agreed on already."""

    name = "plan"

    def __init__(
        self, entry: Entry, ranks: RankInfo, arenas: Path | None, trust: Trust, modules: Collection[str]
    ) -> None:
        """`modules`: names of the modules, whose tensors are copied when they are loaded."""
        verdict = entry.verdict
        self._modules = frozenset(modules)
        self._entry, self._ranks, self._arenas, self._trust = entry, ranks, arenas, trust
        self.run_id, self.attempt = verdict.run_id, verdict.next_attempt

    @property
    def generation(self) -> int:
        """See `FileFact.generation`: it is the same start."""
        return 0 if self.resumed is None else self.resumed.checkpoint.info.generation

    def say(self) -> Any:
        return [self._entry.generation, self.run_id, self.attempt, self._entry.verdict.step]

    def merge(self, said: Sequence[Any]) -> Merged:
        if any(each != said[0] for each in said):
            raise MismatchError(f"the ranks go on from different boundaries: {sorted(map(str, said))}")
        return Merged(None)

    def hear(self, answer: Answer) -> None:
        pass

    def follow(self) -> None:
        """Get the state of this rank together. Raises CorruptCheckpointError, and MismatchError where it
        is not there."""
        entry, verdict = self._entry, self._entry.verdict
        try:
            where = entry.where()
        except RejoinFailed as error:
            raise MismatchError(f"this process cannot take a dead rank's place: {error}") from None
        if entry.live is not None:
            live = Checkpoint(entry.info, dict(entry.live), {})
            self.resumed = replace(self._resumed(live, where.paths.get(self._ranks.rank, where.path)), is_live=True)
            return
        moment = (verdict.run_id, verdict.attempt, verdict.step)
        source = verdict.sources[self._ranks.rank] if where.source < 0 else where.source
        path = self._path_of(where, source, moment)
        if self._arenas is None or not path.is_relative_to(self._arenas):
            raise CorruptCheckpointError(f"{path} is not in the job's shared memory", path=path)
        checkpoint = map_checkpoint(path, owners=self._trust.of(path))
        for name, value in checkpoint.state.items():
            if name not in self._modules:
                checkpoint.state[name] = copy_tree(value)
        if checkpoint.info.moment != moment or checkpoint.info.rank != source:
            raise CorruptCheckpointError(f"{path} holds another boundary than step {verdict.step}", path=path)
        if source == self._ranks.rank:
            self.resumed = self._resumed(checkpoint, path)
            return
        found = replace(self._resumed(checkpoint, path), donor=source)
        foreseen = checkpoint.info.coordinates.get("foreseen")  # of the donor, which has passed the boundary
        confirmed = moment if foreseen == 1 else None
        for ring in own_rings((), self._arenas, self._ranks.rank):
            own = own_states(ring, self._trust.of(ring)).get(moment)
            if own is not None and own.forecast and (foreseen == 0 or not (own.trusted or confirmed)):
                own = None
            found = replace(found, own=own)
        if found.own is None or not found.own.is_whole:
            found = replace(
                found,
                own_records=self._records(where, self._ranks.rank, moment, confirmed),
                donor_records=self._records(where, source, moment, confirmed),
            )
        self.resumed = found

    def _path_of(self, where: Found, source: int, moment: Moment) -> Path:
        """Where the state of `source` is in memory."""
        if not self._entry.verdict.rewinds:
            return where.paths[source]
        if self._arenas is None:
            raise CorruptCheckpointError("there is no shared memory", path=where.path)
        return find_snapshot(self._arenas, source, moment)

    def _resumed(self, checkpoint: Checkpoint, path: Path) -> Resumed:
        info = checkpoint.info
        world = self._ranks.world_size
        plan = ResumePlan(
            moment=info.moment,
            epoch=info.epoch,
            step_in_epoch=info.step_in_epoch,
            source=Strategy(world, ()),
            world=World(world, None),
            ranks=(),
            files={},
            resharded=False,
            unmanaged=tuple(info.unmanaged),
        )
        return Resumed(path, checkpoint, plan, only_in_memory=True, next_attempt=self.attempt)

    def _records(self, where: Found, rank: int, moment: Moment, confirmed: Moment | None) -> list[SmallRecord]:
        rings = own_rings((), self._arenas, rank)
        folder = where.path.parent
        if rank == where.source and folder.name != f"rank_{rank}":  # the donor is on another node
            rings = [folder / DONOR_RING]
        found = [each for ring in rings for each in small_records(ring, self._trust.of(ring), confirmed=confirmed)]
        return [record for record in found if record.moment[0] == moment[0] and record.moment <= moment]
