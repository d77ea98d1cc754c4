"""The start of a job: what the platform's report and the checkpoints say, the plan, and the files that are left for
people and platforms (``strategy.proto``, ``resume_plan.json``, the group info file)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.alarm.fault_report import Faults, default_fault_sources, default_node_map, merge, read_faults
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import FaultPaths, RankInfo
from mindx_elastic.errors import MindxError
from mindx_elastic.events import logger
from mindx_elastic.plan.facts import KnownFaults, ResumePlan
from mindx_elastic.plan.strategy import Strategy
from mindx_elastic.resuming import Start, start_or_resume
from mindx_elastic.saving import Saver
from mindx_elastic.strategies import target_of_all
from mindx_elastic.surroundings import Surroundings

__all__ = ["STRATEGY_FILE", "faults_at_start", "start_job", "write_start_files"]

STRATEGY_FILE = "strategy.proto"
_START_TIMEOUT_S = 1800.0


def start_job(
    directories: Sequence[Path],
    *,
    collector: Collector,
    targets: Mapping[str, Any],
    loader: Any,
    saver: Saver,
    resume: str | Path,
    around: Surroundings,
) -> Start:
    """Plan, load, write the plan down. Main thread, all ranks together; raises what `start_or_resume` raises."""
    ranks, exchange = saver.ranks, around.exchange
    target = target_of_all(collector, ranks, exchange)
    faults = faults_at_start(ranks, exchange)
    if faults.report:
        saver.coordinates["fault_report"] = faults.report
    start = start_or_resume(
        directories,
        collector=collector,
        targets=targets,
        loader=loader,
        ranks=ranks,
        exchange=exchange,
        events=saver.events,
        resume=resume,
        arenas=around.arenas,
        transport=around.mirror,
        target=target,
        faults=faults,
        on_found=around.announce,
        trust=saver.trust,
        names=saver.names,
    )
    write_start_files(directories[0], target.strategy, start.plan, ranks, exchange)
    return start


def faults_at_start(ranks: RankInfo, exchange: Exchange) -> KnownFaults:
    """What the platform's report says now; the same on every rank. A report that cannot be used is named and ignored.

    Main thread, all ranks together: the mounts of two nodes may be a moment apart.
    """
    own = _read_faults(ranks)
    exchange.publish("faults", json.dumps([sorted(own.ranks), own.created]))
    found = [json.loads(text) for text in exchange.collect("faults", _START_TIMEOUT_S)]
    created = [stamp for named, stamp in found if named and stamp is not None]
    return KnownFaults.of({int(rank) for named, _ in found for rank in named}, max(created, default=None))


def _read_faults(ranks: RankInfo) -> Faults:
    found = Faults.none()
    for source in default_fault_sources(FaultPaths.from_env()):
        try:
            found = merge(found, read_faults(source, world_size=None, nodes=default_node_map()))
        except MindxError as error:
            logger.warning("%s; the plan for this start is made without it", error)
    return found


def write_start_files(
    directory: Path, strategy: Strategy, plan: ResumePlan | None, ranks: RankInfo, exchange: Exchange
) -> None:
    """Rank 0: the strategy and the plan; each rank its group info where ``GROUP_INFO_FILE`` asks for it.

    Main thread, all ranks together. Training does not depend on these files: a failure is a warning.
    """
    # Only who writes them pays for importing protobuf.
    if ranks.rank == 0:
        try:
            _remove_old_plan(directory)
            from mindx_elastic.plan.outputs import write_plan
            from mindx_elastic.plan.strategy_file import save_strategy

            save_strategy(directory / STRATEGY_FILE, strategy)
            if plan is not None:
                write_plan(directory, plan)
        except (MindxError, OSError, ImportError) as error:
            logger.warning("the strategy and the plan cannot be written to %s: %s", directory, error)
    _write_group_info(strategy, ranks, exchange)


def _remove_old_plan(directory: Path) -> None:
    """A start script must not take the plan of an earlier start for this one's."""
    from mindx_elastic.plan.outputs import PLAN_JSON, PLAN_PB

    for name in (PLAN_JSON, PLAN_PB):
        (directory / name).unlink(missing_ok=True)


def _write_group_info(strategy: Strategy, ranks: RankInfo, exchange: Exchange) -> None:
    wanted = os.environ.get("GROUP_INFO_FILE", "").strip()
    exchange.publish("group_info", os.path.abspath(wanted) if wanted else "")
    places = exchange.collect("group_info", _START_TIMEOUT_S)
    if not wanted:
        return
    path = Path(wanted)
    if places.count(places[ranks.rank]) > 1:  # one launcher's environment for all ranks: one file each all the same
        path = path.parent / f"rank_{ranks.rank}" / path.name
    try:
        from mindx_elastic.plan.group_info import write_group_info_file

        path.parent.mkdir(parents=True, exist_ok=True)
        write_group_info_file(strategy, ranks.rank, path)
    except (MindxError, OSError, ImportError) as error:
        logger.warning("GROUP_INFO_FILE=%s cannot be written: %s", path, error)
