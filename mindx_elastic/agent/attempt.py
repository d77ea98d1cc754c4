"""One attempt, from the moment its workers run until the last of them has ended.

The main thread sleeps until something happens: a worker ends (pidfd), the agent gets a signal, a node comes or is lost,
a timer is due. Twice a second it looks at the pages (hangs, first steps) and at the platform's files.

How workers are stopped depends on whether they have a guard:

* without one, as torchrun does it: SIGTERM, and SIGKILL at the end of the grace period;
* with one, a failure is told to them as an order (they save their last boundary and leave by themselves), a stop as the
  signal itself. A worker that has not begun to stop after half the grace period gets a SIGTERM, at its end a SIGKILL.

Signals go to the trainer processes alone, SIGKILL to all that is left of them.

A rank that has left its guard and does not end is waited for, as by torchrun: it may work for long on an export.
"""

from __future__ import annotations

import heapq
import itertools
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mindx_elastic.agent.endings import Ending, Meaning, StopKind, conclude, describe, meaning
from mindx_elastic.agent.hang import HangWatch, Stuck, is_between_steps
from mindx_elastic.agent.inbox import SignalInbox
from mindx_elastic.agent.nodes import Membership
from mindx_elastic.agent.recovery import LOOK_S, Recovery
from mindx_elastic.agent.slow import SlowWatch
from mindx_elastic.agent.stop_files import StopFiles
from mindx_elastic.agent.workers import WorkerExit, Workers, process_state, write_stacks
from mindx_elastic.alarm.alarm import signal_name
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.core.events import EventLog, logger
from mindx_elastic.core.pace import paces_of, slow_ranks
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.memory.agent_folder import AgentFolder
from mindx_elastic.platforms.fault_watch import FaultEvent
from mindx_elastic.rejoin.protocol import Phase

__all__ = ["Attempt", "AttemptContext"]

_LOOK_S = 0.5
_LEAVE_TOO_S = 3.0  # how long a guarded rank may take to hear by itself that another one leaves
_NEWS_S = 1.0  # in which a rank hears by itself of a failure for which another node waits already
_STOPS_S = 0.2  # between two looks whether a rank that stops has ended
_STUCK_S = 5.0  # how long a stuck rank may take to save by itself, which its watcher thread often can
_NODE_PATIENCE_S = 10.0  # a node's agent may end a moment before our workers hear of the stop
_LEAVING_S = 3.0  # how long a rank that has saved may take to exit after the grace period
_UNKILLABLE_S = 15.0
_SAMPLES = 5  # of a slow rank's stacks, one a look: it is somewhere else in each
_MOST_PACES = 64  # of a node, in a message
_STOPPED = " (stopped, as by SIGSTOP)"


@dataclass(frozen=True, kw_only=True)
class AttemptContext:
    """What an attempt needs besides its workers."""

    folder: AgentFolder
    inbox: SignalInbox
    hang: HangWatch
    slow: SlowWatch
    stop_files: StopFiles
    membership: Membership | None
    """None: there can be no other nodes."""
    events: EventLog
    grace_s: float
    stacks: Path
    on_look: Callable[[Mapping[int, Status]], None]
    """Called twice a second with the pages."""
    recovery: Recovery | None
    """Replaces dead ranks in place; None: nothing does."""


class Attempt:
    """Main thread only. `run` it once."""

    def __init__(self, workers: Workers, context: AttemptContext, *, number: int) -> None:
        self.workers, self._context, self._number = workers, context, number
        self.stop: StopKind | None = None
        self.failed_at: float | None = None
        """`time.monotonic` of the failure, as far as it is known."""
        self.noticed_at: float | None = None
        self.own_failures: list[WorkerExit] = []
        """Of processes that no other one took along. `workers` forgets those that are replaced in place."""
        self.abandoned: list[int] = []
        """Ranks that not even SIGKILL could end."""
        self._signum: int | None = None
        self._num_heard = 0
        self._cause, self._cause_rank = "", -1
        self._otherwise = ""  # the cause of a failure that no known end tells: of a rank that was replaced
        self._deadline: float | None = None
        self._grace_s, self._extends = context.grace_s, False
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._lost_since: float | None = None
        self._waiting_since: float | None = None
        self._woke_at = time.monotonic()
        self._recovery = context.recovery
        self._looks_at_recovery = False
        self._stuck: dict[int, tuple[str, float]] = {}
        """Ranks that were killed because they were stuck, the cause, and since when, where others may live on."""
        self._killed_at = -math.inf  # when the last of them were
        self._samples: dict[int, int] = {}
        """How often the stacks of slow ranks are still to be written."""

    def run(self) -> Ending:
        """Wait for the end of all workers, stopping them where that is called for."""
        self._after(0.0, self._look)
        while self.workers.live or self._waits_for_new_process():
            self._step()
        membership = self._context.membership
        if self.stop is None and self._recovery is not None and self._recovery.has_failed:
            self.stop = StopKind.FAILURE  # all have left before the next look
            self._note_recovery_failure(self._recovery)
        ending = conclude(self.workers.exits, self.stop, signum=self._signum, cause=self._cause, rank=self._cause_rank)
        if self._recovery is not None:
            self._recovery.close(is_stopped=ending.outcome == "stopped")
        if ending.outcome == "failed" and not ending.cause:
            ending = replace(ending, cause=self._otherwise)
        if (
            ending.outcome == "stopped"
            and self.stop is None
            and self._signum is None
            and membership
            and membership.ask().waiting
        ):
            # Another node's agent was faster to stop everybody for the newcomer.
            return Ending(outcome="membership", code=ending.code, cause="nodes have come or come back")
        return ending

    def _waits_for_new_process(self) -> bool:
        """Whether a dead rank is to be replaced, though the others may have died since."""
        return self._recovery is not None and self._recovery.is_active and self._deadline is None

    def _step(self) -> None:
        membership, inbox = self._context.membership, self._context.inbox
        fds = [inbox.fd] if membership is None else [inbox.fd, membership.wakeup.fd]
        found = self.workers.wait(self._timers[0][0] - time.monotonic(), fds)
        self._woke_at = time.monotonic()
        inbox.drain()
        for signum in inbox.heard[self._num_heard :]:
            self._hear_signal(signum)
        self._num_heard = len(inbox.heard)
        for end in found:
            self._hear_end(end)
        if membership is not None:
            self._look_at_nodes(membership)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._ids), action))

    def _after_rank(self, seconds: float, action: Callable[[int], None], rank: int) -> None:
        self._after(seconds, lambda: action(rank))

    def _look(self) -> None:
        self._after(_LOOK_S, self._look)
        statuses = self.workers.statuses()
        if self._recovery is not None:
            self.workers.look_for_early_signs()
        self._context.on_look(statuses)
        if self.stop is not None or self._signum is not None:
            return
        event = self._context.stop_files.poll()
        if event is not None:
            self._hear_fault(event)
            return
        self._look_at_pace(statuses)
        stuck = self._context.hang.observe(statuses, time.monotonic_ns())
        announcement = self._context.hang.announcement
        if announcement:
            logger.info("%s", announcement)
        # A killed process may take its time to end; the others wait for it meanwhile, and do not hang.
        waits = self._stuck and time.monotonic() - self._killed_at <= _UNKILLABLE_S
        if stuck and self._deadline is None and not waits:
            self._hear_hang(stuck, statuses)

    def _look_at_pace(self, statuses: Mapping[int, Status]) -> None:
        """Name the ranks that the others wait for, and write the stacks of those that are ours."""
        context, own = self._context, paces_of(statuses)
        if context.membership is not None:
            context.membership.paces = own[:_MOST_PACES]
        begun, over = context.slow.look(
            slow_ranks(own) if context.membership is None else context.membership.slow, time.monotonic()
        )
        self._samples |= {each.rank: _SAMPLES for each in begun if each.rank in statuses}
        sampled = {rank: statuses[rank] for rank, left in self._samples.items() if left and rank in statuses}
        files = write_stacks(self.workers, sampled, context.stacks, attempt=self._number) if sampled else []
        self._samples = {rank: left - 1 for rank, left in self._samples.items() if left > 1}
        for each in begun:
            logger.warning("%s; its stacks: %s", each, ", ".join(map(str, files)) or "on its node")
            stacks = [str(file) for file in files]
            context.events.emit("slow", reason=str(each), outcome="slow", ranks=[each.rank], stacks=stacks)
        for each in over:
            logger.info("the others wait for rank %d no longer", each.rank)
            context.events.emit("slow", reason=f"not any more: {each}", outcome="over", ranks=[each.rank], stacks=[])

    # --- what can happen ----------------------------------------------------------------------------------------------

    def _hear_signal(self, signum: int) -> None:
        if self._signum is not None:
            logger.warning("%s again; the workers have %.1f s left", signal_name(signum), self._left())
            return
        self._signum = signum
        logger.warning("%s: the job stops; the workers have %.1f s", signal_name(signum), self._left())
        self._context.events.emit("signal", reason=signal_name(signum), outcome="stopping")
        if self.stop is not None or self._deadline is not None:
            return  # they are being stopped already
        self.stop = StopKind.SIGNAL
        self._begin_stop()
        for rank in list(self.workers.live):
            kind = signum
            if not self.workers.is_guarded(rank):
                if self._recovery is not None and self._recovery.is_active:
                    kind = signal.SIGTERM  # a new process holds others until its guard is open
            elif not self.workers.catches(rank, signum):
                kind = signal.SIGTERM  # SIGHUP would kill it without a checkpoint
            self.workers.send(rank, kind)

    def _hear_fault(self, event: FaultEvent) -> None:
        if event.grace_s is not None and self._deadline is None:
            self._grace_s, self._extends = event.grace_s, True
        logger.warning("%s: the job stops; the workers have %.1f s", event.reason, self._left())
        self._context.events.emit("fault", reason=event.reason, kind=event.kind, grace_s=round(self._left(), 3))
        self.stop, self._cause = StopKind.FAULT, event.reason
        self._begin_stop()
        self._give_order(event.kind, event.reason)

    def _hear_end(self, end: WorkerExit) -> None:
        what = meaning(end)
        outcome = what.value
        step = None if end.status is None else end.status.step
        self._context.events.emit(
            "worker_end",
            step=step,
            reason=describe(end),
            outcome=outcome,
            worker_rank=end.rank,
            worker_pid=end.pid,
        )
        failed = what is Meaning.FAILED and self._signum is None and self.stop in (None, StopKind.MEMBERSHIP)
        now = time.monotonic()
        stuck, since = self._stuck.pop(end.rank, ("", now))
        why, recovery = stuck or describe(end), self._recovery if self._deadline is None else None
        # All ranks may train again since the last look: then this death is the next failure, and not one in a recovery.
        is_recovering = recovery is not None and recovery.is_active and recovery.look() is not Phase.RUN
        if stuck or (failed and (end.code == -signal.SIGKILL or not is_recovering)):
            self.own_failures.append(end)
        if recovery is not None and is_recovering:
            if what is not Meaning.FINISHED:
                logger.error("rank %d (pid %d): %s", end.rank, end.pid, why)
            recovery.hear_end(end)
            return
        if failed or stuck:
            logger.error("rank %d (pid %d): %s", end.rank, end.pid, why)
            if recovery is not None and recovery.begin(end, why, stuck_s=now - since):
                if not self._looks_at_recovery:
                    self._looks_at_recovery = True
                    self._after(0.0, self._look_at_recovery)
                return
            if stuck:
                self._fail(stuck, end.rank, f"rank {end.rank} is gone: {stuck}")
                self.failed_at = since
                return
            self._fail("", -1, f"rank {end.rank} is gone: {why}")
        elif what is Meaning.LEFT and self.stop is None and self._deadline is None:
            if self.workers.live:
                logger.info("rank %d has left with exit code %d; waiting for the others", end.rank, end.code)
            self._begin_stop(half_way=False)
            for rank in list(self.workers.live):
                if self.workers.is_guarded(rank):
                    self._after_rank(_LEAVE_TOO_S, self._urge, rank)
                elif self.workers.status(rank) is None:
                    self.workers.send(rank, signal.SIGTERM)

    def _look_at_recovery(self) -> None:
        """Again and again until a recovery in place is over."""
        assert self._recovery is not None
        self._looks_at_recovery = False
        if self._deadline is not None:
            return
        phase = self._recovery.look()
        if phase is Phase.FALLBACK:
            self._fail("", -1, f"no recovery in place: {self._recovery.reason}")
            self._note_recovery_failure(self._recovery)
            if self._recovery.must_kill:
                for rank in list(self.workers.live):
                    self.workers.kill(rank)
        elif phase is not Phase.RUN or not self._recovery.look_at_first_step(self.workers.statuses()):
            self._looks_at_recovery = True
            self._after(LOOK_S, self._look_at_recovery)

    def _note_recovery_failure(self, recovery: Recovery) -> None:
        self._otherwise = recovery.cause
        self.failed_at, self.noticed_at = recovery.moments

    def _hear_hang(self, stuck: list[Stuck], statuses: Mapping[int, Status]) -> None:
        states = {rank: process_state(status.pid) for rank, status in statuses.items()}
        if "t" in states.values():
            return  # a debugger holds it
        culprits = _culprits(stuck, states, statuses)
        late, now_ns = {each.rank for each in stuck}, time.monotonic_ns()
        stuck += [_stuck(rank, statuses[rank], now_ns) for rank in culprits if rank not in late]
        stuck = sorted(stuck, key=lambda each: each.rank not in culprits)
        files = write_stacks(self.workers, statuses, self._context.stacks, attempt=self._number)
        for each in stuck:
            logger.error(
                "rank %d hangs%s: no step for %.1f s after step %d",
                each.rank,
                _STOPPED if states[each.rank] == "T" else "",
                each.idle_s,
                each.step,
            )
        logger.error("stacks: %s", ", ".join(map(str, files)) or "none could be written")
        first, ranks = stuck[0], [each.rank for each in stuck]
        cause = f"hang: no step for {first.idle_s:.1f} s" + (_STOPPED if states[first.rank] == "T" else "")
        self._context.events.emit("hang", step=first.step, reason=cause, ranks=ranks, stacks=[str(f) for f in files])
        if self._recovery is not None:
            reason = "it cannot be told which rank the others wait for"
            if culprits and not (reason := self._recovery.why_not(culprits)):
                self._killed_at = time.monotonic()
                for rank in culprits:
                    self._stuck[rank] = cause, self._killed_at - first.idle_s
                    self.workers.kill(rank)  # its connections end with it, and so does the others' wait
                return
            self._recovery.refuse(culprits, cause, reason, stuck_s=first.idle_s)
        subject = f"rank {first.rank} is" if len(culprits) < 2 else f"ranks {', '.join(map(str, culprits))} are"
        self._fail(cause, first.rank, f"{subject} stuck: {cause}")
        self.failed_at = time.monotonic() - first.idle_s
        for rank in culprits:
            if states[rank] == "T":
                self.workers.kill(rank)
            else:
                self._after_rank(min(_STUCK_S, self._context.grace_s / 4), self._end_stuck, rank)

    def _has_finished(self) -> bool:
        """Whether no living rank of this node trains any more."""
        statuses = self.workers.statuses()
        done = all(status.finished and status.phase == WorkerPhase.LEFT for status in statuses.values())
        return done and len(statuses) == len(self.workers.live) > 0

    def _stops_by_itself(self) -> bool:
        """Whether a rank is on its way out of a training that it has not finished."""
        statuses = self.workers.statuses().values()
        return any(status.phase >= WorkerPhase.STOPPING and not status.finished for status in statuses)

    def _may_say_more(self) -> bool:
        """Whether nodes wait for so short a time that the end of ranks here may yet tell why they do. A rank that hangs
        on its way out is not waited for longer than the grace period."""
        self._waiting_since = self._waiting_since or time.monotonic()
        patience_s = self._context.grace_s if self._stops_by_itself() else _NEWS_S
        return time.monotonic() < self._waiting_since + patience_s

    def _look_at_nodes(self, membership: Membership) -> None:
        membership.wakeup.drain()
        if self.stop is not None or self._signum is not None or self._deadline is not None or not self.workers.live:
            return
        if not membership.news.waiting:
            self._waiting_since = None
        if (membership.news.waiting or membership.lost) and self._has_finished():
            self._lost_since = None  # what is still done needs no other node, and has nothing for a new one to do
        elif membership.news.waiting > 0 and self._may_say_more():
            self._after(_STOPS_S, lambda: None)  # how it ends says more: a node may wait in the place of a lost one
        elif membership.news.waiting > 0:
            logger.warning("%d nodes want to join: all nodes stop and meet again", membership.news.waiting)
            self._context.events.emit("membership", reason=f"nodes waiting: {membership.news.waiting}")
            self._regroup()
        elif not membership.lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
            logger.warning("%s; waiting %g s for a sign", membership.lost, _NODE_PATIENCE_S)
            self._after(_NODE_PATIENCE_S + 0.01, lambda: None)
        elif time.monotonic() - self._lost_since > _NODE_PATIENCE_S:
            statuses = self.workers.statuses().values()
            if not statuses:
                return  # no guard could save anything; as under torchrun, the workers find out by themselves
            if any(s.boundary_ns > self._lost_since * 1e9 or is_between_steps(s) for s in statuses):
                self._lost_since = time.monotonic()  # its agent may be gone, but its workers train on
                self._after(_NODE_PATIENCE_S + 0.01, lambda: None)
                return
            cause = f"a node is lost: {membership.lost}"
            logger.error("%s", cause)
            self._fail(cause, -1, cause)
            self.failed_at = self._lost_since

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        return self._grace_s if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _begin_stop(self, *, half_way: bool = True) -> None:
        if self._deadline is not None:
            return
        self._deadline = time.monotonic() + self._grace_s
        if half_way:
            for rank in list(self.workers.live):
                self._after_rank(self._grace_s / 2, self._urge, rank)
        self._after(self._grace_s, self._kill_all)

    def _fail(self, cause: str, rank: int, reason: str) -> None:
        """A failure: the others save what they have. `cause` and `rank` where no worker's own end tells them."""
        self.noticed_at = time.monotonic()
        self.failed_at = min(self._woke_at, self.noticed_at)
        self.stop, self._cause, self._cause_rank = StopKind.FAILURE, cause, rank
        self._begin_stop()
        self._give_order("peer", reason)

    def _give_order(self, kind: str, reason: str) -> None:
        context = self._context
        ordered = True
        try:
            context.folder.order(kind, reason, grace_s=self._left(), exit_code=EXIT_TEMPORARY, extends=self._extends)
        except OSError as error:
            ordered = False
            logger.warning("%s: no order can be written (%s); SIGTERM instead", context.folder.path, error)
        for rank in list(self.workers.live):
            guarded = ordered and self.workers.is_guarded(rank)
            status = self.workers.status(rank)
            phase = WorkerPhase.STARTING if status is None else status.phase
            if guarded:
                self.workers.call(rank)
            if not guarded or phase == WorkerPhase.STARTING:
                self.workers.send(rank, signal.SIGTERM)  # nothing to save yet, and no guard that would read an order

    def _regroup(self) -> None:
        """All workers stop at one boundary, to start again with others."""
        self.stop = StopKind.MEMBERSHIP
        self._begin_stop()
        for rank in list(self.workers.live):
            self.workers.send(rank, signal.SIGTERM)

    def _urge(self, rank: int) -> None:
        """A guarded rank that has not begun to stop by itself."""
        status = self.workers.status(rank) if rank in self.workers.live else None
        if status is not None and status.phase < WorkerPhase.STOPPING:
            logger.warning("rank %d has not begun to stop; SIGTERM", rank)
            self.workers.send(rank, signal.SIGTERM)

    def _end_stuck(self, rank: int) -> None:
        status = self.workers.status(rank) if rank in self.workers.live else None
        if status is not None and status.phase < WorkerPhase.STOPPING:
            self.workers.kill(rank)

    def _kill_all(self) -> None:
        for rank in list(self.workers.live):
            status = self.workers.status(rank)
            if status is not None and status.saved_ns and status.phase >= WorkerPhase.STOPPING:
                self._after_rank(_LEAVING_S, lambda late: self._kill_late(late, _LEAVING_S), rank)
            else:
                self._kill_late(rank)
        self._after(_UNKILLABLE_S, self._abandon)

    def _kill_late(self, rank: int, more_s: float = 0.0) -> None:
        if rank in self.workers.live:
            logger.error("rank %d is not gone after %g s; SIGKILL", rank, self._grace_s + more_s)
            self.workers.kill(rank)

    def _abandon(self) -> None:
        for rank, process in list(self.workers.live.items()):
            state = process_state(process.pid)
            logger.error("rank %d (pid %d, state %s) survives SIGKILL; it is given up", rank, process.pid, state)
            self.abandoned.append(rank)
            self.workers.give_up(rank)


def _stuck(rank: int, status: Status, now_ns: int) -> Stuck:
    """A rank that the others wait for, and whose own time is not over yet."""
    return Stuck(rank, status.step, (now_ns - max(status.boundary_ns, status.entered_ns)) / 1e9)


def _culprits(stuck: list[Stuck], states: Mapping[int, str], statuses: Mapping[int, Status]) -> list[int]:
    """The ranks that the others wait for: stopped ones, else the slowest ones, else those that hang while others do
    not, else those that run or wait for a disk, while the others sleep, as in a collective."""
    # A stopped one may have passed its last step a moment later than the ranks that wait for it.
    stopped = [rank for rank in statuses if states[rank] == "T"]
    newest = max(status.step for status in statuses.values())
    slower = [each.rank for each in stuck if each.step < newest]
    alone = [each.rank for each in stuck] if len(stuck) < len(statuses) else []
    busy = [each.rank for each in stuck if states[each.rank] in ("R", "D")]
    return stopped or slower or alone or (busy if len(busy) < len(stuck) else [])
