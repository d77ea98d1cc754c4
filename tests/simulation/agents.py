"""Agents of several nodes in one process, on a simulated clock, network and store. One seed is one story.

What decides is the code that runs: `NodesRecovery` with its `Coordinator`, `Board` and the rules of `lost_node`, and a
`FailureDetector` on both ends of each connection. Simulated are what is around it: time, the store, the connections
between agents, the processes of ranks, and agents that wait for a place. A node may crash, stand still, or be cut off
from the first one; a rank may die at any moment; connections end and come back, words come late.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mindx_elastic.agent import nodes_recovery, recovery
from mindx_elastic.agent.failure_detector import FailureDetector, Lost
from mindx_elastic.agent.nodes_recovery import NodesRecovery
from mindx_elastic.agent.recovery import ERRORS, NewProcess
from mindx_elastic.agent.standby import NodePlace
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.status_page import NODES_REPLACED, Status, WorkerPhase
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.protocol import Phase, Report, decide

__all__ = ["Job"]

TICK_S = 0.25
TIMEOUT_S = 30.0
_STEP, _NOTICED_S = 7, 5.0


class Clock:
    """In the place of the module `time` where the decisions are taken."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


class Store:
    """Of the workers, on the first node; one view for each node."""

    def __init__(self, job: Job, node: Node) -> None:
        self._job, self._node, self._content = job, node, job.content

    def _reach(self) -> None:
        first = self._job.nodes[0]
        if first.is_crashed or first.is_still or self._node.is_cut:
            raise OSError("the store does not answer")

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self._content for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._reach()
        return [self._content[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._reach()
        return self._content.setdefault(key, desired.encode())


@dataclass
class Rank:
    """One process of a rank."""

    number: int
    pid: int
    generation: int = 0
    """The last recovery that it has taken part in."""
    told: int = 0
    """The recovery that it knows of."""
    is_new: bool = False
    has_left: bool = False
    """It has saved what it had, and ends."""


@dataclass
class Connection:
    """Between a node's agent and the first one's. Words come late, and in order."""

    words: list[tuple[float, str, bytes]] = field(default_factory=list)
    """When it comes, to which side (``first`` or ``other``), and what."""
    numbers: tuple[int, int] = (0, 0)
    """For the first agent's detector and for the other's."""
    stands: bool = False
    retry_at: float = 0.0
    beat_at: float = 0.0


class Node:
    """A machine with its agent; what `NodeWatch` is to the recovery."""

    def __init__(self, job: Job, node: int, token: str) -> None:
        self.job, self.node, self.token, self.num_nodes = job, node, token, job.num_nodes
        self.name = f"machine of {token}"
        self.is_crashed = self.is_still = self.is_cut = self.is_out = False
        self.outcome = ""
        """How its attempt has ended; empty: it goes on."""
        self.own = range(node * job.ranks, (node + 1) * job.ranks)
        self.live = {rank: Rank(rank, job.new_pid()) for rank in self.own}
        self.exits: list[WorkerExit] = []
        self.agents = FailureDetector(job.clock.now)
        self.connection = Connection()
        self.server: Any = SimpleNamespace(
            put_out=self._put_out,
            expect=lambda node, token: self.agents.expect(node, token, job.clock.now),
            records_of=lambda rank: None,
            ranks_kept=[],
            wakeup=SimpleNamespace(fd=0),
        )
        self.heartbeat: Any = None
        self.has_first_gone = False
        processes: Any = dict(self.live)
        self.workers: Any = SimpleNamespace(
            processes=processes, live=self.live, statuses=self.statuses, replace=self._replace, exits=[]
        )
        watch: Any = SimpleNamespace(newest=0, wakeup=SimpleNamespace(fd=0, drain=lambda: None), stop=lambda: None)
        self.watch = watch
        nodes: Any = self
        place = NodePlace("none", 0, job.num_nodes, 0, 0, "first", 1, 1, "s", 0, 0)
        self.recovery = NodesRecovery(
            self.workers,
            self.board,
            self._start,
            watch=watch,
            nodes=nodes,
            place=place,
            timeout_s=TIMEOUT_S,
            most=10,
            note=lambda record: None,
            world_size=job.world_size,
        )

    # --- what the recovery asks for -----------------------------------------------------------------------------------

    def board(self, generation: int) -> Board:
        store: Any = Store(self.job, self)
        return Board(store, key=None, scope=f"s/{generation}", writer=self.job.world_size + self.node)

    def statuses(self) -> dict[int, Status]:
        return {rank: self._page(process) for rank, process in self.live.items() if not process.is_new}

    def _page(self, process: Rank) -> Status:
        phase = WorkerPhase.STOPPING if process.has_left else WorkerPhase.TRAINING
        boundary_ns = 0 if self.recovery.is_active else self.job.clock.monotonic_ns()
        return Status(pid=process.pid, phase=phase, step=_STEP, in_place=NODES_REPLACED, boundary_ns=boundary_ns)

    def _replace(self, rank: int, process: Rank) -> None:
        self.live[rank] = process

    def _start(self, rank: int, generation: int, *, can_wait: bool) -> NewProcess:
        process: Any = Rank(rank, self.job.new_pid(), told=generation, is_new=True)
        return NewProcess(process, "zygote")

    def _put_out(self, lost: Lost) -> None:
        self.agents.put_out(lost.node, lost.token)
        other = self.job.agent_of(lost.token)
        if other.connection.stands:
            self.job.send(other, "other", b"out")

    def keeper(self) -> None:
        return None

    def drain(self) -> None:
        pass

    def note_lost(self, lost: object) -> None:
        pass

    def note_whole(self) -> None:
        pass

    def note_first_lost(self) -> None:
        self.has_first_gone = True

    def offer(self, place: NodePlace | None) -> None:
        self.job.offered = place

    def lost_now(self) -> list[Lost]:
        lost = self.agents.lost(self.job.clock.now)
        if self.node == 0:
            return lost
        first = Lost(0, "machine of the first", "", tuple(range(self.job.ranks)), False)
        return [first] if lost and not self.has_first_gone else []

    # --- its life -----------------------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        if rank in self.live:
            status = self._page(self.live[rank])
            process = self.live.pop(rank)
            self.exits.append(WorkerExit(rank=rank, pid=process.pid, code=-9, status=status))

    def end(self, outcome: str) -> None:
        self.outcome = outcome
        self.live.clear()
        self.recovery.close()
        if self.node and self.connection.stands:
            self.job.send(self, "first", b"out" if self.has_first_gone else b"bye")

    def step(self) -> None:
        """What the main thread of its agent does when it wakes up; see `Attempt`."""
        self.agents.look(self.job.clock.now)
        if self.outcome:
            return
        with_store = Store(self.job, self)
        try:
            while with_store.check([f"{self.watch.newest + 1}/plan"]):
                self.watch.newest += 1
        except OSError:
            pass
        if self.recovery.is_out:
            self.end("out")
            return
        ends, self.exits = self.exits, []
        for end in ends:
            if self.recovery.is_active:
                self.recovery.hear_end(end)
            elif not self.recovery.begin(end, "killed by SIGKILL"):
                self.end("out" if self.recovery.is_out else "restart")
                return
        for news in self.recovery.hear_others(is_stopping=False):
            if news.words and news.about is None:
                self.end("restart")
                return
        phase = self.recovery.look()
        if phase is Phase.FALLBACK or (phase is Phase.RUN and len(self.live) < len(self.own)):
            self.end("out" if self.recovery.is_out else "restart")
            return
        generation = self.recovery._machine.generation
        for process in self.live.values():
            if self.recovery.is_active:
                process.told = generation

    def step_ranks(self) -> None:
        """What its ranks do, each when it comes to it."""
        for process in list(self.live.values()):
            if self.job.dice.random() < 0.5 and process.told > process.generation and not process.has_left:
                try:
                    self._take_part(process)
                except ERRORS:
                    process.has_left = True  # its store is gone: it saves and ends
            elif self.job.is_broken and not self.recovery.is_active:
                process.has_left = True  # its collectives fail, and nobody has told it of a recovery
        if any(process.has_left for process in self.live.values()) and not self.recovery.is_active:
            self.end("restart")

    def _take_part(self, process: Rank) -> None:
        """As `rejoin.member`: report, agree, give the state, say that it is ready."""
        board, g, world = self.board(process.told), process.told, range(self.job.world_size)
        if process.is_new:
            if board.write(f"{g}/joins/{process.number}", {"process": process.pid}).get("process") != process.pid:
                process.has_left = True
                return
        else:
            facts: dict[str, Any] = {"run_id": "run", "attempt": 0, "step": _STEP, "clean": True, "groups": "g"}
            note = {**Report(rank=process.number, **facts).to_json(), "pid": process.pid}
            if board.write(f"{g}/out/{process.number}", note).get("pid") != process.pid:
                process.has_left = True  # taken for dead, or the recovery is over
                return
        notes = board.read([f"{g}/out/{rank}" for rank in world])
        if any("refusal" in note for note in notes.values()) or "refusal" in board.read([f"{g}/state"]).get(
            f"{g}/state", {}
        ):
            process.has_left = True
            return
        if len(notes) < len(world):
            return
        read = {rank: notes[f"{g}/out/{rank}"] for rank in world}
        reports = {rank: None if note.get("dead") else Report.from_json(rank, note) for rank, note in read.items()}
        verdict = decide(reports, world_size=len(world))
        if verdict.refusal:
            board.write(f"{g}/refusal", {"rank": process.number, "refusal": verdict.refusal})
            return
        if not board.has([f"{g}/joins/{rank}" for rank in verdict.dead]):
            return
        if process.number == verdict.donor:
            board.write(f"{g}/state", {"path": "/dev/shm/slot"})
        if "path" in board.read([f"{g}/state"]).get(f"{g}/state", {}):
            board.write(f"{g}/ready/{process.number}", {"ready": self.job.clock.now, "pid": process.pid})
            process.generation, process.is_new = g, False


class Job:
    """Some nodes, and what happens to them."""

    def __init__(self, seed: int, *, num_nodes: int = 3, ranks: int = 1) -> None:
        self.seed = seed
        self.dice, self.clock, self.content = random.Random(seed), Clock(), dict[str, bytes]()
        self.num_nodes, self.ranks, self.world_size = num_nodes, ranks, num_nodes * ranks
        self.story: list[str] = []
        self.offered: NodePlace | None = None
        self.num_standby = self.dice.randrange(3)
        self.is_broken = False
        """A rank has had no process for so long that all others have noticed."""
        self._whole_at = self.clock.now
        self._pid = 100
        self.nodes = [Node(self, node, f"t{node}") for node in range(num_nodes)]
        for each in self.nodes[1:]:
            self._connect(each)

    def new_pid(self) -> int:
        self._pid += 1
        return self._pid

    def agent_of(self, token: str) -> Node:
        return next(each for each in self.nodes if each.token == token)

    def tell(self, words: str) -> None:
        self.story.append(f"{self.clock.now - 1000:.2f} s: {words}")

    # --- the network --------------------------------------------------------------------------------------------------

    def send(self, node: Node, to: str, word: bytes) -> None:
        delay_s = self.dice.choice((0.0, 0.0, 0.0, TICK_S, 3 * TICK_S))
        last = max((at for at, side, _ in node.connection.words if side == to), default=0.0)
        node.connection.words.append((max(last, self.clock.now + delay_s), to, word))

    def _connect(self, node: Node) -> None:
        """The first machine takes the connection also where its agent stands still, and has not read the greeting."""
        theirs = node.agents.greet(0, "", self.clock.now, name="", ranks=())
        line = node.connection
        line.stands, line.numbers, line.words = True, (0, theirs), [(self.clock.now, "first", b"hello")]

    def break_connection(self, node: Node, retry_s: float) -> None:
        line, now = node.connection, self.clock.now
        if line.stands:
            if line.numbers[0]:
                self.nodes[0].agents.end(node.node, node.token, now, connection=line.numbers[0])
            node.agents.end(0, "", now, connection=line.numbers[1])
        line.stands, line.words, line.retry_at = False, [], now + retry_s

    def _carry(self, node: Node) -> None:
        line, first, now = node.connection, self.nodes[0], self.clock.now
        if node.is_crashed or first.is_crashed or node.is_cut:
            if line.stands:
                self.break_connection(node, 0.0)
            return
        if not line.stands:
            if now >= line.retry_at and not (node.is_still or node.outcome or first.outcome):
                self._connect(node)
            return
        if now >= line.beat_at and not (node.is_still or node.outcome):
            line.beat_at = now + 1.0
            self.send(node, "first", b".")
        for word in [each for each in line.words if each[0] <= now]:
            to, what = word[1:]
            side = first if to == "first" else node
            if side.is_still:
                continue
            line.words.remove(word)
            if what == b"hello":
                first.agents.look(now)
                ranks = tuple(node.own)
                mine = first.agents.greet(node.node, node.token, now, name=node.name, ranks=ranks)
                line.numbers = mine, line.numbers[1]
                if first.agents.is_out(node.node, node.token):
                    self.send(node, "other", b"out")
            elif to == "first":
                first.agents.look(now)
                first.agents.hear(node.node, node.token, now, goodbye=what == b"bye")
                first.is_out = first.is_out or what == b"out"
                if not first.outcome:
                    self.send(node, "other", b".")
            else:
                node.agents.look(now)
                node.is_out = node.is_out or what == b"out"
                node.agents.hear(0, "", now, goodbye=what == b"bye")

    # --- time ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _patched(self) -> Iterator[None]:
        modules: list[Any] = [recovery, nodes_recovery]
        before = [module.time for module in modules]
        for module in modules:
            module.time = self.clock
        try:
            yield
        finally:
            for module, old in zip(modules, before, strict=True):
                module.time = old

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        with self._patched():
            while self.clock.now < end:
                self.clock.now += TICK_S
                for node in self.nodes[1:]:
                    self._carry(node)
                self._take_place()
                there = {rank for node in self.going() for rank in node.live}
                self._whole_at = self.clock.now if len(there) == self.world_size else self._whole_at
                self.is_broken = self.clock.now - self._whole_at > _NOTICED_S
                for node in self.dice.sample(self.nodes, len(self.nodes)):
                    if not (node.is_crashed or node.is_still):
                        node.step()
                        node.step_ranks()
                self.check()

    def _take_place(self) -> None:
        """An agent that waits claims what is offered."""
        place = self.offered
        if place is None or not self.num_standby or self.dice.random() < 0.7 or self.nodes[0].is_crashed:
            return
        node = Node(self, place.node, f"n{self._pid}")
        board = node.board(place.generation)
        try:
            if board.read([f"{place.generation}/over"]):
                return
            note = board.write(f"{place.generation}/taken/{place.node}", {"token": node.token, "name": node.name})
        except ERRORS:
            return
        if note.get("token") == node.token:
            self.num_standby -= 1
            self.tell(f"{node.name} takes the place of node {place.node}")
            for process in node.live.values():
                process.told, process.is_new = place.generation, True
            node.recovery.join(place)
            self.nodes.append(node)
            self._connect(node)

    # --- faults -------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """Something bad, at this moment."""
        node = self.dice.choice(self.nodes)
        what = self.dice.choice(("kill", "kill", "crash", "still", "cut", "reset", "wake"))
        self.tell(f"{what} {node.token}")
        with self._patched():
            if what == "kill" and not node.is_crashed and not node.outcome:
                node.kill(self.dice.choice(list(node.own)))
            elif what == "crash":
                node.is_crashed = True
                node.live.clear()
            elif what == "still":
                node.is_still = True
            elif what == "cut" and node.node:
                node.is_cut = True
            elif what == "reset" and node.node:
                self.break_connection(node, self.dice.choice((0.0, TICK_S, 2.0)))
            elif what == "wake":
                self.heal()

    def heal(self) -> None:
        """Who stands still goes on, and who is cut off is reached again."""
        for node in self.nodes:
            node.is_still = node.is_cut = False

    # --- what must hold -----------------------------------------------------------------------------------------------

    def going(self) -> list[Node]:
        return [node for node in self.nodes if not (node.is_crashed or node.outcome)]

    def check(self) -> None:
        """Never do two processes of a rank train in one generation, and never two agents have one place that are both
        heard."""
        newest: dict[tuple[int, int], int] = {}
        for node in self.going():
            for process in node.live.values():
                if process.generation and not process.has_left:
                    key = (process.generation, process.number)
                    assert key not in newest, self.tale(f"two processes of rank {process.number} train in {key[0]}")
                    newest[key] = process.pid

    def check_end(self) -> None:
        """All are healed, and much time has passed: who goes on, goes on with the same generation and all ranks."""
        going = self.going()
        if not going:
            return
        assert not any(node.recovery.is_active for node in going), self.tale("a recovery never ends")
        generations = {node.recovery._machine.generation for node in going}
        assert len(generations) == 1, self.tale(f"nodes go on in generations {generations}")
        ranks = sorted(rank for node in going for rank in node.live)
        assert ranks == list(range(self.world_size)), self.tale(f"ranks {ranks} go on")

    def tale(self, words: str) -> str:
        return "\n".join([f"seed {self.seed}: {words}", *self.story])
