"""A guard that is entered again in the same process, after a recovery in place: what it takes in place of files.

A survivor of the boundary's step takes its own state, which is in its objects already; what changes within a step
(generators, buffers, positions) is put back from the copy of the boundary. A rank that lacks the state takes the
donor's snapshot from shared memory and its own small state from its ring, as a rank does that was killed and is
restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mindx_elastic.agreement.gather import Answer, Merged
from mindx_elastic.cluster.group import current_member
from mindx_elastic.cluster.rejoin import ClusterMember, cluster_problem
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Trust
from mindx_elastic.core.status_page import WorkerPhase
from mindx_elastic.core.strategy import Strategy
from mindx_elastic.errors import CorruptCheckpointError, GracefulExit, MismatchError, UnmanagedStateError
from mindx_elastic.guard.connections import Connections
from mindx_elastic.guard.replicas import ddp_modules
from mindx_elastic.guard.saver import Saver
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.memory.memory_files import SmallRecord, own_rings, own_states, small_records
from mindx_elastic.persist.reader import Checkpoint, read_checkpoint
from mindx_elastic.plan.facts import ResumePlan, World
from mindx_elastic.platforms.launchers import current_ranks
from mindx_elastic.rejoin import groups
from mindx_elastic.rejoin.member import Entry, Host, LeavesToRejoin, Member, RejoinFailed
from mindx_elastic.rejoin.protocol import Report
from mindx_elastic.resume.restore import FollowedPart, Resumed

if TYPE_CHECKING:
    from mindx_elastic.guard.guard import Guard

__all__ = ["ReentryPart", "find_member", "host_of", "run_in_place"]

_T = TypeVar("_T")
_members: list[Member] = []
_told: set[str] = set()


def find_member(ranks: RankInfo, *, is_first: bool) -> Member | None:
    """The process's member for a guard that is about to be entered by `Guard.run`; None: a death restarts the job.

    is_first: no guard of this process has been entered before. A new process could not pass earlier ones.
    """
    settings, agent = RejoinSettings.from_env(), AgentInfo.from_env()
    link = current_member() if agent is None else None
    if not settings.in_place or (agent is None and link is None) or ranks.world_size == 1:
        return None
    if _members:
        return _members[0]
    reason = "" if is_first else "this is not the process's first guard"
    reason = reason or groups.problem()
    if reason:
        if settings.generation:
            raise MismatchError(f"this process cannot take a dead rank's place: {reason}")
        tell_once(ranks, f"{reason}: when a rank dies, the whole job is restarted")
        return None
    if link is not None:
        if why_not := cluster_problem(link):
            tell_once(ranks, f"{why_not}: when a rank dies, every process begins anew in place")
            return None
        _members.append(ClusterMember(settings, ranks, link))
    else:
        assert agent is not None
        _members.append(Member(settings, ranks, agent))
    return _members[0]


def tell_once(ranks: RankInfo, text: str) -> None:
    """One line a job: why there is no recovery in place."""
    if ranks.rank == 0 and text not in _told:
        _told.add(text)
        logger.warning("--recover in-place: %s", text)


class ReentryPart(FollowedPart):
    """Stands in for the plan of a start (`resume.restore.PlanPart`): what to go on from is agreed on already."""

    name = "plan"

    def __init__(self, entry: Entry, ranks: RankInfo, arenas: Path | None, trust: Trust) -> None:
        verdict = entry.verdict
        self._entry, self._ranks, self._arenas, self._trust = entry, ranks, arenas, trust
        self.run_id, self.attempt = verdict.run_id, verdict.attempt + 1

    def say(self) -> Any:
        return [self._entry.generation, self.run_id, self.attempt, self._entry.verdict.step]

    def merge(self, said: Sequence[Any]) -> Merged:
        if any(each != said[0] for each in said):
            raise MismatchError(f"the ranks go on from different boundaries: {sorted(map(str, said))}")
        return Merged(None)

    def hear(self, answer: Answer) -> None:
        pass

    def follow(self) -> None:
        """Get the state of this rank together. Raises CorruptCheckpointError."""
        entry, verdict = self._entry, self._entry.verdict
        if entry.live is not None:
            self.resumed = replace(self._resumed(Checkpoint(entry.info, dict(entry.live), {})), is_live=True)
            return
        if self._arenas is None or not entry.path.is_relative_to(self._arenas):
            raise CorruptCheckpointError(f"{entry.path} is not in the job's shared memory", path=entry.path)
        checkpoint = read_checkpoint(entry.path, verify=True, owners=self._trust.of(entry.path))
        moment = (verdict.run_id, verdict.attempt, verdict.step)
        if checkpoint.info.moment != moment or checkpoint.info.rank != verdict.donor:
            raise CorruptCheckpointError(f"{entry.path} holds another boundary than the donor's", path=entry.path)
        found = replace(self._resumed(checkpoint), donor=verdict.donor)
        foreseen = checkpoint.info.coordinates.get("foreseen")  # of the donor, which has passed the boundary
        confirmed = moment if foreseen == 1 else None
        for ring in own_rings((), self._arenas, self._ranks.rank):
            own = own_states(ring, self._trust.of(ring), confirmed=confirmed).get(moment)
            found = replace(found, own=None if own is not None and own.forecast and foreseen == 0 else own)
        if found.own is None or found.own.forecast:
            found = replace(
                found,
                own_records=self._records(self._ranks.rank, moment, confirmed),
                donor_records=self._records(verdict.donor, moment, confirmed),
            )
        self.resumed = found

    def _resumed(self, checkpoint: Checkpoint) -> Resumed:
        info = checkpoint.info
        world = self._ranks.world_size
        plan = ResumePlan(
            moment=info.moment,
            epoch=info.epoch,
            step_in_epoch=info.step_in_epoch,
            source=Strategy(world, ()),
            world=World(world, None),
            ranks=(),
            files={},
            resharded=False,
            unmanaged=tuple(info.unmanaged),
        )
        return Resumed(self._entry.path, checkpoint, plan, only_in_memory=True, next_attempt=self.attempt)

    def _records(self, rank: int, moment: Moment, confirmed: Moment | None) -> list[SmallRecord]:
        rings = own_rings((), self._arenas, rank)
        found = [each for ring in rings for each in small_records(ring, self._trust.of(ring), confirmed=confirmed)]
        return [record for record in found if record.moment[0] == moment[0] and record.moment <= moment]


# --- running ---


def run_in_place(guard: Guard, train: Callable[[], _T], targets: Mapping[str, Any], *, is_first: bool) -> _T:
    """See `Guard.run`. `targets`: what the guard keeps. `is_first`: see `find_member`."""
    member = find_member(current_ranks(RankInfo.from_env()), is_first=is_first)
    if member is None:
        with guard:
            return train()
    entry = _join(targets, member) if member.is_joiner and not member.has_entered else None
    try:
        return _run(guard, member, train, entry)
    finally:
        member.closed()


def _run(guard: Guard, member: Member, train: Callable[[], _T], entry: Entry | None) -> _T:
    while True:
        guard.take_part(member, entry)
        with guard:
            member.has_entered = True
            member.page.set(in_place=1, generation=member.generation)
            if entry is not None:
                member.entered()
            try:
                result = train()
            except BaseException as error:
                if not _comes_out(guard, member, error):
                    raise
                cause: BaseException | None = error
            else:
                if not member.wants_out:
                    return result
                cause = None  # the program has caught what took it out
            entry = _leave(guard, member, cause)
            cause = None  # and with it the frames of the program's loop, its iterators, their workers


def _join(targets: Mapping[str, Any], member: Member) -> Entry:
    try:
        return member.join(ddp_modules(targets))
    except RejoinFailed as error:
        member.refuse(member.generation, str(error))
        raise MismatchError(f"this process cannot take a dead rank's place: {error}") from None


def _comes_out(guard: Guard, member: Member, error: BaseException) -> bool:
    """Whether `error` has left the program's loop because another rank has died."""
    if isinstance(error, (LeavesToRejoin, GracefulExit, UnmanagedStateError)):
        return isinstance(error, LeavesToRejoin)
    if member.wants_out:
        return isinstance(error, Exception)
    if not isinstance(error, RuntimeError):
        return False
    return bool(guard.stopper.peers_gone_soon(error)) and member.comes_out_soon()


def _leave(guard: Guard, member: Member, cause: BaseException | None) -> Entry:
    """Get out of the guard, to enter it again. Raises GracefulExit where that is not possible: the rank has saved."""
    page = member.page
    page.set(phase=WorkerPhase.BETWEEN)
    try:
        entry = member.leave()
    except RejoinFailed as error:
        logger.warning("no recovery in place: %s; the job is restarted", error)
        guard.stopper.stop_for_death()
        raise guard.stopper.exit() from cause
    guard.leave_to_reenter()
    return entry


def _problem(saver: Saver) -> str:
    """Why the ranks cannot go on in place from one boundary; empty: they can."""
    if not saver.replicated:
        return "the ranks hold different parts of the state"
    if saver.collector.compiled.kept:
        return "torch.compile has compiled part of the training, and only a restart compiles it the same again"
    return ""


def host_of(stopper: Stopper, around: Connections, ranks: RankInfo, ddp: groups.DdpModules) -> Host:
    """What the member needs of an open guard."""
    saver, collector = stopper.saver, stopper.saver.collector

    def report() -> Report:
        stopper.update_gate.give_up()
        with stopper.update_gate.hold(0.0) as problem:
            return Report(
                rank=ranks.rank,
                run_id=saver.events.run_id,
                attempt=saver.events.attempt,
                step=collector.position.step,
                clean=problem is None,
                groups=groups.digest(),
                orders=collector.gradient_order,
                problem=_problem(saver),
            )

    def donate() -> Path:
        path = None if around.memory is None else around.memory.donate()
        if path is None:
            raise RejoinFailed("the donor's state does not fit into shared memory")
        return path

    def open_gate() -> None:
        stopper.step_gate.close()
        stopper.step_gate.open_until(0)

    return Host(
        report=report,
        live=lambda: (collector.state(), saver.describe("snapshot")),
        donate=donate,
        is_stopping=lambda: stopper.alarm is not None,
        peers_gone_soon=lambda: bool(stopper.peers_gone_soon(RuntimeError())),
        call_soon=lambda seconds, work: stopper.watcher.call_at(time.monotonic() + seconds, work),
        open_gate=open_gate,
        ddp=ddp,
    )
