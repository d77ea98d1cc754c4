"""What a start finds and reads, on one rank and on several at once, without a guard around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.gather import meet
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.config import RankInfo
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.start.facts import KnownFaults
from mindx_elastic.start.findings import Transport
from mindx_elastic.start.restore import Disks, PlanPart, Resumed, Target, places_of, read_together
from tests.start.shared_store import on_all_ranks

__all__ = ["find", "find_and_read", "find_on", "find_plan", "found_on", "plans_on", "step_of"]


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
    disks = Disks(places_of(directories, resume, arenas=arenas, trust=trust))
    meet(exchange, "here", [disks])
    target = target or Target(Strategy(ranks.world_size, ()), Blueprint({}, {}, {}))
    plan = PlanPart(exchange, ranks, disks, target, transport=transport, faults=faults)
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


def _plan_on(
    world_size: int, *directories: Path, target: Callable[[int], Target] | None = None, **more: Any
) -> list[PlanPart | Exception]:
    return on_all_ranks(
        world_size,
        lambda rank, exchange: find_plan(
            [directories[rank % len(directories)]],
            RankInfo(rank=rank, world_size=world_size),
            exchange,
            target=None if target is None else target(rank),
            **more,
        ),
    )


def find_on(world_size: int, *directories: Path, **more: Any) -> list[Resumed | Exception | None]:
    """What every rank finds. `directories`: the one of all, or one a rank."""
    return [p if isinstance(p, Exception) else p.resumed for p in _plan_on(world_size, *directories, **more)]


def plans_on(world_size: int, *directories: Path, **more: Any) -> list[PlanPart]:
    """Of every rank; raises the first rank's error."""
    plans = []
    for plan in _plan_on(world_size, *directories, **more):
        if isinstance(plan, Exception):
            raise plan
        plans.append(plan)
    return plans


def found_on(world_size: int, *directories: Path, **more: Any) -> list[Resumed]:
    """What every rank finds, which is something; raises the first rank's error."""
    found = [plan.resumed for plan in plans_on(world_size, *directories, **more) if plan.resumed is not None]
    assert len(found) == world_size
    return found
