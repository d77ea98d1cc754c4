"""The workers of a simulated job, as its agents see them: processes that train together, save, stop, fail and hang.

How ranks stop is simulated by `stops`; here it is only what agents see of it. A guarded worker has a status page. Told
to stop, all agree on a boundary, save it and leave with one code; after a failure each saves its last boundary at once.
A worker without a guard ends by the first signal. Collectives need all ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mindx_elastic.alarm.exit_codes import EXIT_ERROR, EXIT_TEMPORARY, exit_code_of_signal
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.memory.agent_folder import CONTROL_SIGNAL
from tests.simulation.world import Process, Topic

if TYPE_CHECKING:
    from tests.simulation.agents import Job, Node

__all__ = ["Alarm", "Meeting", "Worker"]

_AGREEMENT_S, _LATE_S = 3.0, 7.0
"""A rank acts alone without an agreement, and where its deadline is near."""
_CONNECT_S = 60.0
"""How long ranks wait for each other at their start."""
_NOTICE_S = 0.002


@dataclass(frozen=True)
class Alarm:
    reason: str
    code: int
    asked: bool = False
    at_once: bool = False
    """Each saves its last boundary."""

    @property
    def kind(self) -> str:
        return "peer" if self.at_once else "signal"

    def of_peer(self, rank: int) -> Alarm:
        code = EXIT_TEMPORARY if self.code == EXIT_ERROR else self.code
        return replace(self, reason=f"{self.reason} on rank {rank}", code=code)


class _LeaveError(Exception):
    """The rank saves what it has, and leaves."""


class Meeting:
    """The workers of one attempt: those that were given one address to meet at."""

    def __init__(self, job: Job, world_size: int, restarts: int) -> None:
        self.job, self.world_size, self.restarts = job, world_size, restarts
        self.workers: dict[int, Worker] = {}
        self.topic = Topic(job.world)
        """All that a worker waits for."""
        self.began = False
        """All ranks have met, and read their checkpoint."""
        self.resumed_step = -1
        self.at_step: dict[int, set[int]] = {}
        self.offers: dict[int, int] = {}
        self.stop_step: int | None = None
        self.requested: set[bool] = set()
        """Stops that the store has: `Alarm.at_once`."""
        self.finished: set[int] = set()

    def admit(self, worker: Worker, restarts: int) -> None:
        other = self.workers.get(worker.rank)
        if other is not None:
            self.job.wrong.append(f"rank {worker.rank} is started twice in one attempt: {other.name}, {worker.name}")
        if (worker.world_size, restarts) != (self.world_size, self.restarts):
            self.job.wrong.append(f"{worker.name} has another world size or restart count than the others")
        self.workers[worker.rank] = worker
        if len(self.workers) == self.world_size:
            self.began, self.resumed_step = True, self.job.durable_step
            self.topic.tell()

    @property
    def has_dead(self) -> bool:
        return any(not each.process.is_alive for each in self.workers.values())

    @property
    def is_connected(self) -> bool:
        return not any(each.node.is_cut_off for each in self.workers.values())

    def has_all_at(self, step: int) -> bool:
        return len(self.at_step.get(step, ())) == self.world_size and self.is_connected

    def spread(self, alarm: Alarm, origin: Worker) -> None:
        """A stop request in the store that rank 0 hosts."""
        host = self.workers.get(0)
        if host is None or not host.process.is_alive or not self.is_connected or alarm.at_once in self.requested:
            return
        if len(self.workers) == self.world_size:  # else one that comes later hears it from another one
            self.requested.add(alarm.at_once)
        world = self.job.world
        for each in self.workers.values():
            if each is not origin:
                heard = alarm.of_peer(origin.rank)
                world.at(world.now + world.random.uniform(0, 0.05), partial(each.hear, heard))

    def offer(self, rank: int, step: int) -> None:
        self.offers.setdefault(rank, step)
        if self.stop_step is None and len(self.offers.keys() | self.finished) == self.world_size:
            end = self.job.steps + 1
            self.stop_step = end if self.finished else max(self.offers.values())
            self.topic.tell()


class Worker:
    """One process of a rank."""

    def __init__(self, job: Job, node: Node, meeting: Meeting, rank: int, world_size: int, process: Process) -> None:
        self.job, self.node, self.meeting, self.process = job, node, meeting, process
        self.rank, self.world_size = rank, world_size
        self.status: Status | None = None
        self.step = -1
        self.alarm: Alarm | None = None
        self.is_urgent = False
        self._offered: int | None = None
        self.next_failure: Exception | None = None
        self.hangs = self.is_deaf = False
        """`is_deaf`: not even its watcher runs."""

    # --- the process ---

    @property
    def name(self) -> str:
        return self.process.name

    def run(self) -> int:
        """The main thread."""
        process, job, world = self.process, self.job, self.job.world
        process.on_end.append(self._tell_of_death)
        world.sleep(job.start_s * world.random.uniform(0.5, 1.0))
        if job.is_guarded:
            process.hears = self._hear_signal
            self.status = Status(pid=process.pid, phase=WorkerPhase.STARTING)
        try:
            self._connect()
            self._train()
        except _LeaveError:
            return self._leave()
        except Exception as error:
            return self._fail(error) if self.alarm is None else self._leave()
        return self._end_well()

    def _set(self, **fields: Any) -> None:
        if self.status is not None:
            self.status = self.status._replace(**fields)

    def _now_ns(self) -> int:
        return int(self.job.world.now * 1e9)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        found = self.job.world.wait(lambda: condition() or self.is_urgent, timeout_s, on=(self.meeting.topic,))
        if self.is_urgent:
            raise _LeaveError
        return found

    def _is_cut(self) -> bool:
        return self.job.hears_connections and self.meeting.has_dead

    def _connect(self) -> None:
        meeting = self.meeting
        self._wait(lambda: meeting.began or self._is_cut() or self.alarm is not None, _CONNECT_S)
        if not meeting.began:
            if self.alarm is not None:
                raise _LeaveError
            raise RuntimeError("the ranks have not met")
        self.step = meeting.resumed_step
        self._set(
            phase=WorkerPhase.TRAINING if self.alarm is None else WorkerPhase.STOPPING,
            resumed_step=self.step,
            step=self.step,
            entered_ns=self._now_ns(),
        )
        if self.alarm is not None:
            self._offer()

    def _train(self) -> None:
        job, meeting = self.job, self.meeting
        for step in range(max(0, self.step) + 1, job.steps + 1):
            self._wait(lambda: False, job.step_s * job.world.random.uniform(0.5, 1.0))
            if self.next_failure is not None:
                raise self.next_failure
            if self.is_deaf:
                job.world.wait(lambda: False)
            if self.hangs:
                self._wait(lambda: False)
            meeting.at_step.setdefault(step, set()).add(self.rank)
            if meeting.has_all_at(step):
                meeting.topic.tell()
            self._wait(lambda step=step: meeting.has_all_at(step) or self._is_cut())  # type: ignore[misc]
            if not meeting.has_all_at(step):
                raise RuntimeError("Connection closed by peer")
            self.step = step
            now, before = self._now_ns(), self.status or Status()
            self._set(
                step=step, boundary_ns=now, first_boundary_ns=before.first_boundary_ns or now,
                boundaries=before.boundaries + 1,
            )  # fmt: skip
            if self._offered == step:
                self._wait(lambda: meeting.stop_step is not None)
            if meeting.stop_step == step and self._offered is not None:
                raise _LeaveError

    def _save(self) -> None:
        job = self.job
        if self.step >= 0 and self.meeting.began:
            step = self.step
            job.world.sleep(job.save_s)
            job.durable_step = max(job.durable_step, step)
            self._set(saved_step=step, saved_ns=self._now_ns())

    def _leave(self) -> int:
        assert self.alarm is not None
        self._save()
        self._set(phase=WorkerPhase.LEFT)
        return self.alarm.code

    def _fail(self, error: Exception) -> int:
        if self.status is None:
            return EXIT_ERROR
        alarm = Alarm(f"exception: {type(error).__name__}: {error}", EXIT_ERROR, at_once=True)
        self._set(reason=alarm.reason, phase=WorkerPhase.STOPPING)
        self.meeting.spread(alarm, self)
        self._save()
        self._set(phase=WorkerPhase.LEFT)
        return EXIT_ERROR

    def _end_well(self) -> int:
        job = self.job
        if job.is_guarded:
            if self.alarm is None:
                self._set(phase=WorkerPhase.BETWEEN)
            self._save()
        self.meeting.finished.add(self.rank)
        for other in self.meeting.workers.values():
            if other._offered is not None:
                self.meeting.offer(self.rank, job.steps + 1)
        self._set(phase=WorkerPhase.LEFT, finished=1)
        self.process.hears = None
        job.world.sleep(job.after_s * job.world.random.uniform(0.5, 1.0))
        return 0

    # --- what it hears ---

    def hear(self, alarm: Alarm) -> None:
        """The watcher. Nothing after the first alarm but what is more urgent."""
        status, world = self.status, self.job.world
        if self.process.frozen_until > world.now:
            world.at(self.process.frozen_until, lambda: self.hear(alarm))
            return
        if self.is_deaf or status is None or status.phase == WorkerPhase.LEFT or not self.process.is_alive:
            return
        if self.alarm is None:
            self.alarm = alarm
            asked = alarm.code if alarm.asked else -1
            self._set(
                phase=max(status.phase, WorkerPhase.STOPPING), reason=alarm.reason, exit_code=alarm.code,
                alarm_ns=self._now_ns(), asked_code=asked,
            )  # fmt: skip
            self.meeting.spread(alarm, self)
            if not alarm.at_once and status.phase != WorkerPhase.STARTING:
                self._offer()
        self.is_urgent = self.is_urgent or alarm.at_once
        self.meeting.topic.tell()

    def _offer(self) -> None:
        world, meeting = self.job.world, self.meeting
        self._offered = self.step + 1
        meeting.offer(self.rank, self._offered)

        def alone(*, is_late: bool) -> None:
            self.is_urgent = self.is_urgent or is_late or meeting.stop_step is None or meeting.has_dead
            meeting.topic.tell()

        world.at(world.now + _AGREEMENT_S, partial(alone, is_late=False))
        world.at(world.now + _LATE_S, partial(alone, is_late=True))

    def _hear_signal(self, signum: int) -> bool:
        world, order = self.job.world, self.node.order
        if signum == CONTROL_SIGNAL:
            if order is not None:
                is_failure = order["kind"] == "peer"
                told = Alarm(order["reason"], order["exit_code"], asked=not is_failure, at_once=is_failure)
                world.at(world.now, lambda: self.hear(told))
            return True
        alarm = Alarm(signal.Signals(signum).name, exit_code_of_signal(signum), asked=True)
        if not self.node.agent.is_alive:
            alarm = Alarm(f"the agent of rank {self.rank} is gone", EXIT_TEMPORARY)
        world.at(world.now, lambda: self.hear(alarm))
        return True

    def _tell_of_death(self) -> None:
        """The others on this machine hear of it from the kernel."""
        world = self.job.world
        self.meeting.topic.tell()
        if self.process.exit_code in (0, EXIT_TEMPORARY) or self.rank in self.meeting.finished:
            return
        if self.alarm is not None and self.process.exit_code == self.alarm.code:
            return
        alarm = Alarm(f"rank {self.rank} is gone", EXIT_TEMPORARY, at_once=True)
        for other in self.meeting.workers.values():
            if other.node is self.node and other is not self:
                world.at(world.now + _NOTICE_S, partial(other.hear, alarm))
