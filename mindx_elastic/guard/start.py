"""Starts a guard: the ranks meet, choose what to resume from, load it into the live objects, and record the plan.

The meetings (see `agreement.gather`); each of their topics is a `Part`:

=========  ===================================================================================================
here       the machine and disk of each rank; whole shapes of by-hand layouts; the fault report; settings that
           must be equal
plan       layouts of all tensors, and what each rank has found; the answer is the plan (see `resume.restore`)
read       each rank has read its share; once more for every damaged file
loaded     the state is in the live objects, on every rank; which calls torch.compile had compiled
entered    every rank is ready to train
=========  ===================================================================================================

The state is loaded in this order: DDP's bucket layout (a synthetic backward), the state, the random generators last.
The generators are restored once more when the loop reaches the resumed place (see `guard.loops`), because creating an
iterator, and the program's own code before the first batch, may draw numbers.
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
import xxhash

from mindx_elastic.agreement.gather import Answer, Merged, Part, meet
from mindx_elastic.alarm.peers import PeerWatch, own_identity, space_of
from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.loop_head import LoopHead
from mindx_elastic.capture.rng import restore_rng, seed_rng
from mindx_elastic.config import FaultPaths, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import listed
from mindx_elastic.core.reserved_names import RESERVED_NAMES
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.data.position import num_batches
from mindx_elastic.errors import MindxError, MismatchError
from mindx_elastic.guard.compilation import CompiledPart, restore_compiled
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.donated import state_of
from mindx_elastic.guard.job_layouts import JobLayouts, WholeShapes, own_target
from mindx_elastic.guard.loops.loaders import FollowedLoader
from mindx_elastic.guard.policy import is_another_job
from mindx_elastic.guard.reentry import ReentryPart
from mindx_elastic.guard.replicas import DdpModules, ddp_modules
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.first_save import FirstSave, find_notes, notes_in
from mindx_elastic.persist.format import CheckpointInfo
from mindx_elastic.persist.reader import map_checkpoint
from mindx_elastic.plan.facts import KnownFaults, ResumePlan
from mindx_elastic.platforms.faults import Faults, default_fault_sources, merge, read_faults
from mindx_elastic.platforms.flag_file import AnsweredFlags
from mindx_elastic.platforms.nodes import default_node_map
from mindx_elastic.rejoin.member import Entry
from mindx_elastic.resume.ddp_warmup import replay_gradient_order
from mindx_elastic.resume.restore import Disks, PlanPart, Resumed, places_of, plan_of, read_together

__all__ = [
    "STRATEGY_FILE",
    "AnsweredFlagsPart",
    "FaultsPart",
    "FirstSavesPart",
    "GroupInfoPart",
    "LoaderLengthsPart",
    "PeersPart",
    "Start",
    "is_guest",
    "load",
    "start_job",
    "tell",
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
    ddp: DdpModules | None = None,
    entry: Entry | None = None,
    look_in: Sequence[Path] | None = None,
) -> Start:
    """Plan, load, and write the plan files. Main thread, all ranks together. `entry`: after a recovery in place, what
    the ranks have agreed to go on from; no files are looked for then. `look_in`: the directories that may hold files of
    the job, where the ranks have different ones; default `directories`.

    Raises NoUsableCheckpointError when there are checkpoints and none can be used; MismatchError when they do not fit,
    come from another job, or from a world size that cannot be spread over this one; and what `places_of` and
    `Collector.load` raise.
    """
    began = time.perf_counter()
    ranks, exchange, events = saver.ranks, around.exchange, saver.events
    had_strategy = (directories[0] / STRATEGY_FILE).exists()  # before any rank can have written one now
    folders, resume_from = look_in or directories, resume if entry is None else "never"
    places = places_of(folders, resume_from, arenas=around.arenas, trust=saver.trust)

    disks, faults, group_info = Disks(places), FaultsPart(), GroupInfoPart(ranks)
    peers = PeersPart(ranks)
    lengths = LoaderLengthsPart(targets)
    meet(exchange, "here", [disks, WholeShapes(collector), faults, group_info, peers, lengths, *around.parts()])
    around.connect()
    if faults.known.report:
        saver.coordinates["fault_report"] = faults.known.report

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
    around.is_guest = around.evaluates or is_guest(targets, found, had_strategy)
    around.announce(found)  # before anything is loaded: loading may be what kills the process
    events.run_id, events.attempt = plan.run_id, plan.attempt
    flags = AnsweredFlagsPart(saver.flags)
    collector.compiled.only_names, kept, restore = collector.is_sharded, b"", None
    known = unmanaged.notes
    if found is None:
        logger.info("fresh start in %s", directories[0])
        collector.copy(Position())
        events.emit("start", step=0, outcome="fresh")
    else:
        flags.own = found.checkpoint.info.flags
        modules = ddp_modules(targets) if ddp is None else ddp
        if entry is None:
            _replay_orders(found, modules, unmanaged)
        kept, restore = load(found, collector, ranks, unmanaged, with_flags=not around.is_guest)
    compiled = CompiledPart(kept)
    meet(exchange, "loaded", [flags, compiled])
    restore_compiled(targets, collector, kept, compiled.runs, unmanaged)
    if found is not None:
        tell(found, saver, began, entry, [note for note in unmanaged.notes if note not in known])
        saver.began_from(found.checkpoint.info)
    watch = PeerWatch(peers.identities, rank=ranks.rank)
    if entry is not None and found is not None and not saver.replicated:
        _keep_first_save(directories[0], plan.run_id, found, saver, first_saves)
    if entry is not None:  # the other files in the directory are as the first start has left them
        return Start(plan.run_id, plan.attempt, found, watch, restore, lengths.uneven)
    if not around.is_guest:
        _keep_first_save(directories[0], plan.run_id, found, saver, first_saves)
    if ranks.rank == 0 and not around.is_guest:
        assert layouts.target.strategy is not None
        _write_plan(directories[0], layouts.target.strategy, None if found is None else found.plan)
    if not around.is_guest:
        group_info.write(layouts)
    return Start(plan.run_id, plan.attempt, found, watch, restore, lengths.uneven)


def tell(found: Resumed, saver: Saver, began: float, entry: Entry | None, notes: Sequence[str]) -> None:
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
    if saver.ranks.rank == 0 and found.plan.unmanaged:
        notes = "; ".join(found.plan.unmanaged)
        logger.warning("not bit for bit the uninterrupted run, according to its files: %s", notes)
    doubts = list(dict.fromkeys([*found.plan.unmanaged, *notes]))
    saver.events.emit(
        "resume",
        step=info.step,
        reason=info.reason,
        duration_s=time.perf_counter() - began,
        outcome="resumed" if entry is None else "in place",
        path=str(found.path),
        rejected=list(found.rejected),
        exact=found.plan.exact and not doubts,
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


def _replay_orders(found: Resumed, ddp: DdpModules, unmanaged: Unmanaged) -> None:
    """Let DDP lay out its buckets as it had. All ranks together."""
    for name, module in ddp:
        problem = replay_gradient_order(module, found.checkpoint.state["gradient_order"].get(name, []))
        if problem is not None and module.process_group.size() > 2:  # a sum of two is the same in any order
            unmanaged.risk(
                f"{name}: the order in which DDP adds gradients could not be restored, so the resumed run may differ "
                f"in the last bits from 3 ranks on: {problem}",
                "Give the model the same trained parameters as the run that wrote the checkpoint, and wrap it in DDP "
                "before the guard is entered",
            )


def load(
    found: Resumed,
    collector: Collector,
    ranks: RankInfo,
    unmanaged: Unmanaged,
    *,
    with_flags: bool,
) -> tuple[bytes, Callable[[], None]]:
    """Returns the calls that torch.compile had compiled (empty where they do not count), and what puts everything back
    as it was at the boundary, before the first batch (see `capture.loop_head`).

    with_flags: also the modules' modes. A guard that only evaluates keeps those that its program has set.
    """
    state = state_of(found, collector, ranks.rank, unmanaged)
    if found.plan.resharded:
        state, left_out = collector.without_parts(state)
        if left_out:
            unmanaged.risk(
                f"the checkpoint was written by {found.plan.source.world_size} ranks, and it keeps no layout for "
                f"{listed(left_out, 5)}: they begin as the program builds them",
                "Resume once with as many ranks as before, where they count",
            )
    for note in collector.load(state, live=found.is_live):
        logger.warning("%s", note)
    restore_streams = _how_to_restore_rng(found, state["rng"], ranks, unmanaged)
    _tell_of_device_buffers(found, collector, ranks, unmanaged)
    if with_flags:
        _say_flags(collector.load_flags(state))
    head, saved, step = LoopHead(collector.components), [state], found.checkpoint.info.step

    def put_back() -> None:
        touched = head.touched() if saved else []
        if touched and found.is_live:  # the weights that code has changed are all that this process had
            saved[:] = [collector.with_weights_of(state, map_checkpoint(found.path).state)]
        for each in saved:  # until the first boundary of the process
            _put_back(each, touched, head, collector, step, with_flags=with_flags)
        restore_streams()

    def end() -> None:
        head.end()
        saved.clear()  # the memory of a whole checkpoint

    restore_streams()
    collector.at_first_boundary = end
    collector.copy(collector.position)
    return b"" if found.plan.resharded else bytes(state.get("compiled_calls", b"")), put_back


def _put_back(
    state: Mapping[str, Any],
    touched: Sequence[str],
    head: LoopHead,
    collector: Collector,
    step: int,
    *,
    with_flags: bool,
) -> None:
    """Objects, named generators and flags as at the boundary `step`, where code has changed them since the start."""
    if touched:
        collector.load_again(state, touched)
        head.begin()
        logger.info(
            "put back as at step %d: %s; code has changed it before the first batch (the head of the loop runs again "
            "in a resumed epoch)",
            step,
            listed(touched, 5),
        )
    collector.load_streams(state)
    if with_flags:  # `model.train()` at the loop's head
        collector.load_flags(state)


def _say_flags(changed: Mapping[str, Sequence[str]]) -> None:
    """One line on flags that the program begins with and the boundary had otherwise."""
    words = {"training": "in training mode", "eval": "in evaluation mode", "trainable": "trained", "frozen": "frozen"}
    told = [f"{words[key]}: {listed(list(places), 3)}" for key, places in changed.items()]
    if told:
        logger.info("other than the program begins, and as at that step: %s", "; ".join(told))


def _how_to_restore_rng(
    found: Resumed, rng: dict[str, Any], ranks: RankInfo, unmanaged: Unmanaged
) -> Callable[[], None]:
    info = found.checkpoint.info
    if found.donor is None:
        return lambda: restore_rng(rng)
    if found.plan.resharded:
        return _new_numbers(info, ranks)
    if found.own is not None:
        kept = "from memory" if found.own_from is None else f"from {found.own_from}"
        logger.info(
            "rank %d has no file of step %d: weights, optimizer and position come from rank %d, its random numbers and "
            "CPU buffers %s",
            ranks.rank,
            info.step,
            found.donor,
            "are foreseen from its last forward" if found.own.forecast else kept,
        )
        return lambda: restore_rng(rng)
    unmanaged.risk(
        f"rank {ranks.rank} has no file of step {info.step} and takes rank {found.donor}'s: weights, optimizer and "
        "position are the same; its random numbers begin anew, so from here the run is not bit for bit the "
        "uninterrupted one",
        "Shared memory (MINDX_ARENA_DIR) keeps them for a killed rank, where nothing is drawn behind the forward",
    )
    return _new_numbers(info, ranks)


def _tell_of_device_buffers(found: Resumed, collector: Collector, ranks: RankInfo, unmanaged: Unmanaged) -> None:
    """A killed rank's small state comes from memory, but perhaps not what was on its device."""
    if found.own is None or found.donor is None or found.plan.resharded:
        return
    known = {f"{name}.{place}" for name, own in found.own.unpack().get("on_device", {}).items() for place in own}
    if names := [name for name in collector.buffers_of_this_rank(leads=ranks.rank == 0) if name not in known]:
        unmanaged.risk(
            f"rank {ranks.rank} was killed, and its buffers on a device with it ({listed(names, 3)}): it goes on with "
            f"rank {found.donor}'s, so from here the run is not bit for bit the uninterrupted one",
            "--snapshot-every 1 keeps them for all ranks; torch.nn.SyncBatchNorm has the same on each rank",
        )


def _new_numbers(info: CheckpointInfo, ranks: RankInfo) -> Callable[[], None]:
    # Not the donor's: two ranks would draw the same dropout masks.
    seed = xxhash.xxh3_64_intdigest(f"{info.run_id}/{info.step}/{ranks.rank}".encode()) >> 1
    return lambda: seed_rng(seed)


def is_guest(targets: Mapping[str, Any], found: Resumed | None, had_strategy: bool) -> bool:
    """Whether this guard does not train, but evaluates or inspects the weights in a training's directory.

    It has no optimizer, and the training had objects that it has not. A program that updates the weights by hand has no
    optimizer either; but it resumes from a state with the same objects, or from an empty directory.
    """
    if any(isinstance(t, torch.optim.Optimizer) or name.startswith("optimizer") for name, t in targets.items()):
        return False
    if found is None:
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
) -> None:
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
                saver.first_save = first_save
            except OSError as error:
                logger.warning("%s: %s; a power cut in the first save will need a hand", first_save.path, error)
        return
    same_world = found.plan.source.world_size == ranks.world_size > 1
    if found.only_in_memory and same_world and not saver.replicated and run_id in first_saves.runs:
        saver.first_save = first_save
        return
    for note in list(find_notes(directory)):
        if note.run_id == run_id:
            try:
                FirstSave(note.path.parent, note.run_id).withdraw()
            except OSError as error:
                logger.warning("%s cannot be removed: %s", note.path, error)


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
