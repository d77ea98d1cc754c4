"""The machines of a simulated job of several nodes, and what is on them: clock, store, processes of ranks, agents.

What decides in an agent is the code that runs: `NodesRecovery` with its `Coordinator` and `Board`. What happens to the
machines, and what must hold, is in `agents`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mindx_elastic.agent.nodes_recovery import NodesRecovery
from mindx_elastic.agent.recovery import ERRORS, NewProcess
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.protocol import Phase, Report, decide

if TYPE_CHECKING:
    from tests.simulation.agents import Job

__all__ = ["TIMEOUT_S", "Clock", "Node", "Rank", "Store"]

TIMEOUT_S = 30.0
_SAVE_S = 25.0
LOST_S = 25.0
"""Until the rendezvous misses a node, and no step is passed for long enough."""


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


class Node:
    """A machine with its agent."""

    def __init__(self, job: Job, node: int) -> None:
        self.job, self.node, self.name = job, node, f"node {node}"
        self.is_crashed = self.is_still = self.is_cut = False
        self.has_ended = False
        """Its attempt has: it restarts the job."""
        self.leaves_at: float | None = None
        """It restarts the job, and its ranks save until then; None: it does not."""
        self.is_end_heard = False
        """The others could hear that it ends, or read so later."""
        self.alone_s = 0.0
        """How long it has gone on while another one restarts the job, and it could hear so."""
        self.own = range(node * job.ranks, (node + 1) * job.ranks)
        self.live = {rank: Rank(rank, job.new_pid()) for rank in self.own}
        self.exits: list[WorkerExit] = []
        self.whole_at = job.clock.now
        """When no other node was away."""
        processes: Any = dict(self.live)
        self.workers: Any = SimpleNamespace(
            processes=processes, live=self.live, statuses=self.statuses, replace=self._replace, exits=[]
        )
        watch: Any = SimpleNamespace(newest=0, wakeup=SimpleNamespace(fd=0, drain=lambda: None), stop=lambda: None)
        self.watch = watch
        self.recovery = NodesRecovery(
            self.workers,
            self.board,
            self._start,
            watch=watch,
            records=None,
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
        boundary_ns = int(self.job.trained_at * 1e9)
        facts: dict[str, Any] = {"step": self.job.step, "in_place": 1, "boundary_ns": boundary_ns}
        return Status(pid=process.pid, phase=phase, **facts)

    def _replace(self, rank: int, process: Rank) -> None:
        self.live[rank] = process

    def _start(self, rank: int, generation: int, *, can_wait: bool) -> NewProcess:
        process: Any = Rank(rank, self.job.new_pid(), told=generation, is_new=True)
        return NewProcess(process, "zygote")

    # --- its life -----------------------------------------------------------------------------------------------------

    @property
    def is_well(self) -> bool:
        return not (self.is_crashed or self.is_still or self.is_cut)

    @property
    def goes_on(self) -> bool:
        return not (self.is_crashed or self.has_ended)

    def kill(self, rank: int, *, by_itself: bool = False) -> None:
        """`by_itself`: it fails, and has left its guard."""
        if rank in self.live:
            process = self.live.pop(rank)
            process.has_left = process.has_left or by_itself
            code = 1 if by_itself else -9
            self.exits.append(WorkerExit(rank=rank, pid=process.pid, code=code, status=self._page(process)))

    def leave(self, *, has_told: bool = True) -> None:
        """Its ranks save and end, which may take a while. `has_told`: the other agents, if it can reach the board."""
        if self.leaves_at is None:
            self.is_end_heard = has_told and self._is_heard
            self.leaves_at = self.job.clock.now + self.job.dice.choice((0.0, 0.0, _SAVE_S))
            self.job.tell(f"{self.name} restarts the job")

    @property
    def _is_heard(self) -> bool:
        first = self.job.nodes[0]
        return self.is_well and first.is_well

    def end(self) -> None:
        self.has_ended = True
        self.is_end_heard = self.is_end_heard or self._is_heard
        self.job.tell(f"{self.name} ends")
        self.live.clear()
        self.recovery.close()

    def look_at_others(self) -> None:
        """As `rendezvous.Membership`: is another node away for long?"""
        now, others = self.job.clock.now, [node for node in self.job.nodes if node is not self]
        is_whole = all(node.is_well and not node.has_ended for node in others) and self.is_well
        self.whole_at = now if is_whole or self.recovery.is_active else self.whole_at
        if now - max(self.whole_at, self.job.trained_at) > LOST_S and self.leaves_at is None:
            self.leave()

    def step(self) -> None:
        """What the main thread of its agent does when it wakes up; see `Attempt`."""
        self.look_at_others()
        ends, self.exits = self.exits, []
        for end in ends:
            if self.recovery.is_active:
                self.recovery.hear_end(end)
            elif self.leaves_at is None and not self.recovery.begin(end, "killed by SIGKILL"):
                self.leave()
        for news in self.recovery.hear_others(is_stopping=self.leaves_at is not None):
            if news.words and news.about is None:
                self.leave()
        if self.leaves_at is not None:
            if self.job.clock.now >= self.leaves_at:
                self.end()
            return
        phase = self.recovery.look()
        if phase is Phase.FALLBACK or (phase is Phase.RUN and len(self.live) < len(self.own) and not self.exits):
            self.leave()
            return
        generation = self.recovery._machine.generation
        for process in self.live.values():
            if self.recovery.is_active:
                process.told = generation

    def watch_plans(self) -> None:
        try:
            if Store(self.job, self).check([f"{self.watch.newest + 1}/plan"]):
                self.watch.newest += 1
        except OSError:
            pass

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
            self.leave(has_told=False)

    def _take_part(self, process: Rank) -> None:
        """As `rejoin.member`: report, agree, give the state, say that it is ready."""
        board, g, world = self.board(process.told), process.told, range(self.job.world_size)
        if not process.is_new:
            facts: dict[str, Any] = {"run_id": "run", "attempt": 0, "step": self.job.step, "clean": True, "groups": "g"}
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
        if process.number == verdict.donor:
            board.write(f"{g}/state", {"path": "/dev/shm/slot"})
        if "path" in board.read([f"{g}/state"]).get(f"{g}/state", {}):
            board.write(f"{g}/ready/{process.number}", {"ready": self.job.clock.now, "pid": process.pid})
            process.generation, process.is_new = g, False
