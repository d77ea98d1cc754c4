"""Starts a guard: the ranks meet, choose what to resume from, load it into the live objects, and record the plan.

The meetings (see `agreement.gather`); each of their topics is a `Part`:

=========  ===================================================================================================
here       the machine and disk of each rank; the fault report; settings that must be equal
plan       layouts of all tensors, and what each rank has found; the answer is the plan (see `start.restore`)
read       each rank has read its share; once more for every damaged file
tail       on which side of the code behind an epoch each rank's state is
loaded     the state is in the live objects, on every rank
entered    every rank is ready to train
=========  ===================================================================================================

After a recovery in place the ranks meet likewise; what to go on from is agreed on already (`guard.reentry`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.agreement.gather import Answer, Merged, Part, meet
from mindx_elastic.alarm.peers import PeerWatch, own_identity, space_of
from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import FaultPaths, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.data.position import num_batches
from mindx_elastic.errors import MindxError, MismatchError
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.job_layouts import JobLayouts, own_target
from mindx_elastic.guard.loading import load, replay_orders
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.policy import is_another_job
from mindx_elastic.guard.reentry import ReentryPart
from mindx_elastic.guard.replicas import DdpModules
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.tail_side import TailSide
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.first_save import FirstSave, find_notes, notes_in
from mindx_elastic.platforms.faults import Faults, default_fault_sources, merge, read_faults
from mindx_elastic.platforms.flag_file import AnsweredFlags
from mindx_elastic.platforms.nodes import default_node_map
from mindx_elastic.rejoin.member import Entry
from mindx_elastic.start.facts import KnownFaults, ResumePlan
from mindx_elastic.start.restore import Disks, PlanPart, Resumed, places_of, plan_of, read_together

__all__ = [
    "STRATEGY_FILE",
    "AnsweredFlagsPart",
    "FaultsPart",
    "FirstSavesPart",
    "GroupInfoPart",
    "LoaderLengthsPart",
    "PeersPart",
    "Start",
    "start_job",
]

STRATEGY_FILE = "strategy.proto"


@dataclass(frozen=True)
class Start:
    """The result of a start."""

    run_id: str
    attempt: int
    resumed: Resumed | None
    peers: PeerWatch
    restore_streams: Callable[[], None] | None
    """Puts the random generators back as at the resumed boundary; None on a fresh start."""
    fault_report: int
    """When the platform's report on faults was made; 0: there is none."""
    first_save: FirstSave | None = None
    """The note on disk that this rank has never saved in this run; None: it has, or the note is not needed."""
    uneven: str = ""
    """The first loader of which the ranks have different numbers of batches, in words."""

    def is_new_on_disk(self, arenas: Path | None) -> bool:
        """Whether this rank's state was composed from a donor's file on disk and its own small state: no file has it
        as a whole."""
        found = self.resumed
        if found is None or found.own is None or found.plan.resharded:
            return False
        return arenas is None or not found.path.is_relative_to(arenas)

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
    collector: Collector,
    targets: Mapping[str, Any],
    saver: Saver,
    resume: str | Path,
    around: Connections,
    unmanaged: Unmanaged,
    ddp: DdpModules,
    look_in: Sequence[Path],
    entry: Entry | None = None,
) -> Start:
    """Plan, load, and write the plan files. Main thread, all ranks together. `entry`: after a recovery in place, what
    the ranks have agreed to go on from; no files are looked for then. `look_in`: the directories that may hold files of
    the job: more than `directories` where the ranks have different ones.

    Raises NoUsableCheckpointError when there are checkpoints and none can be used; MismatchError when they do not fit,
    come from another job, or from a world size that cannot be spread over this one; and what `places_of` and
    `Collector.load` raise.
    """
    began = time.perf_counter()
    ranks, exchange, events = saver.ranks, around.exchange, saver.events
    had_strategy = (directories[0] / STRATEGY_FILE).exists()  # before any rank can have written one now
    places = places_of(look_in, resume if entry is None else "never", arenas=around.arenas, trust=saver.trust)

    disks, faults, group_info = Disks(places), FaultsPart(), GroupInfoPart(ranks)
    peers = PeersPart(ranks)
    lengths = LoaderLengthsPart(targets)
    meet(exchange, "here", [disks, faults, group_info, peers, lengths, *around.parts()])
    around.connect()

    layouts = JobLayouts(
        exchange,
        own_target(collector, ranks),
        collector.layouts.set_job_layouts,
        publish=lambda: group_info.is_wanted_somewhere,
    )
    plan: PlanPart | ReentryPart
    if entry is None:
        plan = plan_of(
            exchange, ranks, places, disks, transport=around.mirror, target=layouts.target, faults=faults.known
        )
    else:
        plan = ReentryPart(entry, ranks, around.arenas, saver.trust, collector.module_names)
    first_saves = FirstSavesPart(saver, directories[0])
    meet(exchange, "plan", [layouts, *around.later_parts(), first_saves, plan])
    around.greet()
    found = read_together(exchange, plan)

    if found is not None and resume == "auto" and entry is None:
        _refuse_another_job(found, saver.names)
    around.is_guest = around.evaluates or _is_guest(targets, found, had_strategy)
    around.announce(found)  # before anything is loaded: loading may be what kills the process
    events.run_id, events.attempt = plan.run_id, plan.attempt
    saver.coordinates["generation"] = plan.generation
    flags = AnsweredFlagsPart(saver.flags)
    restore = None
    known = unmanaged.notes
    if found is None:
        logger.info("fresh start in %s", directories[0])
        collector.copy(Position())
        events.emit("start", step=0, outcome="fresh")
    else:
        flags.own = found.checkpoint.info.flags
        if entry is None:
            replay_orders(found, ddp, unmanaged)
        tail = TailSide(found)
        meet(exchange, "tail", [tail])
        restore = load(found, collector, ranks, unmanaged, tail=tail, with_flags=not around.is_guest)
    meet(exchange, "loaded", [flags])
    if found is not None:
        _tell(found, saver, began, entry, [note for note in unmanaged.notes if note not in known])
    watch = PeerWatch(peers.identities, rank=ranks.rank)
    keeps = not around.is_guest if entry is None else found is not None and not saver.replicated
    first_save = _keep_first_save(directories[0], plan.run_id, found, saver, first_saves) if keeps else None
    if entry is None and not around.is_guest:  # in a recovery in place the files are as the first start has left them
        if ranks.rank == 0:
            assert layouts.target.strategy is not None
            _write_plan(directories[0], layouts.target.strategy, None if found is None else found.plan)
        group_info.write(layouts)
    report = faults.known.report
    return Start(plan.run_id, plan.attempt, found, watch, restore, report, first_save, lengths.uneven)


def _tell(found: Resumed, saver: Saver, began: float, entry: Entry | None, notes: Sequence[str]) -> None:
    """Write to the log and the event log from where the run continues. `notes`: what loading has shown against an exact
    resume, on this rank."""
    info = found.checkpoint.info
    where = f"step {info.step} (epoch {info.epoch}, step {info.step_in_epoch})"
    if entry is None:
        logger.info("resumed from %s: %s, saved because of %s", found.path, where, info.reason)
    elif saver.ranks.rank == entry.verdict.donor:
        dead = f"rank{'s' * (len(entry.verdict.dead) > 1)} {', '.join(map(str, entry.verdict.dead))}"
        logger.info("%s replaced, the others live on: going on from %s", dead, where)
    if saver.ranks.rank == 0 and found.plan.resharded:
        logger.warning("not bit for bit the uninterrupted run: %s", "; ".join(found.plan.inexact))
    of_files = found.plan.unmanaged if saver.ranks.rank == 0 else ()
    if of_files:
        logger.warning("not bit for bit the uninterrupted run, according to its files: %s", "; ".join(of_files))
    doubts = list(dict.fromkeys([*found.plan.unmanaged, *notes]))
    saver.events.emit(
        "resume",
        step=info.step,
        reason=info.reason,
        duration_s=time.perf_counter() - began,
        outcome="resumed" if entry is None else "in place",
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
            'same, or resume="never" to start anew',
            path=found.path,
        )


def _is_guest(targets: Mapping[str, Any], found: Resumed | None, had_strategy: bool) -> bool:
    """Whether this guard does not train, but evaluates or inspects the weights in a training's directory.

    It has no optimizer, and the training had objects that it has not. A program that updates the weights by hand has no
    optimizer either; but it resumes from a state with the same objects, or from an empty directory.
    """
    if any(isinstance(t, torch.optim.Optimizer) or name.startswith("optimizer") for name, t in targets.items()):
        return False
    if found is None:  # a training that was killed before its first file may have its steps in memory
        return had_strategy
    return any(name not in targets and name not in RESERVED_NAMES for name in found.checkpoint.state)


# --- what the ranks tell each other ---


class FaultsPart(Part):
    """The platform's fault report, made the same on every rank: two nodes may see different versions of the file. A
    report that cannot be used is logged and ignored."""

    name = "faults"

    def __init__(self) -> None:
        self._own = _read_faults()
        self.known = KnownFaults()

    def say(self) -> Any:
        return [sorted(self._own.ranks), self._own.created]

    def merge(self, said: Sequence[Any]) -> Merged:
        created = [float(stamp) for named, stamp in said if named and stamp is not None]
        return Merged([sorted({int(rank) for named, _ in said for rank in named}), max(created, default=None)])

    def hear(self, answer: Answer) -> None:
        named, created = answer.common
        self.known = KnownFaults.of({int(rank) for rank in named}, None if created is None else float(created))


class PeersPart(Part):
    """The processes of the ranks on this machine, so that the guard can notice their deaths."""

    name = "peers"

    def __init__(self, ranks: RankInfo, identity: str | None = None) -> None:
        """`identity`: of this process; default: its own."""
        self._rank, self._own = ranks.rank, identity or own_identity(RejoinSettings.from_env().watched)
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


class LoaderLengthsPart(Part):
    """Whether the ranks' loaders have equally many batches in an epoch, as far as the loaders know."""

    name = "loader_lengths"

    def __init__(self, targets: Mapping[str, Any]) -> None:
        followed = {name: target.loader for name, target in targets.items() if isinstance(target, FollowedLoader)}
        self._own = {name: num_batches(loader) for name, loader in followed.items()}
        self.uneven = ""

    def say(self) -> Any:
        return self._own

    def merge(self, said: Sequence[Any]) -> Merged:
        for name in said[0]:
            counts = [int(each.get(name, 0)) for each in said]
            low, high = min(counts), max(counts)
            if 0 < low < high:
                return Merged(
                    f"{name} has {low} batches on rank {counts.index(low)} and {high} on rank {counts.index(high)}"
                )
        return Merged("")

    def hear(self, answer: Answer) -> None:
        self.uneven = str(answer.common)


class GroupInfoPart(Part):
    """Where each rank writes its group info file, if ``GROUP_INFO_FILE`` asks for one. Ranks that have the same path
    from their launcher write one file each."""

    name = "group_info"

    def __init__(self, ranks: RankInfo) -> None:
        wanted = os.environ.get("GROUP_INFO_FILE", "").strip()
        self._rank, self._wanted, self._is_shared = ranks.rank, wanted, False
        self.is_wanted_somewhere = False
        """On rank 0: some rank writes one."""

    def say(self) -> Any:
        return os.path.abspath(self._wanted) if self._wanted else ""

    def merge(self, said: Sequence[Any]) -> Merged:
        counts = Counter(map(str, said))
        self.is_wanted_somewhere = any(said)
        return Merged(None, [bool(path) and counts[path] > 1 for path in said])

    def hear(self, answer: Answer) -> None:
        self._is_shared = bool(answer.own)

    def write(self, layouts: JobLayouts) -> None:
        """Write this rank's file. A failure is only logged: training does not depend on it."""
        if not self._wanted:
            return
        path = Path(self._wanted)
        if self._is_shared:
            path = path.parent / f"rank_{self._rank}" / path.name
        try:
            from mindx_elastic.platforms.group_info import write_group_info_file

            write_group_info_file(layouts.whole_strategy(), self._rank, path)
        except (MindxError, OSError, ImportError) as error:
            logger.warning("GROUP_INFO_FILE=%s cannot be written: %s", path, error)


class FirstSavesPart(Part):
    """The runs of which every rank still has the note that it has never saved (see `persist.first_save`)."""

    name = "first_saves"

    def __init__(self, saver: Saver, directory: Path) -> None:
        self._own = sorted({note.run_id for note in notes_in(saver.folder(directory))})
        self.runs: frozenset[str] = frozenset()

    def say(self) -> Any:
        return self._own

    def merge(self, said: Sequence[Any]) -> Merged:
        return Merged(sorted(set.intersection(*({str(run) for run in each} for each in said))))

    def hear(self, answer: Answer) -> None:
        self.runs = frozenset(map(str, answer.common))


class AnsweredFlagsPart(Part):
    """The flags that have stopped the job before, according to the checkpoints of all ranks."""

    name = "flags"

    def __init__(self, flags: AnsweredFlags) -> None:
        self._flags = flags
        self.own: Sequence[str] = ()
        """The flags in this rank's file."""

    def say(self) -> Any:
        return list(self.own)

    def merge(self, said: Sequence[Any]) -> Merged:
        return Merged(list(dict.fromkeys(str(flag) for each in said for flag in each)))

    def hear(self, answer: Answer) -> None:
        self._flags.take_over([str(flag) for flag in answer.common])


def _read_faults() -> Faults:
    found = Faults.none()
    for source in default_fault_sources(FaultPaths.from_env()):
        try:
            found = merge(found, read_faults(source, world_size=None, nodes=default_node_map()))
        except MindxError as error:
            logger.warning("%s; the plan for this start is made without it", error)
    return found


# --- what is left in the directory ---


def _keep_first_save(
    directory: Path, run_id: str, found: Resumed | None, saver: Saver, first_saves: FirstSavesPart
) -> FirstSave | None:
    """Write the note that this rank has never saved in this run, if that is true (see `persist.first_save`).

    A run that resumes from files has had a complete step. A run that resumes from memory alone has none on disk, and
    keeps its notes while each rank finds its own: after a move, or at another world size, nothing would keep the notes
    up to date.
    """
    ranks = saver.ranks
    first_save = FirstSave(saver.folder(directory), run_id)
    if found is None:
        if ranks.world_size > 1 and not saver.replicated:  # else one file is a whole step
            try:
                first_save.begin(ranks.rank, ranks.world_size)
                return first_save
            except OSError as error:
                logger.warning("%s: %s; a power cut in the first save will need a hand", first_save.path, error)
        return None
    same_world = found.plan.source.world_size == ranks.world_size > 1
    if found.only_in_memory and same_world and not saver.replicated and run_id in first_saves.runs:
        return first_save
    for note in list(find_notes(directory)):
        if note.run_id == run_id:
            try:
                FirstSave(note.path.parent, note.run_id).withdraw()
            except OSError as error:
                logger.warning("%s cannot be removed: %s", note.path, error)
    return None


def _write_plan(directory: Path, strategy: Strategy, plan: ResumePlan | None) -> None:
    """Rank 0: write the strategy and the plan, for people and platforms. A failure is only logged: training does not
    depend on these files."""
    # Only the rank that writes them pays for importing protobuf.
    try:
        from mindx_elastic.platforms.plan_files import PLAN_JSON, PLAN_PB, write_plan
        from mindx_elastic.platforms.strategy_file import save_strategy

        for name in (PLAN_JSON, PLAN_PB):  # a start script must not take the plan of an earlier start for this one's
            (directory / name).unlink(missing_ok=True)
        save_strategy(directory / STRATEGY_FILE, strategy)
        if plan is not None:
            write_plan(directory, plan)
    except (MindxError, OSError, ImportError) as error:
        logger.warning("the strategy and the plan cannot be written to %s: %s", directory, error)
