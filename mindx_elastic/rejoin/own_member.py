"""Which member of a job that is recovered in place this process is, if it is one, and how a new process joins."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.config import AgentInfo, MemorySettings, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import page_path, read_page
from mindx_elastic.errors import MismatchError
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.snapshots import receive_snapshot
from mindx_elastic.rejoin import groups, joiner, spare
from mindx_elastic.rejoin.copies import Parcel, Receive
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.host import HAS_HOOK, PARTS_DIFFER
from mindx_elastic.rejoin.member import Entry, Member, UnfitSpareError

__all__ = ["find_member", "join_job", "tell_once"]

_members: list[Member] = []
_told: set[str] = set()


def find_member(ranks: RankInfo, modules: Sequence[nn.Module], *, is_first_guard: bool) -> Member | None:
    """This process's member; None: a death restarts the job. `modules`: what the guard keeps of these. Raises
    MismatchError in a new process that cannot take its place."""
    settings, agent = RejoinSettings.from_env(), AgentInfo.from_env()
    if not settings.in_place or agent is None or ranks.world_size == 1:
        return None
    # A new process could not pass the guards before it.
    reason = groups.problem() if is_first_guard else "this is not the process's first guard"
    if any(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters()):
        reason = reason or PARTS_DIFFER
    parts = (part for module in modules for part in module.modules())
    if any(part._comm_hooks for part in parts if isinstance(part, DistributedDataParallel)):
        reason = reason or HAS_HOOK
    several = bool(settings.scope) and settings.num_nodes > 1
    if not reason and several and {kind for group in groups.my_groups() for _, kind in group.backends} != {"gloo"}:
        reason = "process groups of several nodes are recovered with gloo only"
    if reason:
        if settings.generation and is_first_guard:
            raise MismatchError(f"this process cannot take a dead rank's place: {reason}")
        tell_once(ranks, f"{reason}: when a rank dies, the whole job is restarted")
        return None
    if not _members:
        _members.append(Member(settings, ranks, agent))
    return _members[0]


def tell_once(ranks: RankInfo, text: str) -> None:
    """One line a job: why there is no recovery in place."""
    if ranks.rank == 0 and text not in _told:
        _told.add(text)
        logger.warning("--recover in-place: %s", text)


def join_job(member: Member, ddp: groups.DdpModules) -> Entry:
    """In a new process: wait for the other ranks, and connect. Raises MismatchError."""
    try:
        return member.join(ddp, joiner.end_setup, _receiver(member.ranks))
    except UnfitSpareError as error:
        spare.end_unfit(str(error))
    except RejoinFailed as error:
        member.refuse(member.generation, str(error))
        raise MismatchError(f"this process cannot take a dead rank's place: {error}") from None


def _receiver(ranks: RankInfo) -> Receive:
    """Keeps the file of a donor of another node, in a process that has not opened its shared memory yet."""

    def receive(parcel: Parcel, fill: Callable[[mmap.mmap], None]) -> Path:
        base = MemorySettings.from_env().base
        if base is None:
            raise RejoinFailed("nothing is kept in shared memory (MINDX_ARENA_DIR)")
        arena = RankArena(base, _home(ranks.rank) or parcel.directory, ranks.rank)
        try:
            return receive_snapshot(arena, parcel.attempt, parcel.step, parcel.nbytes, parcel.header_bytes, fill)
        finally:
            arena.close()

    return receive


def _home(rank: int) -> Path | None:
    """The directory that names the job's folder in this node's shared memory, as the process before this one has told
    its agent; None: it has not. Nodes may have different ones."""
    agent = AgentInfo.from_env()
    status = None if agent is None else read_page(page_path(agent.folder, rank))
    return Path(status.directory) if status is not None and status.directory else None
