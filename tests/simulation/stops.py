"""A job of several ranks that is told to stop, or breaks, in a simulated world: alarm, agreement, save, exit.

Real are the watcher, the stop request, the exchange over the store, the agreement, the step gate, the update gate, the
stopper with its claim, the salvage and the last resort. Simulated are the training, its collectives, the store's host
and the network to it, what a save takes, and what goes wrong. `play` plays one schedule and checks `faults_of` it.

What must hold in every schedule:

* A file has a boundary that its rank has passed, and nothing changed it while it was written.
* Files that ranks wrote because all had agreed on a step have one step, and it is the one in a cell of the store.
* Every process ends, before its deadline unless it is writing a file then.
* No rank says that the training is done where another one saved because it was told to stop.

and where no more happens than signals, pauses, a slow store and slow steps (`KINDS`):

* All ranks save the same step and leave with the signal's code, or all finish with 0 and save nothing.
* No rank waits for its deadline.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.agreement.step_gate import StepGate
from mindx_elastic.agreement.stop_step import FINISHED, parse_decision
from mindx_elastic.agreement.store_exchange import StoreExchange
from mindx_elastic.alarm.exit_codes import EXIT_TEMPORARY
from mindx_elastic.alarm.watcher import Watcher
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.config import RankInfo, Settings
from mindx_elastic.core.position import Position
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.errors import GracefulExit, SaveError
from mindx_elastic.guard.last_resort import LastResort
from mindx_elastic.guard.policy import ExitPolicy, breakpoint_name
from mindx_elastic.guard.process_end import LogRelay
from mindx_elastic.guard.stopper import Stopper
from mindx_elastic.memory.agent_folder import PAUSE, RESUME
from mindx_elastic.platforms.flag_file import AnsweredFlags
from tests.simulation.schedules import Fault, Faults, Played, quiet
from tests.simulation.store import Connection, SimulatedStore
from tests.simulation.system import System
from tests.simulation.world import Process, Stuck, Topic, World

__all__ = ["KINDS", "Outcome", "Plan", "faults_of", "plan_of", "play"]

GRACE_S = 30.0
LATE_S = 1.0
"""How long after its deadline a process may end that was not writing."""
_AGREEMENT_S = 5.0
_PATIENCE_S = 300.0
"""What still runs then hangs, and the platform sends SIGTERM to all of it."""
_NOTICE_S = 0.002
"""Until the others on the machine know of a death."""
_ALARMS = frozenset({"signal", "exception", "request", "peer"})


KINDS = {
    "sigterm": True,
    "pause": True,
    "evaluation": True,
    "slow store": True,
    "slow step": True,
    "clock jump": True,
    "request": False,  # the code is the program's
    "kill": False,
    "exception": False,
    "hang": False,
    "hang in update": False,
    "freeze": False,
    "cut off": False,
    "store hangs": False,
    "lost store": False,
    "doubled requests": False,
    "slow disk": False,
    "full disk": False,
}
"""What can happen, and whether the ranks still come to one step."""


@dataclass(frozen=True)
class Plan:
    """One schedule."""

    seed: int
    world_size: int
    steps: int
    """Of the whole training."""
    step_s: float
    update_s: float
    save_s: float
    window: int
    """Steps of an accumulation window: only its last one updates, and is a boundary."""
    collectives: str
    """What a collective does whose peer is dead: ``fails``, or ``hangs``."""
    faults: tuple[Fault, ...]


@dataclass
class Outcome(Played):
    """What a schedule came to."""

    ranks: list[_Rank] = field(default_factory=list)
    decided: list[int | None] = field(default_factory=list)
    """What the decision cells in the store hold: a step, or None where each rank acts alone."""
    doubled: int = 0
    """Requests to the store that came twice."""
    is_finished: bool = False
    """One of them says that all ranks have reached their end."""

    def count(self) -> Counter[str]:
        return super().count() + Counter(
            {"files": sum(len(rank.saved) for rank in self.ranks), "doubled": self.doubled}
        )


def plan_of(seed: int) -> Plan:
    """A schedule from its seed."""
    random = Random(seed)
    world_size = random.choice((1, 2, 2, 3, 3, 4, 4, 8))
    step_s = random.choice((0.01, 0.1, 0.4, 2.0))
    steps = random.randint(3, 30)
    gentle, rough = [kind for kind, is_gentle in KINDS.items() if is_gentle], list(KINDS)
    kinds = gentle if random.random() < 0.4 else rough
    chosen = [random.choice(("sigterm", random.choice(kinds))) for _ in range(random.randint(1, 5))]
    last = 1.2 * steps * step_s
    # Two things at nearly the same time meet oftener than two at any.
    moments = [random.uniform(0.0, last) for _ in range(2)]
    faults = []
    for kind in chosen:
        at = max(0.0, random.choice(moments) + random.choice((0.0, random.uniform(-0.02, 0.02), random.uniform(-2, 2))))
        length_s = random.choice((0.05, 0.5, 3.0, 20.0))
        ranks = range(world_size) if kind == "sigterm" and random.random() < 0.5 else [random.randrange(world_size)]
        late_s = 0.01 * (len(ranks) > 1)
        on = ("end", random.randint(1, world_size)) if random.random() < 0.1 else None
        at = at if on is None else random.choice((0.0, random.uniform(0.0, 0.02)))
        faults += [Fault(kind, rank, at=at + random.uniform(0, late_s), length_s=length_s, on=on) for rank in ranks]
    return Plan(
        seed,
        world_size,
        steps,
        step_s,
        update_s=step_s * random.choice((0.0, 0.1, 0.5)),
        save_s=random.choice((0.001, 0.2, 3.0)),
        window=random.choice((1, 1, 1, 2, 4)),
        collectives=random.choice(("fails", "hangs")),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


# --- what is simulated of a rank ---


class _Collectives:
    """The collectives of the training: a step needs all ranks."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world, self._plan = world, plan
        self._arrived: dict[int, set[int]] = {}
        self.processes: list[Process] = []
        self.num_dead = 0
        self.topic = Topic(world)

    def meet(self, rank: int, step: int) -> None:
        arrived = self._arrived.setdefault(step, set())
        arrived.add(rank)
        self.topic.tell()
        fails, size = self._plan.collectives == "fails", len(self.processes)
        self._world.wait(lambda: len(arrived) == size or (fails and self.num_dead > 0), on=(self.topic,))
        if len(arrived) < size:
            raise RuntimeError("Connection closed by peer")

    def hear_death(self) -> None:
        self.num_dead += 1
        self.topic.tell()


class _Events:
    """The job's event log, as far as ranks read it."""

    ended: set[int]
    hurry = False

    def __init__(self, world: World, rank: int, ended: set[int]) -> None:
        self._world, self._rank, self.ended = world, rank, ended

    def emit(self, event: str, **fields: Any) -> None:
        said = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
        self._world.note(f"rank {self._rank}: {event} ({said})")
        if event == "end":
            self.ended.add(self._rank)

    def flush(self) -> None:
        pass

    def has_ended(self, rank: int) -> bool:
        return rank in self.ended


class _Devices:
    newest = None
    keeps_older = False
    has_gone_back = False
    is_used = False
    step_s = 0.0


class _Collector:
    """The state of a rank: its position, which each boundary copies."""

    def __init__(self) -> None:
        self.position = Position(step=0, epoch=1, step_in_epoch=0)
        self.devices = _Devices()


@dataclass(frozen=True)
class _Info:
    step: int


@dataclass(frozen=True)
class _Saved:
    path: Path
    nbytes: int
    info: _Info


class _Saver:
    """Writes a file: reads the boundary, takes its time, and may fail."""

    together = None
    is_refused = False
    replicated = False
    newest_step = 0
    bytes_per_s = None
    flags = AnsweredFlags()

    def __init__(self, rank: _Rank, world: World, events: _Events, collector: _Collector, plan: Plan) -> None:
        self.ranks = RankInfo(rank=rank.number, world_size=plan.world_size)
        self.events, self.collector = events, collector
        self._rank, self._world, self._save_s = rank, world, plan.save_s
        self.page, self.gone = StatusPage(), lambda: list(rank.gone)
        self.expected_bytes = int(plan.save_s * 200e6)

    def drain(self, timeout_s: float) -> None:
        pass

    def keep_unsaved(self, step: int, timeout_s: float) -> None:
        pass

    def save_dying(self, policies: Sequence[ExitPolicy], reason: str, *, time_left_s: float, agreed: bool) -> _Saved:
        rank, step = self._rank, self.collector.position.step
        rank.saving_since = self._world.now
        if rank.gate.state is not GateState.CLEAN:
            rank.wrong.append(f"saves step {step} while its state is {rank.gate.state.name}")
        before = rank.changes
        self._world.sleep(self._save_s + rank.disk_delay_s)
        if rank.changes != before or self.collector.position.step != step:
            rank.wrong.append(f"its state changed while step {step} was written")
        rank.saving_since = None
        if rank.disk_is_full:
            raise SaveError(f"{rank.number}: no space left on device")
        if step not in rank.passed:
            rank.wrong.append(f"saves step {step}, a boundary that it has not passed")
        rank.saved.append((step, agreed))
        return _Saved(Path(f"rank_{rank.number}/net-1_{step}_breakpoint.safetensors"), 0, _Info(step))


class _Rank:
    """One rank: its process, and the parts of a guard that stop it."""

    def __init__(self, number: int, system: System, plan: Plan, collectives: _Collectives) -> None:
        self.number, self._plan, self._collectives = number, plan, collectives
        self._system, self._world = system, system.world
        self.process = Process(system.world, f"rank {number}", host=f"host {number}")
        self.gate, self.steps = UpdateGate(), StepGate(0)
        self.collector = _Collector()
        self.changes = 0
        self.passed = {0}
        self.saved: list[tuple[int, bool]] = []
        """The steps of its files, and whether all ranks had agreed on each."""
        self.saving_since: float | None = None
        self.wrong: list[str] = []
        self.disk_delay_s = 0.0
        self.disk_is_full = False
        self.next_failure: BaseException | None = None
        self.hangs = self.hangs_in_update = False
        self.slow_s = 0.0
        self.evaluation_s = 0.0
        self.finished = False
        self.gone: list[int] = []
        """The ranks of whose deaths this one knows."""

    def open(self, exchange: Exchange, ended: set[int]) -> None:
        """Main thread: what a guard makes at its entry, as far as a stop needs it."""
        world, plan = self._world, self._plan
        self.events = _Events(world, self.number, ended)
        self.exchange = exchange
        self.watcher = Watcher(self._hear_signal)
        last_resort = LastResort()
        saver: Any = _Saver(self, world, self.events, self.collector, plan)
        policy = ExitPolicy(kind="breakpoint", alarms=_ALARMS, name=breakpoint_name("net"), directory=Path("."))
        self.stopper = Stopper(
            step_gate=self.steps,
            update_gate=self.gate,
            exchange=exchange,
            watcher=self.watcher,
            saver=saver,
            settings=Settings(grace_s=GRACE_S, agreement_s=_AGREEMENT_S),
            policies=[policy],
            arm_last_resort=last_resort.arm,
            leave_by=last_resort.leave_by,
            relay=LogRelay(),
            already_durable=lambda: None,
        )
        self.process.handlers[signal.SIGTERM] = lambda *_: None
        self.process.wakeup_fd = self.watcher.wakeup_fd
        self.watcher.start()
        last_resort.start(self.stopper)
        alarms = self.stopper.alarms
        post = self.watcher.post
        exchange.listen(
            lambda content: post(lambda: self.stopper.hear(alarms.of_peer(content))),
            lambda order: post(lambda: self.stopper.pauses.hear_order(order)),
        )

    def _hear_signal(self, signum: int) -> None:
        self.stopper.hear_signal(signum)

    def signal(self, signum: int) -> None:
        self._system.tell(self.process, signum)

    def hear_death(self, rank: int) -> None:
        """As the descriptor of the other process becomes readable."""
        if self.process.is_alive and rank not in self.gone:
            self.gone.append(rank)
            self.watcher.post(lambda: self.stopper.hear_death(rank))

    def train(self, at_end: Callable[[], None]) -> int:
        """The main thread. Returns the process's exit code."""
        try:
            for step in range(1, self._plan.steps + 1):
                self._step(step)
            at_end()
            if self.stopper.at_end():
                raise self.stopper.exit()
        except GracefulExit as leaving:
            return self._leave(leaving)
        except Exception as error:
            return self._fail(error)
        self.exchange.leave()
        self.events.emit("end", step=self._plan.steps)
        self.finished = True
        self.exchange.close()
        return 0

    def _leave(self, leaving: GracefulExit) -> int:
        self.stopper.after_save()
        self.stopper.exit()
        self.exchange.close()
        return int(leaving.code or 0)

    def _fail(self, error: Exception) -> int:
        self.stopper.on_exception(error)
        alarm = self.stopper.alarm
        if alarm is not None and alarm.kind != "exception":
            return self._leave(self.stopper.exit())
        return 1

    def _step(self, step: int) -> None:
        world, plan = self._world, self._plan
        world.sleep(plan.step_s * world.random.uniform(0.5, 1.0) + self.slow_s)
        self.slow_s = 0.0
        if self.hangs:
            world.wait(lambda: False)
        if self.next_failure is not None:
            raise self.next_failure
        if step % plan.window and step < plan.steps:
            if self.steps.arrive(step):
                self.stopper.at_limit(is_cut=False)
            return
        self._collectives.meet(self.number, step)
        self.gate.begin_update()
        self.changes += 1
        world.sleep(plan.update_s)
        if self.hangs_in_update:
            world.wait(lambda: False)
        self.changes += 1
        self.gate.end_update()
        position = Position(step=step, epoch=1, step_in_epoch=step)
        self.gate.pass_boundary(lambda: setattr(self.collector, "position", position))
        self.passed.add(step)
        if self.steps.arrive(step):
            self.stopper.at_limit(is_cut=True)
        if self.evaluation_s:
            self.steps.leave_step()
            world.sleep(self.evaluation_s)
            self.evaluation_s = 0.0
            if self.steps.enter_step():
                self.stopper.at_limit(is_cut=True, is_between=True)


# --- one schedule ---


def _strike(fault: Fault, world: World, store: SimulatedStore | None, ranks: Sequence[_Rank]) -> None:
    rank, until = ranks[fault.place], world.now + fault.length_s
    world.note(f"{fault.kind} at rank {fault.place}" + f" for {fault.length_s:g} s" * (fault.length_s > 0))
    match fault.kind:
        case "sigterm":
            rank.signal(signal.SIGTERM)
        case "request":
            rank.stopper.request("enough", 0)
        case "kill":
            rank.process.kill()
        case "exception":
            rank.next_failure = ValueError("broken")
        case "hang":
            rank.hangs = True
        case "hang in update":
            rank.hangs_in_update = True
        case "freeze":
            rank.process.frozen_until = until
        case "slow step":
            rank.slow_s = fault.length_s
        case "evaluation":
            rank.evaluation_s = fault.length_s
        case "slow disk":
            rank.disk_delay_s = fault.length_s
        case "full disk":
            rank.disk_is_full = True
        case "pause":
            number = world.number()
            rank.watcher.post(lambda: rank.stopper.pauses.hear(PAUSE, "asked", number))
            later = world.number()
            world.at(until, lambda: rank.watcher.post(lambda: rank.stopper.pauses.hear(RESUME, "asked", later)))
        case "slow store" if store is not None:
            before, store.slowest_s = store.slowest_s, 0.2
            world.at(until, lambda: setattr(store, "slowest_s", before))
        case "store hangs" if store is not None:
            store.hang(until)
        case "lost store" if store is not None:
            store.lose()
        case "doubled requests" if store is not None:
            store.doubles_until = until
        case "clock jump":
            rank.process.clock.ahead_s += world.random.choice((-1, 1)) * 180 * fault.length_s
        case "cut off" if store is not None:
            store.cut(rank.process)
            world.at(until, lambda: store.mend(rank.process))


def play(plan: Plan) -> Outcome:
    """Play one schedule to its end. Any number, one after the other."""
    world = World(plan.seed)
    system, outcome = System(world), Outcome(plan)
    with world.replaced(system.stand_ins), quiet():
        collectives = _Collectives(world, plan)
        ranks = outcome.ranks = [_Rank(number, system, plan, collectives) for number in range(plan.world_size)]
        collectives.processes = [rank.process for rank in ranks]
        store = SimulatedStore(world, ranks[0].process) if plan.world_size > 1 else None
        faults = Faults(world, plan, lambda fault: _strike(fault, world, store, ranks))
        ended: set[int] = set()
        met: set[int] = set()
        meeting = Topic(world)

        def run(rank: _Rank) -> int:
            exchange = Exchange()
            if store is not None:
                exchange = StoreExchange(
                    lambda: Connection(store), rank=rank.number, world_size=plan.world_size, host_rank=0
                )
            rank.open(exchange, ended)
            met.add(rank.number)
            meeting.tell()
            world.wait(lambda: len(met) == plan.world_size, on=(meeting,))
            if rank.number == 0:
                began = world.now
                for other in ranks:
                    world.at(began + _PATIENCE_S, lambda other=other: other.signal(signal.SIGTERM))  # type: ignore[misc]
                faults.begin()
            return rank.train(lambda: faults.event("end"))

        for rank in ranks:
            rank.process.on_end.append(lambda dead=rank.number: _tell(world, ranks, dead))  # type: ignore[misc]
            rank.process.on_end.append(collectives.hear_death)
            rank.process.start(lambda rank=rank: run(rank))  # type: ignore[misc]
        try:
            world.run(until=world.now + 3600.0)
        except Stuck as error:
            outcome.stuck = str(error)
        outcome.take(world)
        if store is not None:
            outcome.messages, outcome.doubled = store.messages, store.num_doubled
            cells = [value.decode() for key, value in store.values.items() if key.endswith("/decision")]
            outcome.decided = [parse_decision(cell).step for cell in cells]
            outcome.is_finished = any(parse_decision(cell) == FINISHED for cell in cells)
    outcome.wrong = faults_of(outcome)
    return outcome


def _tell(world: World, ranks: Sequence[_Rank], dead: int) -> None:
    for rank in ranks:
        if rank.number != dead:
            world.at(world.now + _NOTICE_S, lambda rank=rank: rank.hear_death(dead))  # type: ignore[misc]


def faults_of(outcome: Outcome) -> list[str]:
    """What does not hold."""
    plan, ranks = outcome.plan, outcome.ranks
    wrong = [f"rank {rank.number} {text}" for rank in ranks for text in rank.wrong]
    if outcome.stuck:
        return [*wrong, outcome.stuck]
    agreed = {step for rank in ranks for step, together in rank.saved if together}
    if len(agreed) > 1:
        wrong.append(f"the ranks agreed on several steps: {sorted(agreed)}")
    for rank in ranks:
        obeyed = rank.stopper.agreed_step if hasattr(rank, "stopper") else None
        if obeyed is not None and plan.world_size > 1 and obeyed not in outcome.decided:
            wrong.append(f"rank {rank.number} goes to step {obeyed}, and the cells hold {outcome.decided}")
        if len(rank.saved) > 1:
            wrong.append(f"rank {rank.number} has saved twice: {rank.saved}")
        alarm = rank.stopper.alarm if hasattr(rank, "stopper") else None
        frozen = rank.process.frozen_until
        if alarm is not None and rank.process.exit_code != -9:
            latest = max(alarm.deadline.at, frozen) + plan.save_s + rank.disk_delay_s + LATE_S
            if rank.process.ended_at > latest:
                late = rank.process.ended_at - alarm.deadline.at
                wrong.append(f"rank {rank.number} ends {late:.1f} s after its deadline")
    if all(KINDS[fault.kind] for fault in plan.faults):
        wrong += _faults_of_gentle(plan, ranks)
        stopped = [rank.number for rank in ranks if rank.saved and outcome.is_finished]
        wrong += [f"all have finished, and ranks {stopped} answer a stop"] * bool(stopped)
    return wrong


def _faults_of_gentle(plan: Plan, ranks: Sequence[_Rank]) -> list[str]:
    """As `faults_of`, where all ranks must come to the same."""
    # One that has finished is at the last step, which another may save: an evaluation holds it up, a stop comes late.
    steps = {tuple(step for step, _ in rank.saved) or (plan.steps,) * rank.finished for rank in ranks}
    if len(steps) > 1:
        return [f"the ranks saved different steps: {[rank.saved for rank in ranks]}"]
    # Far from the deadline: nothing but what was slow has been waited for.
    slow_s = sum(fault.length_s for fault in plan.faults if fault.kind in ("slow step", "evaluation"))
    usual_s = slow_s + 2 * plan.window * (plan.step_s + plan.update_s) + plan.save_s + _AGREEMENT_S
    if any(fault.kind == "slow store" for fault in plan.faults):  # it brings the request late, and then the answers
        usual_s += _AGREEMENT_S
    for rank in ranks:
        alarm = rank.stopper.alarm
        if alarm is not None and (took := rank.process.ended_at - alarm.deadline.at + GRACE_S) > usual_s:
            return [f"rank {rank.number} needs {took:.1f} s to stop, not {usual_s:.1f}"]
    codes = [rank.process.exit_code for rank in ranks]
    expected = [0 if rank.finished else 143 for rank in ranks]
    if any(fault.kind == "slow store" for fault in plan.faults):  # its host has left before its news were there
        gone = [rank.stopper.alarm is not None and rank.stopper.alarm.kind == "peer" for rank in ranks]
        expected = [EXIT_TEMPORARY if is_late else code for code, is_late in zip(expected, gone, strict=True)]
    return [] if codes == expected else [f"exit codes {codes}, not {expected}, saved {steps}"]
