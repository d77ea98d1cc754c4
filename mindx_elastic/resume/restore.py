"""Chooses what to resume from and loads it.

Every rank looks at the checkpoint files it can see; what they all see is put together, and the planner
(`plan.planner`) makes the same plan of it on every rank. Each rank then reads and verifies what the plan gives it
before anybody changes any state; a damaged file is put in quarantine and a new plan is made without it. So a job never
starts from a mixture of steps, and never silently from nothing while checkpoints lie there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.config import RankInfo
from mindx_elastic.errors import CheckpointError, MismatchError, NoUsableCheckpointError, UsageError
from mindx_elastic.events import logger
from mindx_elastic.persist.catalog import CatalogEntry, root_of, scan
from mindx_elastic.persist.format import Moment, read_header
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.persist.storage import quarantine, quarantined
from mindx_elastic.plan.facts import KnownFaults, Refusal, Rejected, ResumePlan, World, moment_name
from mindx_elastic.plan.planner import plan_resume
from mindx_elastic.plan.strategy import Strategy
from mindx_elastic.resume.facts import facts_of
from mindx_elastic.resume.memory_files import OwnState, known_runs, own_rings, own_states, snapshot_entries
from mindx_elastic.resume.reading import PlanReader, Transport
from mindx_elastic.resume.views import START_TIMEOUT_S, Sight, Sights, key_of, share_sights

__all__ = ["Resumed", "Target", "find_and_read"]


@dataclass(frozen=True)
class Target:
    """What the ranks of this start hold."""

    strategy: Strategy
    blueprint: Blueprint
    """Of this rank."""


@dataclass(frozen=True)
class Resumed:
    """What a rank resumes from."""

    path: Path
    checkpoint: Checkpoint
    plan: ResumePlan
    rejected: Sequence[str] = ()
    """One line for each newer step or file that could not be used, with the reason."""
    donor: int | None = None
    """The rank whose file this is, where this rank has none of its own."""
    own: OwnState | None = None
    """With a donor: this rank's own small state of the same step, where it was kept in memory."""
    next_attempt: int = 0
    """The same on every rank: above every attempt of the run that any rank has seen, not only above the file's."""


def find_and_read(
    directories: Sequence[Path],
    ranks: RankInfo,
    exchange: Exchange,
    *,
    resume: str | Path,
    arenas: Path | None = None,
    transport: Transport | None = None,
    target: Target | None = None,
    faults: KnownFaults | None = None,
) -> Resumed | None:
    """The checkpoint to resume from, verified; None for a fresh start. Main thread, all ranks together.

    `arenas`: the job's folder in shared memory. `transport`: fetches what only other ranks hold of this rank's files.
    `target`: how this start lays its tensors out; without it only what was written by as many ranks, or is whole in
    each file, can be read. `faults`: what the platform's report says. `resume`: ``"auto"``, ``"never"``, or a
    path: a checkpoint directory, or one file whose step is then taken by all ranks.

    Raises NoUsableCheckpointError when there are checkpoints and none can be used, MismatchError when they were written
    by another number of ranks and cannot be spread over this one, UsageError for a path that is not there or is a link
    to a file, CorruptCheckpointError and ForeignCheckpointError for a file that is no checkpoint.
    """
    if resume == "never":
        return None
    directories, only = _resolve(directories, resume)
    exchange.publish("adopted", "1")  # every rank has made its arena readable
    exchange.collect("adopted", START_TIMEOUT_S)
    sight = _look(directories, ranks, only, arenas, transport)
    sights = share_sights(sight, ranks.rank, exchange)
    world = World(ranks.world_size, None if target is None else target.strategy)
    reader = PlanReader(directories, ranks.rank, exchange, sights, transport)
    while True:
        plan = plan_resume(
            sights.facts(),
            world,
            faults=faults or KnownFaults(),
            own_states=sights.own_states,
            rejected=sights.rejected,
            only=only,
        )
        if isinstance(plan, Refusal):
            break
        checkpoint = reader.read(plan, None if target is None else target.blueprint)
        if checkpoint is not None:
            return _resumed(plan, checkpoint, reader.path, sight, sights, ranks)
    lines = sights.lines(None, plan.reasons)
    if plan.is_misfit:
        raise MismatchError(
            f"the checkpoint in {directories[0]} does not fit: {'; '.join(lines[:8])}. Use the model that wrote it, or "
            'start anew with resume="never" in another directory',
            path=directories[0],
        )
    if only is not None and not plan.other_worlds:
        _refuse_path(resume, directories[0], only, lines)
    _refuse_if_anything_was_there(directories[0], ranks, plan, sights, lines)
    return None


def _resumed(
    plan: ResumePlan, checkpoint: Checkpoint, path: Path, sight: Sight, sights: Sights, ranks: RankInfo
) -> Resumed:
    lines = sights.lines(plan.moment, plan.rejected)
    told = {f"{one.what}: {one.reason}" for one in sights.rejected}  # by the file's owner, when it was put aside
    _warn(ranks, [line for line in lines if line not in told])
    mine = plan.ranks[ranks.rank]
    own = None if mine.donor is None or plan.resharded else sight.own.get(plan.moment)
    return Resumed(path, checkpoint, plan, lines, mine.donor, own, sights.next_attempt(plan.moment[0]))


def _warn(ranks: RankInfo, lines: Sequence[str]) -> None:
    for line in lines:
        if ranks.rank == 0:  # all ranks come to the same lines
            logger.warning("%s", line)


def _resolve(directories: Sequence[Path], resume: str | Path) -> tuple[Sequence[Path], Moment | None]:
    if resume == "auto":
        return directories, None
    if not isinstance(resume, (str, os.PathLike)) or resume == "":
        raise UsageError(f'resume={resume!r}: give "auto", "never" or a path')
    path = Path(resume)
    what = f"resume={str(resume)!r}"
    if path.is_dir():
        return [path], None
    if path.is_symlink():
        raise UsageError(
            f"{what} is a symbolic link, and checkpoint files are never followed: give the file itself, "
            f"{os.path.realpath(path)}, or its directory"
        )
    if not path.is_file():
        raise UsageError(f'{what} is neither "auto" nor "never", nor a checkpoint directory or file that exists')
    try:
        info = read_header(path).info
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ")
        remedy = "give another checkpoint, or a directory to take the newest step that is sound"
        raise type(error)(f"{what} cannot be resumed from: {reason}; {remedy}", path=path) from error
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from error
    return [root_of(path, info.rank)], info.moment


def _look(
    directories: Sequence[Path], ranks: RankInfo, only: Moment | None, arenas: Path | None, transport: Transport | None
) -> Sight:
    """What this rank sees on its disks and in its machine's memory."""
    sight = Sight(attempt=ranks.attempt)
    entries: list[CatalogEntry] = []
    for directory in directories:
        entries += _look_into(directory, ranks, sight)
    if arenas is not None:
        entries += snapshot_entries(arenas, known_runs(directories))
    for entry in entries:
        info = entry.info
        assert info is not None
        sight.attempts[info.run_id] = max(info.attempt, sight.attempts.get(info.run_id, 0))
        if info.coordinates.get("foreseen") == 0:
            sight.unforeseen.add(info.moment)
    facts, rejected = facts_of(entries)
    sight.facts = [fact for fact in facts if only in (None, fact.moment)]
    sight.rejected += rejected
    if transport is not None:
        places = {key_of(fact): transport.locate(Path(fact.path), fact.rank) for fact in sight.facts}
        sight.places = {key: place for key, place in places.items() if place is not None}
    for ring in own_rings([*directories], arenas, ranks.rank):
        _look_at_ring(ring, sight)
    return sight


def _look_into(directory: Path, ranks: RankInfo, sight: Sight) -> list[CatalogEntry]:
    """The good entries of a directory; of the bad ones it is noted that they are there."""
    sight.anything |= bool(quarantined(directory))
    if not directory.is_dir():
        return []
    good: list[CatalogEntry] = []
    for entry in scan(directory).entries:
        # Somebody else's file under a name of its own (pretrained weights) is none of our business.
        sight.anything |= entry.info is not None or entry.looks_ours or not entry.foreign
        if entry.info is None:
            _report_bad(entry, directory, ranks, sight)
        else:
            good.append(entry)
    return good


def _look_at_ring(ring: Path, sight: Sight) -> None:
    for moment, own in own_states(ring).items():
        run, attempt, _ = moment
        if run in sight.attempts:
            sight.attempts[run] = max(attempt, sight.attempts[run])
            if not (own.forecast and moment in sight.unforeseen):
                sight.own.setdefault(moment, own)


def _report_bad(entry: CatalogEntry, directory: Path, ranks: RankInfo, sight: Sight) -> None:
    """A file without a usable header: quarantine it when it stands where a checkpoint of ours should."""
    owner = _owner(entry.path, directory)
    if entry.foreign and not entry.looks_ours:
        logger.info("%s is not a checkpoint of this package and is left alone", entry.path)
        return
    # Every rank that sees the file says the same, so that in the end it is one line; only its owner logs it.
    sight.rejected.append(Rejected(str(entry.path), entry.problem or "unreadable"))
    if (owner if owner is not None and owner < ranks.world_size else 0) != ranks.rank:
        return
    if entry.looks_ours and not entry.path.is_dir():
        try:
            target = quarantine(entry.path, entry.problem or "unreadable", directory)
            logger.warning("%s is put aside in %s: %s", entry.path, target, entry.problem)
            return
        except OSError as error:
            logger.warning("%s cannot be moved to the quarantine (%s)", entry.path, error)
    logger.warning("%s is not used: %s", entry.path, entry.problem)


def _owner(path: Path, directory: Path) -> int | None:
    name = path.parent.name
    if path.parent != directory and name.startswith("rank_") and name[5:].isdigit():
        return int(name[5:])
    return None


def _refuse_path(resume: str | Path, directory: Path, only: Moment, lines: Sequence[str]) -> None:
    why = "; ".join(lines) or "not every rank has a sound file of it"
    raise NoUsableCheckpointError(
        f"resume={str(resume)!r}: {moment_name(only)} cannot be resumed: {why}; give another checkpoint, or a "
        "directory to take the newest step that is sound",
        path=directory,
    )


def _refuse_if_anything_was_there(
    directory: Path, ranks: RankInfo, refusal: Refusal, sights: Sights, lines: Sequence[str]
) -> None:
    remedy = 'to start anew pass resume="never" (nothing is deleted), or choose another directory'
    reasons = "; ".join(lines[:8])
    if refusal.other_worlds:
        sizes = ", ".join(map(str, refusal.other_worlds))
        raise MismatchError(
            f"the checkpoints in {directory} were written by {sizes} ranks and cannot be spread over the "
            f"{ranks.world_size} of this job: {reasons}; start it with {refusal.other_worlds[-1]} ranks, or {remedy}",
            path=directory,
        )
    if not sights.anything:
        if lines:  # in memory only
            _warn(ranks, [f"the job begins anew; what it left in memory is not used: {reasons}"])
        return
    if not lines:
        reasons = "they are in quarantine, or not meant for resuming"
    raise NoUsableCheckpointError(
        f"{directory} holds checkpoint files and none can be resumed from: {reasons}; {remedy}",
        path=directory,
    )
