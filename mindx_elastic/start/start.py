"""Starts a job: the ranks meet, choose where the state of each comes from, load it, and record the plan.

The state comes from files, on disk and in memory (`PlanPart`: the ranks find what is there, rank 0 plans), or in
a recovery in place from the living (`in_place`: what to go on from is agreed on already). The rest is the same.

The meetings (see `agreement.gather`); each of their topics is a `Part`:

=========  ===================================================================================================
here       the machine and disk of each rank; the fault report; settings that must be equal
plan       layouts of all tensors, and what each rank has found; the answer is the plan (see `start.restore`)
read       each rank has read its share; once more for every damaged file
tail       on which side of the code after an epoch each rank's state is
loaded     the state is in the live objects, on every rank; what that has shown against an exact resume
=========  ===================================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mindx_elastic.agreement.gather import Answer, Merged, Part, meet
from mindx_elastic.alarm.peers import PeerWatch, own_identity, space_of
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import DdpModules
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.ports import Risks
from mindx_elastic.core.position import Position
from mindx_elastic.core.rank_lists import rank_list
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.errors import MismatchError
from mindx_elastic.start.ddp_warmup import replay_orders
from mindx_elastic.start.in_place import Boundary, InPlacePart
from mindx_elastic.start.job_layouts import JobLayouts, own_target
from mindx_elastic.start.loading import load
from mindx_elastic.start.ports import Job, Platform, StartConnections
from mindx_elastic.start.restore import Disks, PlanPart, Resumed, places_of, read_together
from mindx_elastic.start.tail_side import TailSide

__all__ = ["STRATEGY_FILE", "PeersPart", "Start", "is_another_job", "start_job"]

STRATEGY_FILE = "strategy.proto"
_MOST_NOTES = 32  # as many as a file records
_DEFAULT_NAMES = frozenset({"ckpt", "CKP", "Net"})  # of Guard and ExceptionCheckpoint, ModelCheckpoint, OnRequestExit


class Start(NamedTuple):
    """The result of a start."""

    run_id: str
    attempt: int
    generation: int
    """See `FileFact.generation`."""
    resumed: Resumed | None
    peers: PeerWatch
    restore_streams: Callable[[], None] | None
    """Puts the random generators back as at the resumed boundary; None on a fresh start."""
    fault_report: int
    """When the platform's report on faults was made; 0: there is none."""
    shown: Sequence[str] = ()
    """What loading has shown against an exact resume, on any rank."""

    @property
    def notes(self) -> Sequence[str]:
        """What is known against an exact resume, according to the files of all ranks that the run goes on from."""
        return () if self.resumed is None else self.resumed.plan.unmanaged

    @property
    def step(self) -> int | None:
        """The step that the run goes on from; None on a fresh start."""
        return None if self.resumed is None else self.resumed.checkpoint.info.step


def start_job(
    directories: Sequence[Path],
    *,
    look_in: Sequence[Path],
    resume: str | Path,
    collector: Collector,
    targets: Mapping[str, Any],
    job: Job,
    around: StartConnections,
    platform: Platform,
    risks: Risks,
    ddp: DdpModules,
    boundary: Boundary | None = None,
) -> Start:
    """Choose, load, and say so. Main thread, all ranks together. `look_in`: the directories that may hold files of the
    job: more than `directories` where the ranks have different ones. `boundary`: what the ranks of a recovery in place
    have agreed on, in place of what is in the directories and in memory.

    Raises NoUsableCheckpointError when there are checkpoints and none can be used; MismatchError when they do not fit,
    come from another job, or from a world size that cannot be spread over this one; and what `places_of` and
    `Collector.load` raise.
    """
    began = time.perf_counter()
    ranks, exchange, in_place = job.ranks, around.exchange, boundary is not None
    disks = Disks(places_of(look_in, "never" if in_place else resume, arenas=around.arenas, trust=job.trust))
    peers = PeersPart(ranks)
    meet(exchange, "here", [disks, peers, *platform.parts(), *around.parts()])
    around.connect()

    layouts = JobLayouts(
        exchange,
        own_target(collector, ranks),
        collector.layouts.set_job_layouts,
        publish=lambda: platform.wants_strategy,
    )
    source: PlanPart | InPlacePart
    if boundary is not None:
        source = InPlacePart(boundary, ranks, around.arenas, job.trust, collector.module_names)
    else:
        transport, faults = around.mirror, platform.faults
        source = PlanPart(
            exchange, ranks, disks, layouts.target, transport=transport, archive=around.archive, faults=faults
        )
    meet(exchange, "plan", [layouts, *around.later_parts(), source])
    around.greet()
    found = read_together(exchange, source)

    if found is not None and resume == "auto" and not in_place:
        _refuse_another_job(found, job.names)
    if resume in ("auto", "never") and not (in_place or around.evaluates):
        _refuse_guest(found, directories[0], targets, starts_over=resume == "never")
    around.announce(found)  # before anything is loaded: loading may be what kills the process
    job.events.run_id, job.events.attempt = source.run_id, source.attempt
    restore, known = None, risks.notes
    if found is None:
        logger.info("fresh start in %s", directories[0])
        collector.copy(Position())
        job.events.emit("start", step=0, outcome="fresh")
    else:
        if not in_place:
            replay_orders(found.checkpoint.state, ddp, risks)
        tail = TailSide(found)
        meet(exchange, "tail", [tail])
        restore = load(found, collector, ranks, risks, tail=tail, with_flags=not around.evaluates)
        if found.plan.resharded:
            risks.inherit(found.plan.inexact)
    flags = () if found is None else found.checkpoint.info.flags
    meet(exchange, "loaded", [_NotesPart(risks), *platform.last_parts(flags)])
    shown = [note for note in risks.notes if note not in known]
    if found is not None:
        _tell(found, job, began, boundary, shown)
    if not in_place and not around.evaluates:  # in a recovery in place the files are as the first start has left them
        if ranks.rank == 0:
            assert layouts.target.strategy is not None
            platform.write_plan(directories[0], layouts.target.strategy, None if found is None else found.plan)
        platform.write_groups(layouts.whole_strategy)
    return Start(
        run_id=source.run_id,
        attempt=source.attempt,
        generation=source.generation,
        resumed=found,
        peers=PeerWatch(peers.identities, rank=ranks.rank),
        restore_streams=restore,
        fault_report=platform.faults.report,
        shown=shown,
    )


class _NotesPart(Part):
    """What is known against an exact resume on any rank is in the files of all: the one that knows it may be killed
    before it saves."""

    name = "notes"

    def __init__(self, risks: Risks) -> None:
        self._risks = risks

    def say(self) -> Any:
        return self._risks.notes

    def merge(self, said: Sequence[Any]) -> Merged:
        return Merged(list(dict.fromkeys(str(note) for notes in said for note in notes))[:_MOST_NOTES])

    def hear(self, answer: Answer) -> None:
        self._risks.inherit(map(str, answer.common))


def _tell(found: Resumed, job: Job, began: float, boundary: Boundary | None, notes: Sequence[str]) -> None:
    """Write to the log and the event log from where the run continues. `notes`: what loading has shown against an exact
    resume."""
    info = found.checkpoint.info
    where = f"step {info.step} (epoch {info.epoch}, step {info.step_in_epoch})"
    if boundary is None:
        logger.info("resumed from %s: %s, saved because of %s", found.path, where, info.reason)
    elif job.ranks.rank == boundary.donor:
        logger.info("%s replaced, the others live on: going on from %s", rank_list(boundary.dead), where)
    if job.ranks.rank == 0 and found.plan.resharded:
        logger.warning("not bit for bit the uninterrupted run: %s", "; ".join(found.plan.inexact))
    of_files = found.plan.unmanaged if job.ranks.rank == 0 and boundary is None else ()
    if of_files:  # in place, this log has them already: the rank that found one has warned
        logger.warning("not bit for bit the uninterrupted run, according to its files: %s", "; ".join(of_files))
    doubts = list(dict.fromkeys([*found.plan.unmanaged, *notes]))
    job.events.emit(
        "resume",
        step=info.step,
        reason=info.reason,
        duration_s=time.perf_counter() - began,
        outcome="resumed" if boundary is None else "in place",
        path=str(found.path),
        rejected=list(found.rejected),
        exact=None if found.plan.exact and not doubts else False,
        unmanaged=doubts,
        resharded=found.plan.resharded,
    )


def _refuse_another_job(found: Resumed, names: Sequence[str]) -> None:
    """Raise MismatchError for another job's file: two jobs that share a directory by mistake would continue each
    other's steps, or find the training finished."""
    recorded = found.checkpoint.info.names
    if is_another_job(recorded, names):
        theirs, ours = (", ".join(map(repr, each)) for each in (recorded, names))
        raise MismatchError(
            f"{found.path} is another job's: it was saved with the prefix {theirs}, and this job's is {ours}. A "
            'directory is for one job: give this job its own, or resume="PATH" to continue from that file all the '
            'same, or resume="never" to start over',
            path=found.path,
        )


def is_another_job(recorded: Collection[str], own: Collection[str]) -> bool:
    """Whether files with the names `recorded` are of another job than one with the names `own`.

    One name in common makes them one job's, because callbacks come and go. Default names do not count where both have
    chosen names. A file without names (of an older version, or converted) is not of another job.
    """
    if not recorded or not own:
        return False
    chosen = set(recorded) - _DEFAULT_NAMES, set(own) - _DEFAULT_NAMES
    return chosen[0].isdisjoint(chosen[1]) if all(chosen) else set(recorded).isdisjoint(own)


def _refuse_guest(found: Resumed | None, directory: Path, targets: Mapping[str, Any], *, starts_over: bool) -> None:
    """Raise MismatchError for a guard without an optimizer in the directory of a training, which has objects that it
    has not: the training's next start would take a file of this guard for its own newest one, and what a killed
    training has left in memory would be gone.

    A program that updates the weights by hand has no optimizer either, but resumes from a state with the same objects.
    """
    if any(isinstance(t, torch.optim.Optimizer) or name.startswith("optimizer") for name, t in targets.items()):
        return
    if starts_over and (directory / STRATEGY_FILE).exists():
        raise MismatchError(
            f"{directory} is a training's, and this guard has no optimizer and would start over in it: give it a "
            "separate directory",
            path=directory,
        )
    if found is None:
        return
    if missing := sorted(found.checkpoint.state.keys() - targets.keys() - set(RESERVED_NAMES)):
        raise MismatchError(
            f"{found.path} is a training's, and this guard has no optimizer and lacks {', '.join(missing)}. To use its "
            f'weights, give the guard a separate directory, with resume="{found.path}"',
            path=found.path,
        )


class PeersPart(Part):
    """The processes of the ranks on this machine, so that the guard can notice their deaths."""

    name = "peers"

    def __init__(self, ranks: RankInfo, identity: str | None = None) -> None:
        """`identity`: of this process; default: its own."""
        self._rank, self._own = ranks.rank, identity or own_identity()
        self.identities: Mapping[int, str] = {ranks.rank: self._own}

    def say(self) -> Any:
        return self._own

    def merge(self, said: Sequence[Any]) -> Merged:
        spaces: dict[str, dict[int, str]] = {}
        for rank, text in enumerate(said):
            spaces.setdefault(space_of(text) or f"rank {rank}", {})[rank] = text
        by_rank = {rank: peers for peers in spaces.values() for rank in peers}
        return Merged(None, [[[peer, text] for peer, text in by_rank[rank].items()] for rank in range(len(said))])

    def hear(self, answer: Answer) -> None:
        self.identities = {int(peer): str(text) for peer, text in answer.own} | {self._rank: self._own}
        for text in self.identities.values():
            space_of(text)
