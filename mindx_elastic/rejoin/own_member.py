"""Which member of a job that is recovered in place this process is, if it is one, and how a new process joins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.errors import MismatchError
from mindx_elastic.rejoin import groups, joiner, spare
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.host import HAS_HOOK, PARTS_DIFFER
from mindx_elastic.rejoin.member import GuardEntry, Member, UnfitSpareError

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


def join_job(member: Member, ddp: groups.DdpModules) -> GuardEntry:
    """In a new process: wait for the other ranks, and connect. Raises MismatchError."""
    try:
        return member.join(ddp, joiner.end_setup)
    except UnfitSpareError as error:
        spare.end_unfit(str(error))
    except RejoinFailed as error:
        member.refuse(member.generation, str(error))
        raise MismatchError(f"this process cannot take a dead rank's place: {error}") from None
