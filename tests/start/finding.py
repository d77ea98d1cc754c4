"""What a start finds and reads, on one rank and on several at once, without a guard around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import meet
from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import Trust
from mindx_elastic.start.facts import KnownFaults
from mindx_elastic.start.findings import Transport
from mindx_elastic.start.restore import Disks, PlanPart, Resumed, Target, places_of, read_together
from tests.start.shared_store import on_all_ranks

__all__ = ["find", "find_and_read", "find_on", "find_plan", "step_of"]


def find_plan(
    directories: Sequence[Path],
    ranks: RankInfo,
    exchange: Exchange,
    *,
    resume: Any = "auto",
    arenas: Path | None = None,
    transport: Transport | None = None,
    target: Target | None = None,
    faults: KnownFaults | None = None,
    trust: Trust | None = None,
) -> PlanPart:
    """The meetings of a start up to the reading, as `start.start` holds them."""
    places = places_of(directories, resume, arenas=arenas, trust=trust)
    disks = Disks(places)
    meet(exchange, "here", [disks])
    plan = PlanPart(exchange, ranks, places, disks, transport=transport, target=target, faults=faults)
    meet(exchange, "plan", [plan])
    read_together(exchange, plan)
    return plan


def find_and_read(directories: Sequence[Path], ranks: RankInfo, exchange: Exchange, **more: Any) -> Resumed | None:
    return find_plan(directories, ranks, exchange, **more).resumed


def find(directory: Path, *more: Path, resume: Any = "auto") -> Resumed | None:
    return find_and_read([directory, *more], RankInfo(), Exchange(), resume=resume)


def step_of(found: Resumed | None) -> int:
    assert found is not None
    return found.checkpoint.info.step


def find_on(world_size: int, directory: Path, resume: Any = "auto") -> Sequence[Resumed | Exception | None]:
    return on_all_ranks(
        world_size,
        lambda rank, exchange: find_and_read(
            [directory], RankInfo(rank=rank, world_size=world_size), exchange, resume=resume
        ),
    )
