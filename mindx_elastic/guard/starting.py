"""The start of a job: what the platform's report and the checkpoints say, the plan, and the files that are left for
people and platforms (``strategy.proto``, ``resume_plan.json``, the group info file)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.capture.collector import RESERVED_NAMES, Collector
from mindx_elastic.config import FaultPaths, RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import MindxError
from mindx_elastic.guard.connections import Surroundings
from mindx_elastic.guard.layouts_by_hand import target_of_all
from mindx_elastic.guard.resuming import Start, start_or_resume
from mindx_elastic.guard.saver import Saver
from mindx_elastic.persist.first_save import FirstSave, find_notes
from mindx_elastic.plan.facts import KnownFaults, ResumePlan
from mindx_elastic.platforms.fault_report import Faults, default_fault_sources, default_node_map, merge, read_faults

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
    had_strategy = (directories[0] / STRATEGY_FILE).exists()  # before any rank can have written one now
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
    if start.resumed is not None:
        saver.began_from(start.resumed.checkpoint.info)
    around.is_guest = around.evaluates or _is_guest(targets, start, had_strategy)
    if not around.is_guest:
        _keep_first_save(directories[0], start, saver, exchange)
    strategy = None if around.is_guest else target.strategy
    write_start_files(directories[0], strategy, start.plan, ranks, exchange)
    return start


def _is_guest(targets: Mapping[str, Any], start: Start, had_strategy: bool) -> bool:
    """Whether this is no training, but something else in a training's directory: an evaluation in a guard, a look at
    the weights. It has nothing that updates them, and the training had more than it has.

    A program may update by hand: then what it goes on from is all its own, or nothing was here before.
    """
    if any(isinstance(t, torch.optim.Optimizer) or name.startswith("optimizer") for name, t in targets.items()):
        return False
    if start.resumed is None:
        return had_strategy
    return any(name not in targets and name not in RESERVED_NAMES for name in start.resumed.checkpoint.state)


def _keep_first_save(directory: Path, start: Start, saver: Saver, exchange: Exchange) -> None:
    """Note that this rank has never saved in this run, where that is so (see `persist.first_save`).

    Main thread, all ranks together. A run that goes on from files has had a whole step. One that goes on from memory
    alone has not, as far as disks are concerned, as long as each rank is where its note is: after a move, or in
    another world, notes would say what nobody keeps true.
    """
    ranks, plan = saver.ranks, start.plan
    first_save = FirstSave(saver.folder(directory), start.run_id)
    if plan is None:
        if ranks.world_size > 1 and not saver.replicated:  # else one file is a whole step
            try:
                first_save.begin(ranks.rank, ranks.world_size)
                saver.first_save = first_save
            except OSError as error:
                logger.warning("%s: %s; a power cut in the first save will need a hand", first_save.path, error)
        return
    in_memory = all(fact.kind == "snapshot" for facts in plan.files.values() for fact in facts)
    if in_memory and plan.source.world_size == ranks.world_size > 1 and not saver.replicated:
        note = first_save.note()
        if all(exchange.gather("first_save", "1" if note is not None and note.holds else "", _START_TIMEOUT_S)):
            saver.first_save = first_save
            return
    for note in list(find_notes(directory)):
        if note.run_id == start.run_id:
            try:
                FirstSave(note.path.parent, note.run_id).withdraw()
            except OSError as error:
                logger.warning("%s cannot be removed: %s", note.path, error)


def faults_at_start(ranks: RankInfo, exchange: Exchange) -> KnownFaults:
    """What the platform's report says now; the same on every rank. A report that cannot be used is named and ignored.

    Main thread, all ranks together: the mounts of two nodes may be a moment apart.
    """
    own = _read_faults(ranks)
    texts = exchange.gather("faults", json.dumps([sorted(own.ranks), own.created]), _START_TIMEOUT_S)
    with making_sense("the fault reports that the ranks have read"):
        found = [json.loads(text) for text in texts]
        created = [float(stamp) for named, stamp in found if named and stamp is not None]
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
    directory: Path, strategy: Strategy | None, plan: ResumePlan | None, ranks: RankInfo, exchange: Exchange
) -> None:
    """Rank 0: the strategy and the plan; each rank its group info where ``GROUP_INFO_FILE`` asks for it.

    strategy: None: those of the training that the directory belongs to stay. Main thread, all ranks together. Training
    does not depend on these files: a failure is a warning.
    """
    # Only who writes them pays for importing protobuf.
    if ranks.rank == 0 and strategy is not None:
        try:
            _remove_old_plan(directory)
            from mindx_elastic.platforms.plan_files import write_plan
            from mindx_elastic.platforms.strategy_file import save_strategy

            save_strategy(directory / STRATEGY_FILE, strategy)
            if plan is not None:
                write_plan(directory, plan)
        except (MindxError, OSError, ImportError) as error:
            logger.warning("the strategy and the plan cannot be written to %s: %s", directory, error)
    _write_group_info(strategy, ranks, exchange)


def _remove_old_plan(directory: Path) -> None:
    """A start script must not take the plan of an earlier start for this one's."""
    from mindx_elastic.platforms.plan_files import PLAN_JSON, PLAN_PB

    for name in (PLAN_JSON, PLAN_PB):
        (directory / name).unlink(missing_ok=True)


def _write_group_info(strategy: Strategy | None, ranks: RankInfo, exchange: Exchange) -> None:
    wanted = os.environ.get("GROUP_INFO_FILE", "").strip()
    places = exchange.gather("group_info", os.path.abspath(wanted) if wanted else "", _START_TIMEOUT_S)
    if not wanted or strategy is None:
        return
    path = Path(wanted)
    if places.count(places[ranks.rank]) > 1:  # one launcher's environment for all ranks: one file each all the same
        path = path.parent / f"rank_{ranks.rank}" / path.name
    try:
        from mindx_elastic.platforms.group_info import write_group_info_file

        write_group_info_file(strategy, ranks.rank, path)
    except (MindxError, OSError, ImportError) as error:
        logger.warning("GROUP_INFO_FILE=%s cannot be written: %s", path, error)
