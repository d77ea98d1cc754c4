"""Chooses what to resume from and loads it.

Every rank looks at the checkpoint files it can see; what they all see is put together, and the planner
(`plan.planner`) makes the same plan of it on every rank. Each rank then reads and verifies what the plan gives it
before anybody changes any state; a damaged file is put in quarantine and a new plan is made without it. So a job never
starts from a mixture of steps, and never silently from nothing while checkpoints lie there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.told import making_sense
from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.moment import Moment, moment_name
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.printable import printable
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import CheckpointError, MismatchError, NoUsableCheckpointError, UsageError
from mindx_elastic.inventory.looking import look
from mindx_elastic.inventory.views import START_TIMEOUT_S, Sight, Sights, Transport, share_sights
from mindx_elastic.memory.memory_files import OwnState
from mindx_elastic.persist.catalog import root_of
from mindx_elastic.persist.first_save import find_notes
from mindx_elastic.persist.format import read_header
from mindx_elastic.persist.reader import Checkpoint
from mindx_elastic.plan.facts import KnownFaults, Refusal, ResumePlan, World
from mindx_elastic.plan.planner import never_complete, plan_resume
from mindx_elastic.resume.reading import PlanReader

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
    trust: Trust | None = None,
) -> Resumed | None:
    """The checkpoint to resume from, verified; None for a fresh start. Main thread, all ranks together.

    `arenas`: the job's folder in shared memory. `transport`: fetches what only other ranks hold of this rank's files.
    `target`: how this start lays its tensors out; without it only what was written by as many ranks, or is whole in
    each file, can be read. `faults`: what the platform's report says. `trust`: whose files count. `resume`:
    ``"auto"``, ``"never"``, or a path: a checkpoint directory, or one file whose step is then taken by all ranks.

    Where all files are of runs that never had a whole step, which has to be proved, it is a fresh start, too.

    Raises NoUsableCheckpointError when there are checkpoints and none can be used, MismatchError when they were written
    by another number of ranks and cannot be spread over this one, UsageError for a path that is not there or is a link
    to a file, CorruptCheckpointError and ForeignCheckpointError for a file that is no checkpoint.
    """
    if resume == "never":
        return None
    trust = trust or Trust()
    directories, only = _resolve(directories, resume)
    if resume != "auto":
        trust.add(directories[0])
    exchange.gather("adopted", "", START_TIMEOUT_S)  # every rank has made its arena readable
    sight = look(directories, ranks, exchange, only=only, arenas=arenas, transport=transport, trust=trust)
    sights = share_sights(sight, ranks.rank, exchange)
    world = World(ranks.world_size, None if target is None else target.strategy)
    reader = PlanReader(directories, ranks.rank, exchange, sights, transport, trust, arenas)
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
    if plan.is_other_program:
        raise MismatchError(
            f"the checkpoint in {directories[0]} does not fit: {'; '.join(lines[:8])}. Use the model that wrote it, or "
            'start anew with resume="never" in another directory',
            path=directories[0],
        )
    if only is not None and not plan.other_worlds:
        _refuse_path(resume, directories[0], only, lines)
    if resume == "auto" and sights.anything and _was_never_whole(directories, sights, exchange):
        text = (
            "the job begins anew: it was cut off in its very first save, and no step of it was ever whole, so nothing "
            f"that was saved is lost ({'; '.join(lines[:8])}). Its files stay where they are"
        )
        _warn(ranks, [text])
        return None
    _refuse_if_anything_was_there(directories[0], ranks, plan, sights, lines)
    return None


def _was_never_whole(directories: Sequence[Path], sights: Sights, exchange: Exchange) -> bool:
    """Whether all that is there is of runs that were cut off in their first save. Main thread, all ranks together.

    The notes of the ranks that never saved are the proof (see `persist.first_save`): each rank tells those it can see.
    """
    notes = [note for directory in directories for note in find_notes(directory)]
    own = json.dumps([[note.run_id, note.rank, note.world_size] for note in notes])
    found: dict[str, set[tuple[int, int]]] = {}
    texts = exchange.gather("never_saved", own, START_TIMEOUT_S)
    with making_sense("which ranks have never saved"):
        for text in texts:
            for run, rank, world_size in json.loads(text):
                found.setdefault(str(run), set()).add((int(rank), int(world_size)))
    proved = sights.is_all_known and never_complete(sights.facts(), found)
    for note in notes if proved else ():
        note.touch()  # it will be needed as long as these files are there
    return proved


def _resumed(
    plan: ResumePlan, checkpoint: Checkpoint, path: Path, sight: Sight, sights: Sights, ranks: RankInfo
) -> Resumed:
    lines = sights.lines(plan.moment, plan.rejected)
    told = {f"{one.what}: {one.reason}" for one in sights.rejected}  # by the file's owner, when it was put aside
    _warn(ranks, [line for line in lines if line not in told])
    mine = plan.ranks[ranks.rank]
    own = None if mine.donor is None or plan.resharded else sight.own.get(plan.moment)
    if own is not None and not sights.may_use(plan.moment, forecast=own.forecast):
        own = None
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
        reason = str(error).removeprefix(printable(f"{path}: "))
        remedy = "give another checkpoint, or a directory to take the newest step that is sound"
        raise type(error)(f"{what} cannot be resumed from: {reason}; {remedy}", path=path) from error
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror or error}") from error
    return [root_of(path, info.rank)], info.moment


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
