"""A job of several nodes, each with an agent, in a simulated world: starts, failures, restarts, lost nodes, ends.

Real are the agent from the first meeting of the nodes to its exit code (`agent.launcher.run_job`, and with it the
supervisor, the attempt, workers, endings, restarts, membership, inbox), the table with its server, and torch's agent.
Simulated are the system (`system`), the network, the workers (`workers`), and what goes wrong.

What must hold in every schedule:

* It ends within the time that the pages give: every agent with a code, and with words for it if that is not 0.
* No rank of an attempt is started twice. All its workers have one world size, and have heard of as many restarts.
* An agent that says 0 has seen the end of a training: each rank of some attempt has passed the last step.
* No agent restarts more often than ``--max-restarts``, nor more often than things have failed.
* An agent that is told to stop is gone when the grace period is, and a moment for what it does then.

and where nothing but what can be mended happens (`Fault.kind` in `CURABLE`): the job finishes, with 0 on all nodes that
live. Where nothing happens but orders to stop, pauses and slow stores, all stop without a restart, or all finish.
"""

from __future__ import annotations

import math
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.agent.server import api as torch_agent
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.launcher.api import LaunchConfig

from mindx_elastic.agent import attempt, launcher, supervisor, workers
from mindx_elastic.agent import nodes as agent_nodes
from mindx_elastic.agent.inbox import SignalInbox, parse_signals
from mindx_elastic.agent.options import AgentOptions, Launch
from mindx_elastic.alarm.exit_codes import exit_code_of_signal
from mindx_elastic.cluster import connection
from mindx_elastic.cluster import scheduler as table_server
from mindx_elastic.cluster.table import Limits, Table
from mindx_elastic.core.status_page import Status, WorkerPhase
from tests.simulation.schedules import Fault, Faults, Played, quiet
from tests.simulation.system import System
from tests.simulation.workers import Meeting, Worker
from tests.simulation.world import Process, Stuck, World, instead_of

__all__ = [
    "CURABLE",
    "GENTLE",
    "KINDS",
    "Agent",
    "Forks",
    "Job",
    "Node",
    "Outcome",
    "Plan",
    "Started",
    "plan_of",
    "play",
]

GRACE_S, JOIN_S, HANG_S = 12.0, 30.0, 6.0
"""``--grace``, ``--rdzv-conf join_timeout=`` and ``--hang-timeout``."""
_PATIENCE_S = 300.0
"""What still runs then hangs, and nothing sees it: the platform sends SIGTERM to all agents."""
_PORT, _RUN_ID = 29400, "simulated"
GENTLE = frozenset({"sigterm agent", "sigterm all", "sigterm worker", "slow network", "freeze agent"})
"""They fail nothing."""
CURABLE = frozenset({"kill worker", "exception", "hang", "deaf", "freeze worker", "kill node", "kill agent", "reset",
                     "slow network", "old connection"})  # fmt: skip
"""A restart mends them: what is killed comes back."""
KINDS = (
    *sorted(GENTLE | CURABLE),
    "fault report",
    "lose node",
    "lose host",
    "partition",
    "join",
    "double sigterm",
    "clock jump",
    "host stands still",
    "slow disk",
)
_HARMLESS = frozenset({"reset", "slow network", "join", "old connection", "slow disk"})
_BACK_S = 3.0
"""A host that is back so soon is met."""
_NOTICED_S = 0.4
"""When a node notices that its connection is lost."""
_STANDSTILL_S = 10.0
"""A node that stands still for so long is lost."""


@dataclass(frozen=True)
class Plan:
    """One schedule."""

    seed: int
    nodes: int
    min_nodes: int
    workers: int
    """Of each node."""
    steps: int
    step_s: float
    start_s: float
    """From the start of a worker's process to its guard."""
    save_s: float
    after_s: float
    """What the script does after the training."""
    is_guarded: bool
    hears_connections: bool
    """A collective whose peer is dead fails; else it hangs."""
    host_is_apart: bool
    """The table is not served by the first node's agent."""
    max_restarts: int
    faults: tuple[Fault, ...]


@dataclass
class Outcome(Played):
    """What a schedule came to."""

    agents: list[Agent] = field(default_factory=list)
    late_connections: int = 0
    """`Network.num_late`."""

    def count(self) -> Counter[str]:
        counts = super().count() + Counter(restarts=sum(agent.restarts for agent in self.agents))
        counts.update(f"code: {agent.code}" for agent in self.agents)
        counts["late connections"] = self.late_connections
        told = [text for _, text in self.story if ": rejoin (" in text]
        counts.update("recovery: " + text.partition("outcome ")[2].partition(",")[0] for text in told)
        return counts


def plan_of(seed: int) -> Plan:
    """A schedule from its seed."""
    random = Random(seed)
    nodes = random.choice((1, 2, 2, 2, 3, 4))
    step_s, steps = random.choice((0.2, 0.5, 1.5)), random.randint(3, 10)
    start_s = random.choice((0.3, 1.5))
    last = 2 * start_s + 1.2 * steps * step_s
    moments = [random.uniform(0.0, last) for _ in range(2)]
    pool = random.choice((sorted(GENTLE), sorted(CURABLE), sorted(CURABLE), KINDS))
    faults = []
    for _ in range(random.randint(1, 4)):
        # Two things at nearly the same time meet oftener than two at any.
        at = max(0.1, random.choice(moments) + random.choice((0.0, random.uniform(-0.5, 0.5), random.uniform(0, 8))))
        length_s = random.choice((0.5, 3.0, 8.0, 20.0))
        kind, node = random.choice(pool), random.randrange(nodes)
        faults.append(Fault(kind, node, random.randrange(4), at=round(at, 3), length_s=length_s))
    return Plan(
        seed,
        nodes=nodes,
        min_nodes=random.choice((nodes, nodes, nodes, max(1, nodes - 1))),
        workers=random.choice((1, 1, 2, 4)),
        steps=steps,
        step_s=step_s,
        start_s=start_s,
        save_s=random.choice((0.01, 0.5, 3.0)),
        after_s=random.choice((0.0, 0.1, 3.0)),
        is_guarded=random.random() < 0.85,
        hears_connections=random.random() < 0.6,
        host_is_apart=random.random() < 0.3,
        max_restarts=random.choice((1, 3, 3)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


# --- one node and its agent ---


class Agent:
    """One run of the command on a node."""

    def __init__(self, node: Node, process: Process) -> None:
        self.node, self.process = node, process
        self.cause, self.outcome = "", ""
        self.has_begun = False
        """It takes signals."""
        self.restarts = 0
        self.is_hopeless = False
        self.told_to_stop_at: float | None = None
        self.frozen_since = 0.0
        self.workers: list[Worker] = []
        self.attempt, self.rank = -1, -1

    @property
    def was_there(self) -> bool:
        """Its workers have finished the job with the others."""
        meeting = self.workers[-1].meeting if self.workers else None
        return meeting is not None and len(meeting.finished) == meeting.world_size

    @property
    def code(self) -> int | None:
        return self.process.exit_code

    def emit(self, event: str, **fields: Any) -> None:
        """`EventLog.emit`; a process that has ended says no more, though the simulation unwinds its stack."""
        if not self.process.is_alive:
            return
        self.has_begun = True
        said = ", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, [], ""))
        self.node.job.world.note(f"{self.process.name}: {event} ({said[:200]})")
        self.node.job.hear_event(self, event, fields)
        if event == "restart":
            self.restarts = fields.get("restart", self.restarts)
        elif event == "crash_loop":
            self.is_hopeless = True
        elif event == "agent_end":
            self.cause, self.outcome = fields["reason"] or "", fields["outcome"]


class Node:
    """One machine; what its agent and its workers find on it."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.is_cut_off = False
        self.order: Mapping[str, Any] | None = None
        self.agents: list[Agent] = []
        self.report: Any = None
        """What the platform's fault file says."""

    @property
    def agent(self) -> Process:
        return self.agents[-1].process

    @property
    def processes(self) -> list[Process]:
        return [process for each in self.agents for process in (*(w.process for w in each.workers), each.process)]

    def start(self) -> None:
        name, node = f"agent {self.number}{'+' * len(self.agents)}", f"node{self.number}"
        process = Process(self.job.world, name, node=node, host=node)
        self.agents.append(Agent(self, process))
        process.on_end.append(self._end_workers)
        process.start(lambda: self.job.run_agent(self))

    def _end_workers(self) -> None:
        """What the kernel has promised them."""
        for worker in self.agents[-1].workers:
            self.job.system.tell(worker.process, signal.SIGTERM)

    # --- in place of parts of the agent ---

    def stop_files(self, *_: Any) -> Any:
        def poll() -> Any:
            found, self.report = self.report, None
            return found

        return SimpleNamespace(
            poll=poll, notice=lambda: None, flushing=lambda: False, faults=SimpleNamespace(world_size=0)
        )

    def give_order(self, kind: str, reason: str, *, grace_s: float, exit_code: int, extends: bool = False) -> None:
        self.order = {"kind": kind, "reason": reason, "exit_code": exit_code}

    def forget_workers(self) -> None:
        self.order = None


class Forks:
    num_workers = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def prepare(self, number: int, check: Any) -> None:
        pass

    def start(self) -> Any:
        return nullcontext()

    def look(self, *_: Any, at_end: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, *_: Any) -> None:
        pass

    def specs(self, inner: Any) -> Any:
        return inner

    def keep(self, *_: Any) -> str:
        return ""

    def finish(self) -> None:
        pass


class Started:
    """Torch's `PContext`."""

    def __init__(self, children: dict[int, Process]) -> None:
        self.subprocess_handlers = {local: SimpleNamespace(proc=child) for local, child in children.items()}
        self._children = children

    def pids(self) -> dict[int, int]:
        return {local: child.pid for local, child in self._children.items()}

    def close(self, *_: Any) -> None:
        for child in self._children.values():
            child.kill()


class Job:
    """All of it."""

    in_place, spares, rejoin_timeout_s = False, 0, 30.0
    """``--recover in-place``, ``--spares`` and ``--rejoin-timeout``."""
    command: tuple[str, ...] = ("train.py",)
    modules: tuple[str, ...] = (
        *("mindx_elastic.agent", "mindx_elastic.cluster", "mindx_elastic.core"),
        "torch.distributed.elastic.agent.server",
    )
    """The prefixes of those that are played."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world = plan, World(plan.seed, most_switches=10_000 * plan.nodes)
        self.system = System(self.world)
        self.network = self.system.network
        self.steps, self.step_s, self.start_s = plan.steps, plan.step_s, plan.start_s
        self.save_s, self.after_s, self.is_guarded = plan.save_s, plan.after_s, plan.is_guarded
        self.hears_connections = plan.hears_connections
        self.durable_step = -1
        """The newest on the disk that all nodes share."""
        self.host: Process | None = None
        """Serves the table."""
        self.failures = 0
        """Of the faults so far, those that may cost a restart."""
        self.wrong: list[str] = []
        self.nodes = [Node(self, number) for number in range(plan.nodes)]
        self.faults = Faults(self.world, plan, self.strike)
        self.meetings: dict[tuple[str, str], Meeting] = {}
        self.pages: dict[Path, Worker] = {}

    @property
    def has_finished(self) -> bool:
        return any(len(meeting.finished) == meeting.world_size for meeting in self.meetings.values())

    def node_of_process(self) -> Node:
        process = self.world.process
        return next(node for node in self.nodes if any(each.process is process for each in node.agents))

    # --- what the agent calls ---

    def run_agent(self, node: Node) -> int:
        """As `launcher.launch`, without what it does to the real process."""
        plan = self.plan
        folder: Any = SimpleNamespace(
            path=Path(f"/simulated/{node.agent.pid}"),
            order=node.give_order,
            forget_workers=node.forget_workers,
            make_key=lambda: "no key",
        )
        options = AgentOptions(
            grace_s=GRACE_S, tell_grace=False, snapshot_every="0", rehearse="", archive="",
            hang_timeout_s=HANG_S, run_dir=Path("/simulated"), restarts_window_s=None, crash_loop=3,
            in_place=self.in_place, spares=self.spares, rejoin_timeout_s=self.rejoin_timeout_s, min_nproc=None,
            arena_base=Path("/simulated"), job_key_file=None, log_level="ERROR",
        )  # fmt: skip
        config = LaunchConfig(
            min_nodes=plan.min_nodes, max_nodes=plan.nodes, nproc_per_node=plan.workers,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull), run_id=_RUN_ID, rdzv_backend="c10d",
            rdzv_endpoint="" if plan.nodes == 1 else f"{self.host_name}:{_PORT}", max_restarts=plan.max_restarts,
            rdzv_configs={"join_timeout": int(JOIN_S), "last_call_timeout": 5}, monitor_interval=1.0,
            local_addr=f"node{node.number}",
        )  # fmt: skip
        launch = Launch(options=options, config=config, command=self.command, master=None)
        result: Any = SimpleNamespace(write=lambda *_, **__: None)
        with SignalInbox(parse_signals("SIGTERM"), last=True) as inbox:
            return launcher.run_job(launch, folder, inbox, result, None)

    @property
    def host_name(self) -> str:
        return "apart" if self.plan.host_is_apart else "node0"

    def serve_apart(self) -> None:
        """The table, in a process of its own."""
        self.host = Process(self.world, "host of the table", node="apart", host="apart")
        limits = Limits(heartbeat_s=15.0, formation_s=math.inf, reconnect_s=3.0, last_call_s=5.0)
        least, most = self.plan.min_nodes, self.plan.nodes
        table = Table(most, least=least, run_id=_RUN_ID, job="job", recovery=True, limits=limits, now=self.world.now)
        self.host.run_beside(lambda: agent_nodes.NodeHost(table, self.listen("", _PORT), None))

    def listen(self, _: str, port: int) -> Any:
        listener = self.network.listen((self.host_name, port))
        self.host = self.world.process
        return listener

    def _is_here(self, _: str) -> bool:
        return not self.plan.host_is_apart and self.node_of_process().number == 0

    @contextmanager
    def _reserve_port(self) -> Iterator[Any]:
        port = self.world.number()
        yield SimpleNamespace(getsockname=lambda: ("", port))

    def start_processes(self, *, envs: Mapping[int, Mapping[str, str]], **_: Any) -> Started:
        """Torch's, for the workers of the running agent."""
        node, children = self.node_of_process(), {}
        agent = node.agents[-1]
        for local, env in envs.items():
            rank, size, restarts = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
            key = env["MASTER_ADDR"], env["MASTER_PORT"]
            meeting = self.meetings.setdefault(key, Meeting(self, size, restarts))
            name = f"rank {rank} of {size} on node {node.number}"
            children[local] = child = Process(self.world, name, host=f"node{node.number}")
            worker = Worker(self, node, meeting, rank, size, child)
            agent.workers.append(worker)
            self.pages[Path(f"/simulated/{node.agent.pid}/rank_{rank}.page")] = worker
            meeting.admit(worker, restarts)
            child.start(worker.run)
            self.world.note(f"{agent.process.name} starts {name}, restart {restarts}")
        return Started(children)

    def read_page(self, path: Path) -> Status | None:
        worker = self.pages.get(path)
        return None if worker is None else worker.status

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """The agent's modules, and torch's, use this job's world."""
        world, system = self.world, self.system
        nothing = lambda *_, **__: None  # noqa: E731
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, MINDX_ZYGOTE="0"))  # and the agents' own variables go again
            stack.enter_context(quiet())
            stack.enter_context(world.replaced(system.stand_ins, prefixes=self.modules))
            stand_ins: dict[Any, dict[str, Any]] = {
                agent_nodes: {"listen": self.listen, "is_own_address": self._is_here},
                connection: {"own_space": lambda: ""},
                rendezvous_api: {"get_free_port": world.number},
                torch_agent: {"record": nothing, "_get_fq_hostname": lambda: "simulated"},
                local_elastic_agent: {"start_processes": self.start_processes},
                launcher: {
                    "EventLog": lambda *_, **__: self.node_of_process().agents[-1],
                    "ForkedStart": Forks,
                    "LastLines": _Lines,
                    "StopFiles": lambda *arguments: self.node_of_process().stop_files(*arguments),
                    "print_block": nothing,
                    "render": nothing,
                },
                supervisor: {"print_block": nothing, "render": nothing, "_reserve_port": self._reserve_port},
                attempt: {"write_stacks": lambda *_, **__: [], "_LOOK_S": 1.0},  # half of all turns changed nothing
                table_server: {"_TURN_S": 0.5},
                workers: {
                    "read_page": self.read_page,
                    "open_pidfd": system.open_pidfd,
                    "read_stat": system.read_stat,
                    "members_of": system.members_of,
                    "thread_pidfds": system.thread_pidfds,
                    "catches": system.catches,
                },
            }
            stack.enter_context(instead_of(stand_ins))
            stack.callback(world.close)
            yield

    def hear_event(self, agent: Agent, event: str, fields: Mapping[str, Any]) -> None:
        """What an agent writes into its log."""

    # --- faults ---

    def strike(self, fault: Fault, *who: Any) -> None:
        node, world = self.nodes[fault.place], self.world
        agent = node.agents[-1]
        until = world.now + fault.length_s
        world.note(f"{fault.kind} at node {fault.place}" + f" for {fault.length_s:g} s" * (fault.length_s > 0))
        living = [worker for worker in agent.workers if worker.process.is_alive]
        worker = living[fault.local_rank % len(living)] if living else None
        self.failures += self._fails(fault)
        match fault.kind:
            case "sigterm agent":
                self.tell_to_stop(node)
            case "double sigterm":
                self.tell_to_stop(node)
                world.at(until, lambda: self.tell_to_stop(node))
            case "sigterm all":
                for each in self.nodes:
                    self.tell_to_stop(each)
            case "sigterm worker" if worker is not None:
                self.system.tell(worker.process, signal.SIGTERM)
            case "kill worker" if worker is not None:
                worker.process.kill()
            case "exception" if worker is not None:
                worker.next_failure = ValueError(f"broken {world.number()}")
            case "hang" if worker is not None:
                worker.hangs = True
            case "deaf" if worker is not None:
                worker.is_deaf = True
                self._clear(agent)
            case "freeze worker" if worker is not None:
                worker.process.freeze(fault.length_s)
            case "freeze agent":
                agent.process.frozen_until = max(until, agent.process.frozen_until)
            case "kill agent":
                agent.process.kill()
                world.at(until, lambda: self._come_back(node))
            case "kill node" | "lose node":
                for process in node.processes:
                    process.kill()
                if fault.kind == "kill node":
                    world.at(until, lambda: self._come_back(node))
            case "lose host" if self.host is not None:
                self.host.kill()
                for each in self.nodes:
                    self._clear(each.agents[-1])
            case "reset":
                self.network.reset(f"node{node.number}")
            case "old connection":
                self.network.leave_behind(f"node{node.number}", min(_NOTICED_S, 0.5 * fault.length_s), fault.length_s)
            case "slow disk":
                self.save_s = fault.length_s
                world.at(until, lambda: setattr(self, "save_s", self.plan.save_s))
            case "slow network":
                self.network.slowest_s = 0.5
                world.at(until, lambda: setattr(self.network, "slowest_s", 0.002))
            case "host stands still" if self.host is not None:
                self.host.frozen_until = until
            case "clock jump":
                agent.process.clock.ahead_s += world.random.choice((-1, 1)) * 180 * fault.length_s
            case "partition":
                node.is_cut_off, name = True, f"node{node.number}"
                for other in {"apart", *(f"node{each.number}" for each in self.nodes)} - {name}:
                    self.network.cut(name, other, fault.length_s)
                    self.network.cut(other, name, fault.length_s)
                world.at(until, lambda: self._connect_again(node))
            case "fault report":
                node.report = SimpleNamespace(kind="fault", reason="rank 0 is faulty", grace_s=None)
            case "join":
                self.nodes.append(Node(self, len(self.nodes)))
                self.nodes[-1].start()

    def faults_of(self, outcome: Outcome) -> list[str]:
        """What does not hold."""
        return _faults_of(self, outcome)

    def _fails(self, fault: Fault) -> bool:
        """Whether it is a failure, and not an order to stop or something that is waited for."""
        if fault.kind == "freeze agent":  # two of them may be one long one
            agent = self.nodes[fault.place].agents[-1]
            if agent.process.frozen_until < self.world.now:
                agent.frozen_since = self.world.now
            return self.world.now + fault.length_s >= agent.frozen_since + _STANDSTILL_S
        if fault.kind == "reset":  # of one that stands still, and does not connect again
            process = self.nodes[fault.place].agents[-1].process
            return process.frozen_until > self.world.now + _BACK_S
        if "sigterm" in fault.kind or fault.kind == "fault report":  # outside of a guard a process dies of it
            statuses = [worker.status for node in self.nodes for worker in node.agents[-1].workers]
            safe = (WorkerPhase.TRAINING, WorkerPhase.STOPPING)
            return not statuses or any(s is None or s.phase not in safe for s in statuses)
        return fault.kind not in _HARMLESS

    def _clear(self, agent: Agent) -> None:
        """Of a host that is lost: a deaf worker does not hear its agent's death, and goes with the machine."""
        for worker in agent.workers if agent.process is self.host and not agent.process.is_alive else ():
            if worker.is_deaf:
                worker.process.kill()

    def tell_to_stop(self, node: Node) -> None:
        agent = node.agents[-1]
        if agent.process.is_alive:
            agent.told_to_stop_at = agent.told_to_stop_at or self.world.now
            self.system.tell(agent.process, signal.SIGTERM)

    def _connect_again(self, node: Node) -> None:
        node.is_cut_off = False
        for meeting in self.meetings.values():
            meeting.topic.tell()

    def _come_back(self, node: Node) -> None:
        """The platform clears the machine and starts the command again, unless the job is done."""
        if node.agent.is_alive:
            return
        for process in node.processes:
            process.kill()
        if all(agent.code != 0 for each in self.nodes for agent in each.agents):
            node.start()


def play(plan: Plan, make: type[Job] = Job) -> Outcome:
    """Play one schedule of such a job to its end. Any number, one after the other."""
    job, outcome = make(plan), Outcome(plan)
    world = job.world
    with job.replaced():
        if plan.host_is_apart:
            job.serve_apart()
        for node in job.nodes:
            node.start()
        until = max((fault.at + fault.length_s for fault in plan.faults), default=0.0)
        platform = Process(world, "platform")  # lives until all has come back that is to
        platform.start(lambda: int(world.wait(lambda: False, until + 0.1)))
        for node in job.nodes:
            world.at(world.now + _PATIENCE_S, lambda node=node: job.tell_to_stop(node))  # type: ignore[misc]
        job.faults.begin()
        try:
            world.run(until=world.now + 3600.0)
        except Stuck as error:
            outcome.stuck = str(error)
        outcome.take(world)
    outcome.messages, outcome.late_connections = job.network.messages, job.network.num_late
    outcome.agents = [agent for node in job.nodes for agent in node.agents]
    outcome.wrong = job.faults_of(outcome)
    return outcome


def _faults_of(job: Job, outcome: Outcome) -> list[str]:
    plan, wrong = job.plan, [*job.wrong]
    if outcome.stuck:
        return [*wrong, outcome.stuck]
    for agent in outcome.agents:
        name, code = agent.process.name, agent.code
        if code == 0 and not job.has_finished:
            wrong.append(f"{name} says 0, and no training has ended")
        is_early = code == -signal.SIGTERM and not agent.has_begun  # as any program that has yet to start
        if code not in (0, -9) and not is_early and not agent.cause:
            wrong.append(f"{name} ends with {code}, and does not say why")
        if agent.restarts > min(plan.max_restarts, job.failures):
            most = f"of {plan.max_restarts}, after {job.failures} failures"
            wrong.append(f"{name} counts {agent.restarts} restarts, {most}")
        still = ("freeze agent", "partition", "host stands still")
        frozen_s = sum(fault.length_s for fault in plan.faults if fault.kind in still)
        if agent.told_to_stop_at is not None:
            took = agent.process.ended_at - agent.told_to_stop_at
            if took > GRACE_S + 10.0 + frozen_s:
                wrong.append(f"{name} ends {took:.1f} s after it was told to")
    return wrong + _faults_of_kinds(job, outcome)


def _faults_of_kinds(job: Job, outcome: Outcome) -> list[str]:
    """As `_faults_of`, where it depends on what has happened."""
    plan = job.plan
    kinds = {fault.name for fault in plan.faults}
    codes = {agent.code for agent in outcome.agents} - {-9}
    if job.has_finished:  # who came when it was over finds nobody any more
        codes = {agent.code for agent in outcome.agents if agent.was_there} - {-9}
    told = ", ".join(sorted(map(str, codes)))
    is_hopeless = any(agent.is_hopeless for agent in outcome.agents)
    of_host = [fault for fault in plan.faults if fault.kind in ("kill agent", "kill node") and fault.place == 0]
    of_host = of_host if not plan.host_is_apart and plan.nodes > 1 else []
    loses_host = any(fault.length_s > _BACK_S for fault in of_host)
    # Without a guard a new table, which knows no other node, leaves it to the collectives to fail.
    is_silent = bool(kinds & {"hang", "deaf", "freeze worker"} or (of_host and not plan.hears_connections))
    never_seen = not plan.is_guarded and is_silent
    is_curable = kinds <= CURABLE and job.failures <= plan.max_restarts
    if is_curable and not (is_hopeless or loses_host or never_seen) and (not job.has_finished or codes != {0}):
        return [f"the job could have finished: {told}"]
    if kinds <= GENTLE and not job.failures and codes not in ({0}, {exit_code_of_signal(signal.SIGTERM)}):
        return [f"a stop is answered with {told}"]
    return []
