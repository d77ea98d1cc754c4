"""The state of a rank in a recovery in place: from its own objects, or from a living rank, in place of files.

A survivor of the boundary's step takes its own state, which is in its objects already; what changes within a step
(generators, buffers, positions) is put back from the copy of the boundary. A rank that lacks the state takes a
replica's snapshot from shared memory and its own small state from its ring, as a rank does that was killed and is
restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.config import RankInfo
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import CorruptCheckpointError, MismatchError
from mindx_elastic.memory.memory_files import own_rings, own_states
from mindx_elastic.persist.reader import Checkpoint, map_checkpoint
from mindx_elastic.start.facts import ResumePlan, World
from mindx_elastic.start.restore import FollowedPart, Resumed, records_of

__all__ = ["Boundary", "InPlacePart"]


class Boundary(NamedTuple):
    """What all ranks have agreed to go on from."""

    generation: int
    """The generation of the recovery."""
    moment: Moment
    next_attempt: int
    """All go on in this one."""
    live: Checkpoint | None
    """This process's own state of it; None: it takes state from memory."""
    snapshot: Callable[[], Path]
    """The donor's in shared memory. In a new process it waits until the donor has put it there, and raises
    MismatchError where that does not come about: so it is called when the state is to be loaded, not before."""
    dead: Sequence[int] = ()
    """Ranks whose places new processes take."""
    donor: int = -1
    """The rank that gives the snapshot, and writes the line about it."""


class InPlacePart(FollowedPart):
    """Stands in for `PlanPart`: what to go on from is agreed on already."""

    def __init__(
        self, boundary: Boundary, ranks: RankInfo, arenas: Path | None, trust: Trust, modules: Collection[str]
    ) -> None:
        """`modules`: names of the modules, whose tensors are copied when they are loaded."""
        self._modules = frozenset(modules)
        self._boundary, self._ranks, self._arenas, self._trust = boundary, ranks, arenas, trust
        self.run_id, self.attempt = boundary.moment[0], boundary.next_attempt

    @property
    def generation(self) -> int:
        """The same as in the start: it is the same one."""
        return 0 if self.resumed is None else self.resumed.checkpoint.info.generation

    def say(self) -> Any:
        return [self._boundary.generation, self.run_id, self.attempt, self._boundary.moment[2]]

    def merge(self, said: Sequence[Any]) -> Merged:
        if any(each != said[0] for each in said):
            raise MismatchError(f"the ranks go on from different boundaries: {sorted(map(str, said))}")
        return Merged(None)

    def hear(self, answer: Answer) -> None:
        pass

    def follow(self) -> None:
        """Get the state of this rank together. Raises CorruptCheckpointError, and MismatchError where it
        is not there."""
        moment, donor, path = self._boundary.moment, self._boundary.donor, self._boundary.snapshot()
        if self._boundary.live is not None:
            self.resumed = self._resumed(self._boundary.live, path)._replace(is_live=True)
            return
        checkpoint = self._read(path)
        found = self._resumed(checkpoint, path)._replace(donor=donor)
        foreseen = checkpoint.info.coordinates.get("foreseen")  # of the donor, which has passed the boundary
        rings = own_rings((), self._arenas, self._ranks.rank)
        for ring in rings:
            own = own_states(ring, self._trust.of(ring)).get(moment)
            if own is not None and own.forecast and (foreseen == 0 or not (own.trusted or foreseen == 1)):
                own = None
            found = found._replace(own=own)
        self.resumed = records_of(found, rings, own_rings((), self._arenas, donor), self._trust)

    def _read(self, path: Path) -> Checkpoint:
        moment = self._boundary.moment
        if self._arenas is None or not path.is_relative_to(self._arenas):
            raise CorruptCheckpointError(f"{path} is not in the job's shared memory", path=path)
        checkpoint = map_checkpoint(path, owners=self._trust.of(path))
        for name, value in checkpoint.state.items():
            if name not in self._modules:
                checkpoint.state[name] = copy_tree(value)
        if checkpoint.info.moment != moment or checkpoint.info.rank != self._boundary.donor:
            raise CorruptCheckpointError(f"{path} holds another boundary than step {moment[2]}", path=path)
        return checkpoint

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
        return Resumed(path, checkpoint, plan, next_attempt=self.attempt)
