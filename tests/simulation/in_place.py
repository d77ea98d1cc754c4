"""A job of one node whose dead ranks are replaced in place, in a simulated world: cut, agree, connect, donate, go on.

Real are the agent of `agents` with `agent.recovery` and `agent.replacements`, and in the workers the board, the member,
the protocol, how a rank leaves and enters its guard again (`guard.running`), and how a new process joins
(`rejoin.member`). Simulated are sockets and process groups, the training, its state and what goes wrong.

What must hold in every schedule, beside what `agents` checks:

* Two living processes never hold one rank of an attempt.
* All members of a group have the same verdict, and stand at its step with a state that is that of its boundary.
* No boundary follows from a collective that has failed.
* Each recovery is told of once, and what is told of it is true: ranks, donor, step, who stood in, whether it succeeded.
* A single death of a rank that trains is mended in place, and costs no restart.
"""

from __future__ import annotations

import heapq
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError

from mindx_elastic.agent import launcher, replacements, supervisor
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.errors import GracefulExit
from mindx_elastic.guard import running
from mindx_elastic.rejoin import member as rejoin_member
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.member import LeavesToRejoin, Member
from mindx_elastic.rejoin.protocol import RecoveryVerdict, Report
from mindx_elastic.rejoin.record import IN_PLACE, RESTART, STOPPED
from mindx_elastic.rejoin.spare import PIPE_VARIABLE, UNFIT, WAITS
from tests.simulation import agents
from tests.simulation.agents import Agent, Job, Outcome, Started
from tests.simulation.schedules import Fault
from tests.simulation.store import Connection, SimulatedStore
from tests.simulation.workers import Alarm, Meeting, Worker
from tests.simulation.world import Process, Topic, World, instead_of

__all__ = ["KINDS", "STAGES", "Plan", "plan_of", "play"]

STAGES = ("join", "out", "connect", "donate", "load", "open")
"""Where a rank is when something happens to it there: a new process joins; a survivor is about to report; one connects
to the others; the donor copies its state; a rank has its state, and opens its guard."""
KINDS = (
    *("kill worker", "exception", "hang", "freeze worker", "sigterm agent", "sigterm worker", "freeze agent", "reset"),
    *("slow store", "fault report", "kill agent", "no start", "slow start"),
)
"""What can happen at a time."""
_AT_STAGES = ("kill", "kill", "kill other", "sigterm", "sigterm worker", "kill agent", "freeze")
_ON = (
    *((what, stage) for what in _AT_STAGES for stage in STAGES),
    ("unfit", "join"),
    ("cannot", "out"),
    ("cannot", "donate"),
)
"""And where a rank has come so far."""
_KEY = b"simulated"
_NOTICED_S = 0.02
"""How late other ranks may hear of a death."""
_DYING_S, _PATIENCE_S = 0.25, 3.0
_CONNECT_S, _AT_END_S = 60.0, 5.0
_TURN_S = 0.05
"""An agent that has begun to look at what has happened hears of a signal when it has done so."""
_HEARD_S = 1.0
"""Until the agent knows of a death at the latest."""
_TURNS = 0.25
"""How often another thread goes on before the agent's own call of its store."""
_MOST_S = 300.0
"""What a schedule may take, beside the faults that last."""


# --- the network of the workers' store ---


class _Line:
    """One TCP connection to the store. Once reset it is for ever, as torch's."""

    def __init__(self, network: _Stores, server: SimulatedStore, process: Process) -> None:
        self.server, self.process, self.is_broken = server, process, False
        self.world, self.host, self.values, self.topic = network.world, server.host, server.values, server.topic

    def ask(self, act: Callable[[], object]) -> None:
        try:
            if not self.is_broken:
                self.server.ask(act)
        except DistNetworkError:
            self.is_broken = True
        if self.is_broken:
            raise DistNetworkError("recvVector failed: Connection reset by peer")


class _Stores:
    """Reaches the agent's store; each connection to it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.server: SimulatedStore | None = None
        self.lines: list[_Line] = []
        self.topic = Topic(world)
        self.messages = 0

    def host(self, process: Process) -> None:
        """A new and empty store in `process`."""
        self.messages += 0 if self.server is None else self.server.messages
        self.server = SimulatedStore(self.world, process)
        self.topic.tell()

    @property
    def is_up(self) -> bool:
        return self.server is not None and self.server.host.is_alive

    def connect(self, timeout_s: float) -> _Line:
        process = self.world.process
        assert process is not None
        if not self.world.wait(lambda: self.is_up, timeout_s, on=(self.topic,)) or self.server is None:
            raise DistNetworkError("The client socket has timed out while trying to connect")
        self.lines.append(_Line(self, self.server, process))
        return self.lines[-1]


class PrefixStore:
    """`torch.distributed.PrefixStore`."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.underlying_store = prefix, store

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.underlying_store, name)
        return lambda keys, *more: call(
            self._key(keys) if isinstance(keys, str) else [self._key(key) for key in keys], *more
        )


@dataclass(frozen=True)
class Plan(agents.Plan):
    """One schedule."""

    spares: int
    enters_at_once: bool
    """The guard is entered before anything else: a new process joins in the middle of that."""
    swallows: bool
    """The program catches what a collective raises, and goes on."""
    update_s: float
    has_late_collective: bool
    """An update has a collective in its middle: who is cut off there has no boundary."""


def plan_of(seed: int) -> Plan:
    """A schedule from its seed."""
    random = Random(seed)
    step_s, steps, start_s = random.choice((0.05, 0.2, 0.6)), random.randint(4, 10), random.choice((0.1, 0.4))
    last = start_s + 1.2 * steps * step_s
    # The second step has been passed, as a rule.
    moments = [random.uniform(start_s + random.choice((0.0, 2.0, 2.0)) * step_s, last) for _ in range(2)]
    workers = random.choice((2, 3, 3, 4))
    faults = [Fault("kill worker", 0, random.randrange(workers), at=round(moments[0], 3))]
    while len(faults) < 5 and random.random() < 0.7:
        late_s = random.choice((0.0, random.uniform(-0.2, 0.5), random.uniform(0, 3)))
        kind, at, on = random.choice(("kill worker", random.choice(KINDS))), random.choice(moments) + late_s, None
        if random.random() < 0.6:
            # In a recovery one rank joins and one donates.
            kind, stage = random.choice(_ON)
            at, on = 0.0, (stage, 1 if stage in ("join", "donate") else random.randint(1, 4))
        length_s = random.choice((0.3, 2.0, 8.0))
        faults.append(Fault(kind, 0, random.randrange(workers), at=round(max(0.0, at), 3), length_s=length_s, on=on))
    return Plan(
        seed,
        nodes=1,
        min_nodes=1,
        workers=workers,
        steps=steps,
        step_s=step_s,
        start_s=start_s,
        save_s=random.choice((0.01, 0.3)),
        after_s=random.choice((0.0, 1.0)),
        is_guarded=True,
        hears_connections=random.random() < 0.6,
        host_is_apart=False,
        max_restarts=3,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        spares=random.choice((0, 0, 1, 2)),
        enters_at_once=random.random() < 0.5,
        swallows=random.random() < 0.3,
        update_s=step_s * random.choice((0.0, 0.1, 0.5)),
        has_late_collective=random.random() < 0.3,
    )


# --- the workers ---


class _Group(Meeting):
    """The members of one attempt that are connected with each other, since their start or since a recovery."""

    job: InPlaceJob

    def __init__(self, job: InPlaceJob, world_size: int, key: tuple[int, int, int]) -> None:
        self.agent, restarts, self.number = key
        """The number of the agent, and the generation."""
        super().__init__(job, world_size, restarts)
        self.topic = job.topic
        self.verdicts: dict[int, RecoveryVerdict | None] = {}
        self.came: dict[str, set[int]] = {}
        """Ranks, by meetings at the entry of the guard."""

    def spread(self, alarm: Any, origin: Worker) -> None:
        """By the store, which the agent hosts."""
        world = self.job.world
        for each in self.workers.values():
            if each is not origin:
                world.at(world.now + world.random.uniform(0, 0.05), partial(each.hear, alarm.of_peer(origin.rank)))

    @property
    def is_done(self) -> bool:
        return len(self.finished) == self.world_size

    def meets(self, name: str, rank: int) -> Callable[[], bool]:
        self.came.setdefault(name, set()).add(rank)
        self.topic.tell()
        return lambda: len(self.came[name]) == self.world_size


class _Leaves(GracefulExit):
    """The rank saves, and leaves."""

    def __init__(self, code: int) -> None:
        super().__init__(code, reason="", step=None, path=None)


class _Watcher:
    """The thread of a worker that hears what happens."""

    def __init__(self, job: InPlaceJob) -> None:
        self._world, self._due = job.world, list[tuple[float, int, Callable[[], None]]]()
        self._topic = (Topic(job.world),)

    def start(self) -> None:
        threading: Any = vars(rejoin_member)["threading"]
        threading.Thread(target=self._run, name="watcher").start()

    def post(self, act: Callable[[], None]) -> None:
        self.call_at(self._world.now, act)

    def call_at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, self._world.number(), act))
        self._topic[0].tell()

    def _run(self) -> None:
        while True:
            self._world.wait(lambda: bool(self._due), on=self._topic)
            is_due = lambda: self._due[0][0] <= self._world.now  # noqa: E731
            self._world.wait(is_due, self._due[0][0] - self._world.now, on=self._topic)
            if self._due[0][0] <= self._world.now:
                heapq.heappop(self._due)[2]()


class _Sockets:
    """`rejoin.sockets.SocketsPart`: a rank that is cut comes out of its collective."""

    def __init__(self, rank: _Rank) -> None:
        self._rank = rank

    def cut(self) -> int:
        self._rank.is_cut = True
        self._rank.job.topic.tell()
        return 1

    def release(self) -> None:
        pass


class _Failures:
    """`rejoin.failures.Failures`, which the simulated collective tells."""

    def __init__(self, *_: Any) -> None:
        self.seen = self.has_waited = False

    def note(self) -> None:
        self.seen, self.has_waited = True, False

    def close(self) -> None:
        pass


class _Host:
    """`rejoin.member.Host`."""

    ddp = ()

    def __init__(self, rank: _Rank, **asked: Any) -> None:
        self._rank = rank
        self.is_stopping, self.peers_gone_soon, self.end = (
            asked[name] for name in ("is_stopping", "peers_gone_soon", "end")
        )

    def report(self) -> Report:
        rank = self._rank
        rank.reach("out")
        return Report(
            rank=rank.rank, run_id="run", attempt=rank.generation, step=rank.step, clean=rank.is_clean, groups="all",
            problem=rank.problem,
        )  # fmt: skip

    def live(self) -> tuple[Mapping[str, Any], Any]:
        return {"step": self._rank.step}, None

    def donate(self) -> Path:
        rank, job = self._rank, self._rank.job
        rank.reach("donate")
        if rank.problem:
            raise RejoinFailed(rank.problem)
        job.world.sleep(0.2 * job.save_s)
        path = Path(f"/simulated/donated_{job.world.number()}")
        job.memory[path] = rank.step
        return path

    def call_soon(self, seconds: float, work: Callable[[], None]) -> None:
        self._rank.watcher.call_at(self._rank.job.world.now + seconds, work)

    def open_gate(self) -> None:
        pass

    def orders(self) -> dict[str, list[int]]:
        return {}


class _Rank(Worker):
    """One process of a rank. It is what `guard.running` takes for its guard's stopper, connections and loaders."""

    job: InPlaceJob
    meeting: _Group

    def __init__(self, *arguments: Any, generation: int) -> None:
        super().__init__(*arguments)
        job = self.job
        self.generation = generation
        self.attempt = self.meeting
        """The first group of the attempt."""
        self.member = Member(
            RejoinSettings(in_place=True, generation=generation, timeout_s=job.rejoin_timeout_s),
            RankInfo(rank=self.rank, world_size=self.world_size, local_rank=1),
            AgentInfo(folder=Path("/simulated"), attempt=self.meeting.restarts),
        )
        self.member.page = SimpleNamespace(set=self._set)
        self.watcher: Any = _Watcher(job)
        self.is_cut = False
        self.is_clean = True
        """Its weights are those of a boundary."""
        self.is_open = self.is_ending = self.is_connecting = False
        self.problem = ""
        self.slow_s = 0.0
        self._dead = -1
        self._ask: Callable[[], None] = lambda: None
        collector = SimpleNamespace(parameters=[], before_keeping=lambda: None)
        self.saver = SimpleNamespace(replicated=True, collector=collector)
        self.update_gate = SimpleNamespace(before_update=lambda: None)
        self.step_gate = self.memory = None

    def reach(self, stage: str) -> None:
        self.job.reach(stage, self)

    # --- the process ---

    def run(self) -> int:
        world, job = self.job.world, self.job
        self.process.on_end.append(self._tell_of_death)
        world.sleep(job.start_s * world.random.uniform(0.5, 1.0) + self.slow_s)
        self.watcher.start()
        try:
            running.run_in_place(self._block, dict, enters_at_once=job.plan.enters_at_once)
        except _Leaves:
            return self._leave()
        except Exception as error:
            return self._fail(error)
        return self._end_well()

    def _block(self, place: running.InPlaceGuard | None) -> None:
        """As a guard's, from its entry to its end."""
        assert place is not None
        error: BaseException | None = None
        try:
            self._enter(place)
            try:
                self._train()
                self._finish()
            except (Exception, LeavesToRejoin, _Leaves) as found:
                error = found
            stopper: Any = self
            if place.comes_out(error, stopper):
                raise place.leave(error, stopper, stopper, stopper) from error
            if error is not None:
                raise error
        except Exception as found:
            if not self.is_open or self.alarm is None:
                raise
            raise _Leaves(self.alarm.code) from found
        finally:
            self.is_open, self.process.hears = False, None

    def _enter(self, place: running.InPlaceGuard) -> None:
        world, job = self.job.world, self.job
        if self.status is None:
            self.status = Status(pid=self.process.pid, phase=WorkerPhase.STARTING)
            self.job.show_page(self)
        if place.can_prepare:
            world.sleep(job.start_s * world.random.uniform(0.0, 0.3))
        entry = place.entry
        self.alarm, self._offered, self.is_urgent = None, None, False
        number = 0 if entry is None else entry.generation
        group = self.meeting = job.group(self.attempt, number)
        self._meet(group, "exchange")
        boundary = place.boundary()
        if boundary is None:
            self.step = max(0, self.attempt.resumed_step)
        elif boundary.live is None:
            self.step, self.is_clean = job.memory[boundary.snapshot()], True
        world.sleep(0.1 * job.save_s)
        job.check(group, self, None if entry is None else entry.verdict)
        self.generation = number
        self.reach("load")
        self.member.parts()
        self._meet(group, "entered")
        self.is_cut = False
        self.is_open, self.process.hears = True, self._hear_signal
        for rank, other in group.workers.items():
            if not other.process.is_alive:
                self.watcher.post(partial(self.hear_death, rank))
        stopper: Any = self
        place.opened(stopper, stopper, stopper, ())
        self.reach("open")
        now = self._now_ns()
        self._set(phase=WorkerPhase.TRAINING, step=self.step, entered_ns=now)
        if number == 0:
            self._set(resumed_step=self.step)

    def _meet(self, group: _Group, name: str) -> None:
        if not self.job.world.wait(group.meets(name, self.rank), _CONNECT_S, on=(group.topic,)):
            raise RuntimeError("the ranks have not met")

    # --- the training ---

    def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        is_told = lambda: condition() or (self.is_urgent and self.alarm is not None)  # noqa: E731
        found = self.job.world.wait(is_told, timeout_s, on=(self.job.topic,))
        if self.is_urgent and self.alarm is not None:
            raise _Leaves(self.alarm.code)
        return found

    def _train(self) -> None:
        job, meeting = self.job, self.meeting
        while self.step < job.steps:
            step = self.step + 1
            self._ask()
            self._until(lambda: False, job.step_s * job.world.random.uniform(0.5, 1.0))
            if self.next_failure is not None:
                raise self.next_failure
            if self.hangs:
                self._until(lambda: False)
            is_whole = self._reduce(f"{step}")
            self.update_gate.before_update()
            self.is_clean = False
            job.world.sleep(job.plan.update_s)
            if job.plan.has_late_collective:
                is_whole = self._reduce(f"{step}, late") and is_whole
            self.member.at_boundary()
            if not is_whole:
                job.wrong.append(f"{self.name} passes boundary {step}, which follows from a failed collective")
            self.step, self.is_clean = step, True
            now, before = self._now_ns(), self.status or Status()
            self._set(
                step=step, boundary_ns=now, first_boundary_ns=before.first_boundary_ns or now,
                boundaries=before.boundaries + 1,
            )  # fmt: skip
            if self.alarm is None and self.member.wants_out:
                raise LeavesToRejoin
            if self._offered == step:
                self._until(lambda: meeting.stop_step is not None)
            if meeting.stop_step == step and self._offered is not None and self.alarm is not None:
                raise _Leaves(self.alarm.code)

    def _reduce(self, name: str) -> bool:
        """A collective; whether it has a result. Raises RuntimeError where it fails, and the program lets that pass."""
        job, group = self.job, self.meeting
        there = job.arrived.setdefault((id(group), name), set())
        there.add(self.rank)
        job.topic.tell()
        self._until(lambda: len(there) == self.world_size or self.is_cut or (job.hears_connections and group.has_dead))
        # One that is complete may have come to its end here or not, when the connections end.
        if len(there) == self.world_size and not (self.is_cut and job.world.random.random() < 0.5):
            return True
        failures: Any = self.member._failures
        if failures is not None:
            failures.note()
        if job.plan.swallows and job.world.random.random() < 0.8:
            return False
        raise RuntimeError("Connection closed by peer")

    def _finish(self) -> None:
        """The end of the block: all agree that it is one."""
        group = self.meeting
        if self.alarm is None and self.member.wants_out:
            return
        self.is_ending = True
        group.finished.add(self.rank)
        group.topic.tell()
        for other in group.workers.values():
            if other._offered is not None:
                group.offer(other.rank, self.job.steps + 1)
        self._until(lambda: group.is_done or group.has_dead or self.alarm is not None, _AT_END_S)
        if not group.is_done and (gone := self.peers_gone()):
            self._dead = gone[0]
            self.stop_for_death()
        if self.alarm is not None and not group.is_done:
            raise _Leaves(self.alarm.code)

    # --- in place of its guard's parts ---

    def at_every_ask(self, ask: Callable[[], None]) -> None:
        self._ask = ask

    def shutdown(self) -> None:
        pass

    stay_open = shutdown

    def peers_gone(self) -> list[int]:
        group = self.meeting
        return [
            rank for rank, each in group.workers.items() if not each.process.is_alive and rank not in group.finished
        ]

    def peers_gone_soon(self, error: BaseException) -> list[int]:
        self.job.world.wait(lambda: bool(self.peers_gone()), _DYING_S, on=(self.job.topic,))
        return self.peers_gone()

    def end_unsaved(self, why: str) -> NoReturn:
        self.job.world.note(f"{self.name}: {why}")
        self.process.exit(EXIT_TEMPORARY)

    def stop_for_death(self) -> None:
        if self.alarm is None:
            self.alarm = Alarm(f"rank {self._dead} is gone", EXIT_TEMPORARY, at_once=True)
            self._set(phase=WorkerPhase.STOPPING, reason=self.alarm.reason, exit_code=EXIT_TEMPORARY)
            self.meeting.spread(self.alarm, self)
            self.job.topic.tell()

    def exit(self) -> _Leaves:
        assert self.alarm is not None
        return _Leaves(self.alarm.code)

    def hear(self, alarm: Any) -> None:
        if self.is_open:
            super().hear(alarm)
        if self.alarm is not None and self.is_urgent:
            self.job.world.at(self.job.world.now + _PATIENCE_S, self._leave_behind)

    def _leave_behind(self) -> None:
        """The watcher has saved, and the training thread is in a call that nothing ends."""
        if self.is_connecting and self.alarm is not None and self.process.is_alive:
            self._set(phase=WorkerPhase.STOPPING)
            if self.is_clean:
                self.job.durable_step = max(self.job.durable_step, self.step)
                self._set(saved_step=self.step, saved_ns=self._now_ns())
            self.process.end(self.alarm.code)

    def hear_death(self, rank: int) -> None:
        """Watcher thread."""
        if not self.is_open or rank in self.meeting.finished:
            return
        if self.alarm is None and not self.is_ending:
            self._dead = rank
            self.member.hear_death()
        elif self.alarm is not None:
            world = self.job.world
            world.at(world.now + 2.0, self._hurry)

    def _hurry(self) -> None:
        self.is_urgent = True
        self.job.topic.tell()

    def _tell_of_death(self) -> None:
        world = self.job.world
        self.job.topic.tell()
        if self.meeting.workers.get(self.rank) is not self:
            return  # it has yet to join
        for other in self.meeting.workers.values():
            if other is not self and isinstance(other, _Rank) and other.is_open and other.meeting is self.meeting:
                when = world.now + world.random.uniform(0, _NOTICED_S)
                other.watcher.call_at(when, partial(other.hear_death, self.rank))

    def _save(self) -> None:
        if self.is_clean and self.step >= 0:
            self.job.world.sleep(self.job.save_s)
            self.job.durable_step = max(self.job.durable_step, self.step)
            self._set(saved_step=self.step, saved_ns=self._now_ns())

    def _fail(self, error: Exception) -> int:
        if self.peers_gone():
            self._dead = self.peers_gone()[0]
            self.stop_for_death()
            return self._leave()
        return super()._fail(error)


# --- the agent's side ---


class _Started(Started):
    """Torch's context, with what replaces a process in it."""

    def __init__(self, children: dict[int, Process], entrypoint: str, args: Any, envs: Any) -> None:
        super().__init__(children)
        self.entrypoint, self.args, self.envs = entrypoint, args, envs
        self.stdouts = self.stderrs = dict.fromkeys(envs, "")


class _OwnStore:
    """The store as its host reaches it: nothing is slow, and nothing is cut off. Few calls meet another thread."""

    def __init__(self, world: World, store: SimulatedStore) -> None:
        self._world, self.values = world, store.values

    def ask(self, act: Callable[[], object]) -> None:
        random = self._world.random
        if random.random() < _TURNS:
            self._world.sleep(random.uniform(0.0, 0.001), is_interruptible=False)
        act()


class _Forks(agents.Forks):
    def __init__(self, job: InPlaceJob) -> None:
        self._job = job

    def fork(self, command: Sequence[str], env: Mapping[str, str], *outputs: str, hook: str) -> Process | None:
        return self._job.fork(env)


class _Os:
    """`os`, for the pipes of spares."""

    def __init__(self, files: dict[str, list[bytes]], topic: Topic) -> None:
        self._files, self._topic = files, topic
        self.path = SimpleNamespace(exists=lambda path: str(path) in files)

    def mkfifo(self, path: Path, mode: int) -> None:
        self._files[str(path)] = []

    def open(self, path: Path, flags: int) -> str:
        if f"{path}{WAITS}" not in self._files:
            raise OSError("no reader")
        return str(path)

    def write(self, file: str, content: bytes) -> None:
        self._files[file].append(content)
        self._topic.tell()

    def close(self, file: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class InPlaceJob(Job):
    """All of it."""

    plan: Plan
    in_place, rejoin_timeout_s = True, 3.0
    command = (sys.executable, "train.py")
    modules = (*Job.modules, "mindx_elastic.rejoin.member", "mindx_elastic.rejoin.board")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.topic = Topic(self.world)
        """All that a rank waits for."""
        self.stores = _Stores(self.world)
        self.spares = plan.spares
        self.memory: dict[Path, int] = {}
        """The steps of the states in shared memory."""
        self.files: dict[str, list[bytes]] = {}
        self.arrived: dict[tuple[int, str], set[int]] = {}
        self.groups: dict[tuple[int, int, int], _Group] = {}
        """By the agent, the restart and the generation."""
        self.told: list[dict[str, Any]] = []
        """The events of recoveries."""
        self._no_starts = 0
        self._next_slow_s = 0.0
        self._must_be_in_place = False
        self._kinds = {fault.kind for fault in plan.faults}

    def group(self, attempt: _Group, number: int) -> _Group:
        return self._group((attempt.agent, attempt.restarts, number), attempt.world_size)

    def _group(self, key: tuple[int, int, int], world_size: int) -> _Group:
        if key not in self.groups:
            self.groups[key] = self.meetings["group", str(key)] = _Group(self, world_size, key)
        return self.groups[key]

    def rank_of_process(self) -> _Rank:
        process = self.world.process
        worker = next(each for agent in self.nodes[0].agents for each in agent.workers if each.process is process)
        assert isinstance(worker, _Rank)
        return worker

    # --- what is checked while it runs ---

    def check(self, group: _Group, worker: _Rank, verdict: RecoveryVerdict | None) -> None:
        """A rank has the state that it goes on with."""
        group.verdicts[worker.rank] = verdict
        if len({*group.verdicts.values()}) > 1:
            self.wrong.append(f"the ranks of group {group.number} have different verdicts")
        if verdict is not None and worker.step != verdict.step:
            self.wrong.append(f"{worker.name} is at step {worker.step}, and the group at {verdict.step}")
        if not worker.is_clean:
            self.wrong.append(f"{worker.name} goes on with weights that are those of no boundary")

    # --- processes ---

    def start_processes(
        self, *, envs: Mapping[int, Mapping[str, str]], entrypoint: str = "", args: Any = None, **_: Any
    ) -> Started:
        children = {}
        for local, env in envs.items():
            children[local] = child = Process(self.world, f"rank {env['RANK']}", host=f"node{self.nodes[0].number}")
            self._become(child, env)
        return _Started(children, entrypoint, args, {local: dict(env) for local, env in envs.items()})

    def _become(self, child: Process, env: Mapping[str, str]) -> None:
        """A process that is told its rank runs the program."""
        node = self.nodes[0]
        agent = node.agents[-1]
        rank, size, restarts = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
        generation = int(env.get("MINDX_REJOIN", 0))
        attempt = self._group((len(node.agents) - 1, restarts, 0), size)
        for other in agent.workers:
            if other.rank == rank and other.process.is_alive:
                self.wrong.append(f"rank {rank} is started, and {other.name} lives")
        name = f"rank {rank}" + f" for recovery {generation}" * bool(generation)
        child.name = f"{name} (pid {child.pid})"
        worker = _Rank(self, node, attempt, rank, size, child, generation=generation)
        worker.slow_s, self._next_slow_s = (self._next_slow_s, 0.0) if generation else (0.0, self._next_slow_s)
        agent.workers.append(worker)
        self.pages[self._page(rank)] = worker
        if generation == 0:
            attempt.admit(worker, restarts)
        if child.main is None:
            child.start(worker.run)
        self.world.note(f"the agent starts {child.name}, restart {restarts}")

    def _page(self, rank: int) -> Path:
        return Path(f"/simulated/{self.nodes[0].agent.pid}/rank_{rank}.page")

    def show_page(self, worker: _Rank) -> None:
        self.pages[self._page(worker.rank)] = worker

    def fork(self, env: Mapping[str, str]) -> Process | None:
        is_spare = PIPE_VARIABLE in env and "RANK" not in env
        if self._no_starts and not is_spare:
            self._no_starts -= 1
            return None
        child = Process(self.world, "new process", host=f"node{self.nodes[0].number}")
        if is_spare:
            self._start_spare(child, env)
        else:
            self._become(child, env)
        return child

    def _start_spare(self, child: Process, env: Mapping[str, str]) -> None:
        agent, pipe = self.nodes[0].agents[-1], env[PIPE_VARIABLE]
        child.name = f"spare (pid {child.pid})"

        def run() -> int:
            self.world.sleep(self.start_s)
            self.files[pipe + WAITS] = []
            content = self.files[pipe]
            self.world.wait(lambda: bool(content), on=(self.topic,))
            variables, *_ = json.loads(content[0])
            self._become(child, {**env, **variables})
            return agent.workers[-1].run()

        agent.process.on_end.append(child.kill)
        child.start(run)

    # --- parts of modules ---

    @contextmanager
    def replaced(self) -> Iterator[None]:
        mine = self.rank_of_process
        empty = SimpleNamespace(
            abort=lambda: None, fence=lambda: True, wait_aborted=lambda: "", look=lambda: None, is_used=False
        )
        groups = SimpleNamespace(devices=empty, reset_ddp=lambda ddp: "", connect=self._connect)
        with ExitStack() as stack:
            stack.enter_context(super().replaced())
            stand_ins: dict[Any, dict[str, Any]] = {
                launcher: {"ForkedStart": lambda *_, **__: _Forks(self)},
                supervisor: {
                    "host_store": self._host_store,
                    "PrefixStore": PrefixStore,
                    "board_key": lambda: _KEY,
                },
                replacements: {"os": _Os(self.files, self.topic)},
                torch.distributed: {"PrefixStore": PrefixStore},
                rejoin_member: {
                    "groups": groups,
                    "SocketsPart": lambda: _Sockets(mine()),
                    "Failures": _Failures,
                    "board_key": lambda: _KEY,
                    "open_connection": self._open_connection,
                    "share_orders": lambda *_: None,
                    "joiner": SimpleNamespace(end_setup=lambda: mine().reach("join")),
                },
                running: {
                    "find_member": lambda *_, **__: mine().member,
                    "current_ranks": lambda ranks: ranks,
                    "RankInfo": SimpleNamespace(from_env=lambda: None),
                    "has_been_one": lambda: False,
                    "ddp_modules": lambda targets: (),
                    "ObjectsBeforeCall": lambda targets: SimpleNamespace(
                        look_at_groups=lambda: None, put_back=lambda: None
                    ),
                    "Checkpoint": lambda *parts: parts,
                    "release_signals": lambda: None,
                    "Host": lambda *_, **asked: _Host(mine(), **asked),
                    "groups": groups,
                },
            }
            stack.enter_context(instead_of(stand_ins))
            yield

    def _host_store(self, address: str) -> Any:
        """By the agent, for a new attempt."""
        self.stores.host(self.nodes[0].agent)
        assert self.stores.server is not None
        store: Any = Connection(_OwnStore(self.world, self.stores.server))  # type: ignore[arg-type]
        store.port = self.world.number()
        return store

    def _open_connection(self) -> Any:
        return Connection(self.stores.connect(10.0))  # type: ignore[arg-type]

    def _connect(self, store: PrefixStore, rank: int, timeout_s: float) -> int:
        """`groups.connect`: the members of a generation tell each other their addresses."""
        worker, world = self.rank_of_process(), self.world
        worker.reach("connect")
        group = self.group(worker.attempt, int(store.prefix))
        end, worker.is_connecting = world.now + timeout_s, True
        try:
            store.set(f"gloo/{rank}", "an address")
            with suppress(DistStoreError):
                store.wait([f"gloo/{each}" for each in range(group.world_size)], timedelta(seconds=timeout_s))
            group.workers[rank] = worker
            group.topic.tell()
            if not world.wait(lambda: len(group.workers) == group.world_size, end - world.now, on=(group.topic,)):
                raise RuntimeError("Gloo connectFullMesh failed: timed out")
        finally:
            worker.is_connecting = False
        return 1

    # --- faults ---

    def reach(self, stage: str, worker: _Rank) -> None:
        """`worker` is there now, and runs."""
        self.world.note(f"{worker.name}: {stage}")
        self.faults.event(stage, worker)
        self.world.give_way()  # it may be dead

    def _strike_at(self, fault: Fault, worker: _Rank) -> None:
        world, agent = self.world, self.nodes[0].agents[-1]
        world.note(fault.name)
        self.failures += 1
        others = [each for each in agent.workers if each.process.is_alive and each is not worker]
        match fault.kind:
            case "kill":
                worker.process.kill()
            case "kill other" if others:
                others[fault.local_rank % len(others)].process.kill()
            case "sigterm":
                self.tell_to_stop(self.nodes[0])
            case "sigterm worker":
                self.system.tell(worker.process, signal.SIGTERM)
            case "kill agent":
                super().strike(fault)
            case "freeze":
                worker.process.freeze(fault.length_s)
            case "unfit":
                worker.process.end(UNFIT)
            case "cannot":
                worker.problem = "it cannot"

    def strike(self, fault: Fault, *who: _Rank) -> None:
        if who:
            self._strike_at(fault, *who)
            return
        agent = self.nodes[0].agents[-1]
        living = [each for each in agent.workers if each.process.is_alive and isinstance(each, _Rank)]
        match fault.kind:
            case "no start":
                self._no_starts = 3
            case "slow start":
                self._next_slow_s = fault.length_s
            case "slow store" if self.stores.server is not None:
                server, before = self.stores.server, self.stores.server.slowest_s
                server.slowest_s = 0.5
                self.world.at(self.world.now + fault.length_s, lambda: setattr(server, "slowest_s", before))
                self.world.note(fault.kind)
                return
            case "reset" if living:
                process = living[fault.local_rank % len(living)].process
                for line in self.stores.lines:
                    line.is_broken = line.is_broken or line.process is process
                    line.topic.tell()
            case "kill worker":
                if len(self.plan.faults) == 1:
                    self._must_be_in_place = all(map(self._can_go_on, living)) and len(living) == self.plan.workers
                super().strike(fault)
                return
            case _:
                super().strike(fault)
                return
        self.failures += 1
        self.world.note(fault.kind)

    def _can_go_on(self, rank: _Rank) -> bool:
        """A death of another rank is mended in place now."""
        phase = None if rank.status is None else rank.status.phase
        is_early = rank.step < 1 or rank.is_ending or self.plan.has_late_collective
        return rank.is_open and phase == WorkerPhase.TRAINING and not is_early and rank.step < self.steps - 1

    # --- what must hold ---

    def hear_event(self, agent: Agent, event: str, fields: Mapping[str, Any]) -> None:
        if event == "rejoin":
            key = {"agent": self.nodes[0].agents.index(agent), "attempt": agent.restarts}
            self.told.append({**key, "now": self.world.now, **fields})
            self._check_told(agent, fields)
        elif event in ("restart", "agent_end"):
            for told in self.told:
                told.setdefault("then", f"{event}: {fields.get('outcome') or ''}")

    def _check_told(self, agent: Agent, fields: Mapping[str, Any]) -> None:
        """What must be true at the moment at which a recovery is told of."""
        number, server = fields["generation"], self.stores.server
        if fields["outcome"] == IN_PLACE and server is not None:
            ready = [key for key in server.values if f"/{number}/ready/" in key]
            if len(ready) < self.plan.workers:
                self.wrong.append(f"recovery {number} is told of as a success, and {len(ready)} ranks are back")
        newest = {worker.rank: worker.process for worker in agent.workers}.values()
        gone = [each.name for each in newest if not each.is_alive and each.ended_at < self.world.now - _HEARD_S]
        if gone and "--rejoin-timeout" in fields["reason"] and "freeze agent" not in self._kinds:
            self.wrong.append(f"recovery {number} has waited for {gone[0]}, which is dead")

    def faults_of(self, outcome: Outcome) -> list[str]:
        wrong = super().faults_of(outcome)
        if outcome.stuck:
            return wrong
        if outcome.seconds > _MOST_S + sum(fault.length_s for fault in self.plan.faults):
            wrong.append(f"it takes {outcome.seconds:.0f} s")
        if self._must_be_in_place and any(agent.restarts for agent in outcome.agents):
            wrong.append("a single death costs a restart")
        seen = Counter((told["agent"], told["attempt"], told["generation"]) for told in self.told)
        wrong += [f"recovery {key} is told of {number} times" for key, number in seen.items() if number > 1]
        for told in self.told:
            then, stopped_at = told.get("then", ""), outcome.agents[told["agent"]].told_to_stop_at
            if told["outcome"] == IN_PLACE:
                wrong += self._lies_of(told)
            elif self._has_gone_on(told):
                wrong.append(f"{told['generation']} is told of as {told['outcome']}, and all have gone on")
            elif told["outcome"] == STOPPED and then.startswith("restart"):
                wrong.append(f"{told['generation']} is told of as stopped, and the job is restarted")
            elif (
                told["outcome"] == RESTART and "stopped" in then and (stopped_at or told["now"]) < told["now"] - _TURN_S
            ):
                wrong.append(f"{told['generation']} is told of as a restart, and the job has stopped")
        return wrong

    def _has_gone_on(self, told: Mapping[str, Any]) -> bool:
        """Whether all ranks have taken a step in the group of this recovery."""
        group = self.groups.get((told["agent"], told["attempt"], told["generation"]))
        there = [ranks for (which, _), ranks in self.arrived.items() if which == id(group)]
        return any(len(ranks) == self.plan.workers for ranks in there)

    def _lies_of(self, told: Mapping[str, Any]) -> list[str]:
        """What is not true of a recovery that is said to have succeeded."""
        key = told["agent"], told["attempt"], told["generation"]
        group = self.groups.get(key)
        verdict = None if group is None else next(iter(group.verdicts.values()), None)
        if group is None or verdict is None or len(group.came["entered"]) < group.world_size:
            return [f"recovery {key} is told of as a success, and not all have come back"]
        wrong = []
        for name, true in (
            ("ranks", verdict.dead), ("behind", verdict.behind), ("donor", verdict.donor), ("step", verdict.step)
        ):  # fmt: skip
            if told[name] != true:
                wrong.append(f"recovery {key}: {name} is {told[name]}, and it was {true}")
        said = {each["rank"]: each["pid"] for each in told["stood_in"]}
        true_pids = {rank: group.workers[rank].process.pid for rank in verdict.dead}
        if said != true_pids:
            wrong.append(f"recovery {key}: {said} stood in, and it was {true_pids}")
        return wrong


def play(plan: agents.Plan) -> Outcome:
    """Play one schedule to its end. Any number, one after the other."""
    return agents.play(plan, InPlaceJob)
