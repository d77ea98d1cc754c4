"""A dynamic cluster in a simulated world: its processes die, freeze, are cut off and are started again, at any moment.

Real are the scheduler's loop, its table, the workers' connections and their ends. Simulated are the network, the folder
of the table, the training with its collectives and its guard, ``exec``, and a person who starts again what has died.
`play` plays one schedule.

What must hold in every schedule:

* A rank of a generation is trained by one process, in a group of all ranks of that generation.
* A node id keeps its rank, whatever dies. After a disk has lied, the rank that the older table knows.
* Every process ends, within bounded time after the last fault. The scheduler's 0 means that every worker has finished.

and, as `Plan.expects_finish` and `Plan.is_gentle` say:

* With recovery the job finishes once the faults are over and a process runs for every place.
* Where nothing dies that counts, all finish in the first generation.
* Without recovery a death is the end: nothing is trained in a second generation, and the scheduler does not say 0.
"""

from __future__ import annotations

import json
import logging
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import mindx_elastic.cluster.connection as connection_module
import mindx_elastic.cluster.scheduler as scheduler_module
import mindx_elastic.cluster.worker_end as worker_end_module
import mindx_elastic.guard.active as active_module
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.cluster.connection import SchedulerConnection
from mindx_elastic.cluster.messages import Group
from mindx_elastic.cluster.scheduler import Scheduler
from mindx_elastic.cluster.worker_end import WorkerEnd
from mindx_elastic.config import ClusterSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.stop_cause import StopCause
from mindx_elastic.errors import SaveError, UsageError
from tests.simulation.schedules import Fault, Faults, Played, quiet
from tests.simulation.system import System
from tests.simulation.world import Process, Stuck, Topic, World, instead_of

__all__ = ["KINDS", "Outcome", "Plan", "plan_of", "play"]

_SCHEDULER, _ADDRESS = "scheduler", ("scheduler", 8118)
_FORMATION_S = 150.0
_BOUND_S, _UNTOLD_S = 400.0, 2200.0
"""In which all has ended after the faults; and where the scheduler was lost that knew of a death before them."""
_FINISH_S = 150.0
"""In which a job with recovery has finished after them, its training apart."""
_INIT_S = 1800.0
"""What ``init_process_group`` waits for a rank that does not come."""
_HANG_S = 60.0
"""What a collective waits for a dead rank that it does not see."""
_NOTICED_S = 0.4
"""When a worker notices that its connection is lost; when a machine without power is back."""
_KILLED = -signal.SIGKILL
_BEGUN_AGAIN = -1000
"""Exit code of what ``exec`` has replaced."""


KINDS = {
    "reset": True,
    "old connection": True,
    "slow network": True,
    "slow disk": True,
    "full disk": True,
    "freeze scheduler": True,
    "kill scheduler": True,
    "vanish scheduler": True,
    "stranger": True,
    "twice": True,
    "clock jump": True,
    "kill": False,
    "vanish": False,
    "freeze": False,
    "cut off": False,
    "cut off up": False,
    "cut off down": False,
    "exception": False,
    "sigterm": False,
    "sigterm scheduler": False,
    "lost table": False,
    "lying disk": False,
}
"""What can happen, and whether a job with recovery finishes in its first generation all the same."""
_FORGETS = {"lost table", "lying disk"}
_ENDS_SCHEDULER = {"kill scheduler", "vanish scheduler", "sigterm scheduler"}
_ON = ("write begins", "write", "connect", "group", "train", "again", "finish", "end", "death")


@dataclass(frozen=True)
class Plan:
    """One schedule."""

    seed: int
    size: int
    recovery: bool
    steps: int
    step_s: float
    node_ids: tuple[str, ...]
    """Of the places; empty: the scheduler names the process."""
    hosts: tuple[int, ...]
    """The computers on which they are."""
    has_guard: bool
    collectives: str
    """What a collective does whose peer is dead: ``fails``, or ``hangs`` (with a guard)."""
    heartbeat_s: float
    key: bytes | None
    faults: tuple[Fault, ...]

    @property
    def calm_at(self) -> float:
        """When all faults are over."""
        last = max((fault.at + fault.length_s for fault in self.faults), default=0.0)
        return 2.0 + last + (40.0 if any(fault.on for fault in self.faults) else 0.0)

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}

    @property
    def is_gentle(self) -> bool:
        return self.recovery and all(KINDS[kind] for kind in self.kinds)

    @property
    def forgets(self) -> bool:
        """Whether a scheduler that is started again knows nothing of the first one's job."""
        return bool(_FORGETS & self.kinds) or (not self.recovery and bool(self.kinds & _ENDS_SCHEDULER))

    @property
    def expects_finish(self) -> bool:
        return self.recovery and not self.kinds & {"sigterm", *_FORGETS}


@dataclass
class Outcome(Played):
    """What a schedule came to."""

    job: _Job = field(kw_only=True)

    def count(self) -> Counter[str]:
        counts = super().count() + Counter(groups=len(self.job.meetings), finished=int(self.job.scheduler_code == 0))
        counts.update(f"struck: {kind}" for kind in self.job.struck)
        counts["late connections"] = self.job.network.num_late
        return counts


def plan_of(seed: int) -> Plan:
    """A schedule from its seed."""
    random = Random(seed)
    size = random.choice((1, 2, 2, 2, 3, 3, 4, 8))
    steps, step_s = random.randint(1, 8), random.choice((0.01, 0.3, 1.5))
    recovery = random.random() < 0.8
    names = [str(number) for number in range(size)]
    if (naming := random.random()) < 0.3:
        names = random.sample(["w-10", "w-2", "a", "b", "0", "1", "x", "00"], size)
    elif naming < 0.5:
        names = [random.choice((name, "", "")) for name in names]
    has_guard = random.random() < 0.7
    kinds = [kind for kind, is_gentle in KINDS.items() if is_gentle or random.random() < 0.7]
    if random.random() < 0.3:
        kinds = [kind for kind in kinds if KINDS[kind]]
    moments = [random.uniform(0.0, 3.0 + 1.2 * steps * step_s) for _ in range(2)]
    faults = []
    for _ in range(random.randint(0, 5)):
        kind = random.choice(("kill", *kinds) if "kill" in kinds else kinds)
        place, length_s = random.randrange(size), random.choice((0.05, 0.5, 2.0, 4.0, 8.0, 15.0))
        if random.random() < 0.4:
            on = random.choice(_ON), random.randint(1, 2 * size)
            faults.append(Fault(kind, place, at=random.choice((0.0, 0.002, 0.2)), length_s=length_s, on=on))
        else:
            at = random.choice(moments) + random.choice((0.0, random.uniform(-0.02, 0.02), random.uniform(-2, 2)))
            faults.append(Fault(kind, place, at=max(0.0, at), length_s=length_s))
    return Plan(
        seed,
        size,
        recovery,
        steps,
        step_s,
        tuple(names),
        tuple(random.randrange(random.choice((1, 2, size))) for _ in range(size)),
        has_guard,
        random.choice(("fails", "hangs")) if has_guard else "fails",
        heartbeat_s=random.choice((2.0, 5.0)),
        key=b"a key of the job" if random.random() < 0.2 else None,
        faults=tuple(faults),
    )


# --- what is simulated of a worker ---


@dataclass(eq=False)
class _Meeting:
    """The processes of one group: what torch's store and its collectives know."""

    size: int
    host: _Worker | None
    topic: Topic
    ranks: dict[int, _Worker] = field(default_factory=dict)
    arrived: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    dead: set[_Worker] = field(default_factory=set)

    def tell_of_death(self, worker: _Worker) -> None:
        self.dead.add(worker)
        self.topic.tell()


class _Worker(Process):
    """One process of a place, until it ends or begins again."""

    def __init__(self, job: _Job, place: int, env: dict[str, str], like: _Worker | None = None) -> None:
        number = job.world.number()
        again = f"again, process {number}" if like is None else f"in place, process {like.pid}"
        super().__init__(
            job.world,
            f"worker {place} ({again})",
            node=f"worker {place}",
            pid=None if like is None else like.pid,
            host=f"host{job.plan.hosts[place]}",
        )
        self.job, self.place, self.env = job, place, env
        self.sys = SimpleNamespace(exit=self._exit, last_value=None)
        self.at_exit: list[Callable[[], None]] = []
        self.topic = Topic(job.world)
        self.noted: StopCause | None = None
        self.alarm: StopCause | None = None
        """What its guard has heard."""
        self.is_guarded = False
        self.fails = False
        self.meeting: _Meeting | None = None
        self.rank = -1
        if like is not None:
            self.frozen_until = like.frozen_until

    def _exit(self, status: object = None) -> NoReturn:
        raise SystemExit(status)

    def run(self) -> int:
        """As a program that calls `cluster.init`, trains and ends."""
        job = self.job
        job.event("connect")
        connection = SchedulerConnection(job.settings("MS_WORKER", self.env.get("MS_NODE_ID", "")), job.plan.key)
        end = WorkerEnd(connection, self.env)
        code = 0
        try:
            connection.start()
            group = connection.wait_for_group()
            job.event("group")
            end.watch()
            self._train(connection, end, group)
        except SystemExit as leaving:
            code = int(str(leaving.code))
        except (UsageError, RuntimeError, ValueError) as error:
            self.sys.last_value, code = error, 1
            job.world.note(f"{self.name}: {type(error).__name__}: {error}")
        self.is_guarded = False
        job.event("end")
        for act in self.at_exit:
            act()
        return code

    def _train(self, connection: SchedulerConnection, end: WorkerEnd, group: Group) -> None:
        job, world, plan = self.job, self.job.world, self.job.plan
        # A scheduler that has forgotten some counts their generations again, with other stores.
        name, rank = (connection.job, group.generation, group.port if plan.forgets else 0), group.rank
        meeting, self.rank = job.meet(name, group), rank
        self.meeting = meeting
        if meeting.host is None or not meeting.host.is_alive:
            raise RuntimeError("Connection refused")
        job.check(meeting.ranks.setdefault(rank, self) is self, f"two processes are rank {rank} of {name}")
        job.check(group.size == plan.size, f"a group of {group.size}")
        if not plan.forgets:  # else a group that is heard late may be of a table that was lost since
            job.keep_rank(connection.job, connection.node_id, rank)
        self.on_end.append(lambda: meeting.tell_of_death(self))
        world.sleep(world.random.uniform(0.0, 0.3))
        meeting.topic.tell()
        self._wait(meeting, lambda: len(meeting.ranks) == plan.size, "Connection closed by peer", limit_s=_INIT_S)
        end.has_joined()
        self.is_guarded = plan.has_guard
        job.check(meeting.host is meeting.ranks[0], "the store of the group is not its rank 0's")
        job.event("train")
        world.note(f"{self.name} trains as rank {rank} of generation {group.generation}")
        for step in range(job.boundary + 1, plan.steps + 1):
            self._sleep(plan.step_s * world.random.uniform(0.5, 1.0))
            if self.fails:
                raise ValueError("broken")
            arrived = meeting.arrived[step]
            arrived.add(rank)
            if len(arrived) == plan.size:
                meeting.topic.tell()
            self._wait(meeting, lambda arrived=arrived: len(arrived) == plan.size, "Connection reset by peer")  # type: ignore[misc]
            job.boundary = max(job.boundary, step)
        self._sleep(world.random.choice((0.0, 0.0, 2.0)))
        job.finished.add(rank)
        job.event("finish")

    def _sleep(self, seconds: float) -> None:
        self.job.world.wait(lambda: self.alarm is not None, seconds, on=(self.topic,))
        self._obey()

    def _wait(
        self, meeting: _Meeting, condition: Callable[[], bool], error: str, *, limit_s: float | None = None
    ) -> None:
        """A collective."""

        def is_broken() -> bool:
            if limit_s is not None:  # only the store tells, and it is at the host
                return meeting.host in meeting.dead
            return bool(meeting.dead) and self.job.plan.collectives == "fails"

        self.job.world.wait(
            lambda: condition() or is_broken() or self.alarm is not None,
            limit_s or _HANG_S,
            on=(self.topic, meeting.topic),
        )
        self._obey()
        if not condition():
            raise RuntimeError(error)

    def _obey(self) -> None:
        """The guard saves and leaves."""
        if self.alarm is not None:
            self.job.world.sleep(self.job.world.random.choice((0.0, 0.5)))
            self.noted = self.alarm
            self.sys.exit(self.alarm.code)

    def hear(self, alarm: StopCause) -> bool:
        """Whether a guard is there to hear it."""
        if self.is_guarded:
            self.alarm = self.alarm or alarm
            self.topic.tell()
        return self.is_guarded

    def stop(self) -> None:
        """SIGTERM."""
        if not self.is_guarded or self.meeting is None:
            self.job.system.tell(self, signal.SIGTERM)
            return
        for each in self.meeting.ranks.values():
            each.hear(StopCause("signal", 143, "SIGTERM", each is self))

    def begin_again(self, env: dict[str, str]) -> NoReturn:
        """``exec``."""
        job, again = self.job, _Worker(self.job, self.place, env, like=self)
        if job.workers[self.place] is self:
            job.workers[self.place] = again
        job.seconds = [again if each is self else each for each in job.seconds]
        job.event("again")
        job.begin(again, job.world.random.choice((0.2, 1.0, 3.0)))
        self.exit(_BEGUN_AGAIN)


class _Here:
    """A part of the process that runs: its ``sys``, its ``atexit``."""

    def __init__(self, find: Callable[[], Any]) -> None:
        vars(self)["_find"] = find

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_find"](), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_find"](), name, value)


class _TableFile:
    """Of one scheduler: the table in the job's folder."""

    path = Path("recovery/scheduler.json")

    def __init__(self, job: _Job) -> None:
        self._job, self._owner = job, job.network.process()
        topics = () if job.lock is None else (job.lock.topic,)
        if not job.world.wait(lambda: job.lock is None or not job.lock.is_alive, 5.0, on=topics):
            raise UsageError("another scheduler runs there")
        job.lock = self._owner

    def read(self) -> Any:
        return json.loads(self._job.disk) if self._job.disk else None

    def damaged(self, why: str) -> UsageError:
        return UsageError(f"not the table of a scheduler ({why})")

    def write(self, content: Mapping[str, Any]) -> None:
        job = self._job
        job.event("write begins")
        job.world.sleep(job.disk_s * job.world.random.random())
        if job.disk_is_full:
            raise SaveError("no space left on device")
        job.disk = json.dumps(content)
        job.keep_ranks(content)
        job.event("write")

    def close(self) -> None:
        self._job.lock = None


# --- one schedule ---


class _Job:
    """All of it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world = plan, World(plan.seed, most_switches=10_000 * plan.size)
        self.system = System(self.world)
        self.network = self.system.network
        self.workers: list[_Worker] = []
        """By place: what runs there, or has run there last."""
        self.seconds: list[_Worker] = []
        """Processes that were started with a node id of another one."""
        self.scheduler: Process | None = None
        self.scheduler_code: int | None = None
        """What the job's end has made of it; None: it did not come so far."""
        self.ended_at = 0.0
        self.disk, self.disk_s, self.disk_is_full = "", 0.002, False
        self.lock: Process | None = None
        self.stores: dict[tuple[str, int], _Worker] = {}
        self.meetings: dict[tuple[str, int, int], _Meeting] = {}
        self.ranks: dict[tuple[str, str], int] = {}
        """By job and node id: those that a table has had, or a worker was told."""
        self.boundary = 0
        self.finished: set[int] = set()
        self.is_calm = False
        self.calm_boundary = self.num_calm_finished = 0
        self.struck: list[str] = []
        self.wrong: list[str] = []
        self.faults = Faults(self.world, plan, self.strike)
        self.event = self.faults.event
        """Something to which faults can be bound."""

    def check(self, holds: bool, text: str) -> None:
        if not holds and text not in self.wrong:
            self.wrong.append(text)

    def keep_rank(self, job: str, node_id: str, rank: int) -> None:
        known = self.ranks.setdefault((job, node_id), rank)
        self.check(known == rank, f"node id {node_id} was rank {known}, and is {rank}")

    def keep_ranks(self, table: Mapping[str, Any]) -> None:
        for place in table["places"]:
            if place["rank"] is not None:
                self.keep_rank(table["job"], place["node_id"], place["rank"])

    def settings(self, role: str, node_id: str) -> ClusterSettings:
        plan = self.plan
        host, port = _ADDRESS
        return ClusterSettings(
            role=role,
            size=plan.size,
            host=host,
            port=port,
            node_id=node_id,
            recovery=plan.recovery,
            recovery_path=Path("recovery"),
            heartbeat_s=plan.heartbeat_s,
            formation_s=_FORMATION_S,
        )

    def meet(self, name: tuple[str, int, int], group: Group) -> _Meeting:
        host = self.stores.get((group.host, group.port))
        return self.meetings.setdefault(name, _Meeting(group.size, host, Topic(self.world)))

    def host_store(self, address: str, **_: object) -> SimpleNamespace:
        worker, port = self.here(), self.world.number()
        self.stores[address, port] = worker
        self.world.sleep(self.world.random.choice((0.0, 0.3)))
        return SimpleNamespace(port=port)

    def here(self) -> _Worker:
        process = self.world.process
        assert isinstance(process, _Worker)
        return process

    # --- what begins ---

    def begin(self, worker: _Worker, after_s: float) -> None:
        self.world.at(self.world.now + after_s, lambda: worker.start(worker.run) if worker.is_alive else None)

    def start_worker(self, place: int, *, is_second: bool = False) -> None:
        """As a person would, by hand."""
        node_id = self.plan.node_ids[place]
        worker = _Worker(self, place, {"MS_NODE_ID": node_id} if node_id else {})
        if is_second:
            self.seconds.append(worker)
        else:
            self.workers[place : place + 1] = [worker]
        self.begin(worker, self.world.random.uniform(0.0, 1.0))

    def start_scheduler(self) -> None:
        process = self.scheduler = Process(
            self.world, f"scheduler {self.world.number()}", node=_SCHEDULER, host="host0"
        )
        process.start(self._schedule)

    def _schedule(self) -> int:
        try:
            scheduler = Scheduler(self.settings("MS_SCHED", "sched"), self.plan.key)
        except UsageError as error:
            self.world.note(f"scheduler: {error}")
            return 1
        code = scheduler.run()
        if scheduler.table.outcome is not None:
            self.scheduler_code, self.ended_at = code, self.world.now - 1000.0
            streams = [s for s in self.network.streams if s.process is self.network.process() and not s.is_closed]
            self.check(
                not streams or "stranger" in self.plan.kinds or not self.plan.is_gentle,
                f"the scheduler has finished with {len(streams)} connections",
            )
        return code

    def hand(self) -> int:
        """The person who starts again what has ended, when the faults are over; and sees the end of all."""
        world, plan = self.world, self.plan
        while True:
            world.sleep(0.5)
            if world.now > 1000.0 + plan.calm_at and not self.is_calm:
                self._calm_down()
            scheduler = self.scheduler
            if scheduler is None:
                continue
            running = [each for each in (*self.workers, *self.seconds) if each.exit_code is None]
            is_over = self.scheduler_code is not None
            if self.is_calm and plan.recovery and not is_over:
                self._start_scheduler_again()
                for place, worker in enumerate(self.workers):
                    if worker.exit_code not in (None, 0, 143):
                        self.start_worker(place)
            elif self.is_calm and not running and (is_over or not scheduler.is_alive or not plan.recovery):
                self.system.tell(scheduler, signal.SIGTERM)
                if not scheduler.is_alive:
                    return 0

    def _calm_down(self) -> None:
        self.is_calm, self.disk_is_full, self.disk_s = True, False, 0.002
        self.network.slowest_s = 0.002
        self.calm_boundary, self.num_calm_finished = self.boundary, len(self.finished)
        self.world.note("the faults are over")

    # --- what goes wrong ---

    def strike(self, fault: Fault) -> None:
        world, network = self.world, self.network
        worker, scheduler, until = self.workers[fault.place], self.scheduler, world.now + fault.length_s
        if scheduler is None or self.scheduler_code is not None or until > 1000.0 + self.plan.calm_at:
            return
        if fault.kind == "twice" and worker.meeting is None:
            return  # else the first one may come second
        self.struck.append(fault.kind)
        world.note(f"FAULT: {fault.kind} at place {fault.place} for {fault.length_s:g} s")
        match fault.kind:
            case "reset":
                network.reset(worker.node)
            case "old connection":
                network.leave_behind(worker.node, min(_NOTICED_S, 0.5 * fault.length_s), fault.length_s)
            case "lying disk":
                world.at(until, partial(self._lose_power, self.disk))
            case "slow network":
                network.slowest_s = 0.05
                world.at(until, lambda: setattr(network, "slowest_s", 0.002))
            case "slow disk":
                self.disk_s = min(fault.length_s, 2.0)
                world.at(until, lambda: setattr(self, "disk_s", 0.002))
            case "full disk":
                self.disk_is_full = True
                world.at(until, lambda: setattr(self, "disk_is_full", False))
            case "freeze scheduler":
                scheduler.frozen_until = until
            case "freeze":
                worker.frozen_until = until
            case "kill scheduler" | "vanish scheduler" | "lost table":
                network.vanish(scheduler, fault.length_s) if fault.kind == "vanish scheduler" else scheduler.kill()
                self.disk = "" if fault.kind == "lost table" else self.disk
                world.at(until, self._start_scheduler_again)
            case "sigterm scheduler":
                self.system.tell(scheduler, signal.SIGTERM)
                world.at(until, self._start_scheduler_again)
            case "kill" | "vanish":
                network.vanish(worker, fault.length_s) if fault.kind == "vanish" else worker.kill()
                world.at(until, lambda: self._start_again(fault.place))
            case "clock jump":
                each = scheduler if world.random.random() < 0.5 else worker
                each.clock.ahead_s += world.random.choice((-1, 1)) * 180 * fault.length_s
            case "exception":
                worker.fails = True
            case "sigterm":
                worker.stop()
            case "cut off" | "cut off up" | "cut off down":
                if fault.kind != "cut off down":
                    network.cut(worker.node, _SCHEDULER, fault.length_s)
                if fault.kind != "cut off up":
                    network.cut(_SCHEDULER, worker.node, fault.length_s)
            case "twice":
                self.start_worker(fault.place, is_second=True)
            case "stranger":
                stranger = Process(world, "a stranger", node="stranger", host="far")
                stranger.start(lambda: self._talk(fault.length_s))

    def _lose_power(self, flushed: str) -> None:
        """Of the scheduler's machine, whose disk has kept nothing since `flushed`."""
        if self.scheduler is not None and self.scheduler.is_alive and self.scheduler_code is None:
            self.world.note("the scheduler's machine loses its power, and its disk has lied")
            self.struck.append("older table" if flushed != self.disk else "same table")
            self.network.vanish(self.scheduler, _NOTICED_S)
            self.disk = flushed
            self.ranks.clear()  # what no disk has kept is given anew
            if flushed:
                self.keep_ranks(json.loads(flushed))
            self.world.at(self.world.now + _NOTICED_S, self._start_scheduler_again)

    def _talk(self, length_s: float) -> int:
        random = self.world.random
        try:
            stream = self.network.connect(_ADDRESS, 3.0)
            stream.sendall(random.choice((b"", b"GET / HTTP/1.1\r\n\r\n", b"MXE1\0\0\0\7garbage", b"MXE1\xff\0\0\0")))
            self.world.sleep(length_s)
        except OSError:
            return 1
        return 0

    def _start_scheduler_again(self) -> None:
        if self.scheduler is None or self.scheduler.is_alive or self.scheduler_code is not None:
            return
        outcome = json.loads(self.disk)["outcome"] if self.disk else None
        if outcome is None:
            self.start_scheduler()
        else:  # what would be started now is another job
            self.scheduler_code, self.ended_at = outcome["code"], self.world.now - 1000.0

    def _start_again(self, place: int) -> None:
        worker = self.workers[place]
        if worker.exit_code == _KILLED and not self.is_calm and self.scheduler_code is None:
            self.start_worker(place)


@contextmanager
def _told(world: World) -> Iterator[None]:
    """The package's log lines are part of the story."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            process = world.process
            world.note(f"{process.name if process else '?'} says: {record.getMessage()}")

    handler, before = Handler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _stand_ins(job: _Job) -> AbstractContextManager[None]:
    """What the package's modules find in place of the system and the guard."""
    here = job.here

    def report_death(rank: int) -> bool:
        job.event("death")
        return here().hear(StopCause("peer", EXIT_TEMPORARY, f"rank {rank} is dead", is_own=False))

    def request_stop(why: str, code: int) -> bool:
        return here().hear(StopCause("request", code, why, is_own=True))

    program = SimpleNamespace(begin_again=lambda env: here().begin_again(env))
    return instead_of(
        {
            connection_module: {"host_store": job.host_store, "own_space": lambda: here().host},
            scheduler_module: {"TableFile": lambda folder: _TableFile(job)},
            worker_end_module: {
                "SameProgram": lambda: program,
                "sys": _Here(lambda: here().sys),
                "atexit": _Here(lambda: SimpleNamespace(register=here().at_exit.append)),
                "logging": SimpleNamespace(shutdown=lambda: None),
                "noted_stop_cause": lambda: here().noted,
                "add_last_act": lambda act: None,
                "flush_output": lambda: None,
                "report_death": report_death,
            },
            active_module: {"request_stop": request_stop},
        }
    )


def play(plan: Plan, *, tells: bool = False) -> Outcome:
    """Play one schedule to its end. Any number, one after the other. `tells`: with the package's log lines."""
    job = _Job(plan)
    outcome, world = Outcome(plan, job=job), job.world
    with ExitStack() as stack:
        stack.enter_context(world.replaced(job.system.stand_ins))
        stack.enter_context(_stand_ins(job))
        stack.enter_context(_told(world) if tells else quiet())
        for place in range(plan.size):
            job.start_worker(place)
        world.at(world.now + world.random.choice((0.0, 0.5, 2.0)), job.start_scheduler)
        job.faults.begin()
        Process(world, "hand", node="hand", host="far").start(job.hand)
        stuck = ""
        try:
            world.run(until=1000.0 + plan.calm_at + (_UNTOLD_S if plan.forgets else _BOUND_S))
        except Stuck as error:
            stuck = str(error)
        outcome.messages = job.network.messages
        outcome.take(world)
    outcome.wrong = [*job.wrong, *([stuck] if stuck else _faults_of(outcome))]
    return outcome


def _faults_of(outcome: Outcome) -> list[str]:
    """What does not hold at the end."""
    plan, job = outcome.plan, outcome.job
    codes = [worker.exit_code for worker in job.workers]
    wrong = []
    if job.scheduler_code == 0 and len(job.finished) < plan.size:
        wrong.append(f"the scheduler says that all have finished, and only {sorted(job.finished)} have")
    if plan.is_gentle and (codes != [0] * plan.size or job.scheduler_code != 0 or len(job.meetings) != 1):
        wrong.append(f"exit codes {codes} and {job.scheduler_code} after {len(job.meetings)} groups, and nothing died")
    if plan.expects_finish and not job.num_calm_finished:
        late_s = job.ended_at - plan.calm_at - plan.steps * plan.step_s
        if job.finished and job.scheduler_code:
            pass  # a rank that is held for dead after the end of another one has no group any more
        elif len(job.finished) < plan.size or job.scheduler_code != 0:
            wrong.append(f"the job does not finish: exit codes {codes} and {job.scheduler_code}")
        elif late_s > _FINISH_S:
            wrong.append(f"the job finishes {late_s:.0f} s after the faults")
    if not plan.recovery and not plan.forgets and len(job.meetings) > 1:
        wrong.append("without recovery a second group was formed")
    return wrong


play_told = partial(play, tells=True)
"""With the package's log lines in the story."""
