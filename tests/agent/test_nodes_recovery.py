"""The agents of several nodes in a recovery. `tests/simulation` has whole stories of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.agent.boards import Boards, PlanWatch
from mindx_elastic.agent.nodes_recovery import NodesRecovery
from mindx_elastic.agent.recovery import NewProcess
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.protocol import Phase, Report

KILLED = "killed by SIGKILL"


class Plans:
    """A `PlanWatch` without a thread."""

    def __init__(self, store: Any) -> None:
        self._store, self.wakeup = store, SimpleNamespace(fd=0, drain=lambda: None)

    @property
    def newest(self) -> int:
        number = 0
        while self._store.check([f"{number + 1}/plan"]):
            number += 1
        return number

    def stop(self) -> None:
        pass


class Agent:
    """Of one node: workers without processes."""

    def __init__(self, store: Any, node: int, num_nodes: int, ranks: int) -> None:
        self.store, self.node, self.world = store, node, num_nodes * ranks
        self.own = range(node * ranks, (node + 1) * ranks)
        self.pages = {rank: Status(pid=100 + rank, phase=WorkerPhase.TRAINING, step=7, in_place=1) for rank in self.own}
        self.live: dict[int, Any] = {rank: SimpleNamespace(pid=100 + rank) for rank in self.own}
        self.started: list[int] = []
        self.told: list[int] = []
        self.records: list[Any] = []
        workers: Any = SimpleNamespace(
            processes=dict(self.live), live=self.live, statuses=lambda: self.pages, replace=self.live.__setitem__
        )
        watch: Any = Plans(store)
        self.recovery = NodesRecovery(
            workers,
            self.board,
            self.start,
            watch=watch,
            records=None,
            timeout_s=60.0,
            most=10,
            note=self.records.append,
            world_size=self.world,
        )

    def board(self, generation: int) -> Board:
        return Board(self.store, key=None, scope=f"s/{generation}", writer=self.world + self.node)

    def start(self, rank: int, generation: int, *, can_wait: bool) -> Any:
        self.started.append(rank)
        return NewProcess(SimpleNamespace(pid=200 + rank), "zygote")

    def kill(self, rank: int) -> None:
        del self.live[rank]
        end = WorkerExit(rank=rank, pid=100 + rank, code=-9, status=self.pages[rank])
        if self.recovery.is_active:
            self.recovery.hear_end(end)
        elif self.recovery.phase is Phase.RUN:
            self.recovery.begin(end, KILLED)

    def hear(self) -> None:
        news = self.recovery.hear_others(is_stopping=False)
        self.told += [each.about for each in news if each.about is not None]

    def time_is_up(self) -> None:
        if self.recovery.is_active:
            assert self.recovery._now is not None
            self.recovery._now.deadline = 0.0
            self.recovery.look()

    def rank_writes(self, key: str, **content: Any) -> dict[str, Any]:
        return self.board(1).write(f"1/{key}", content)

    def reports(self, rank: int) -> None:
        facts: dict[str, Any] = {"run_id": "run", "attempt": 0, "step": 7, "clean": True, "groups": "g"}
        self.board(1).write(f"1/out/{rank}", {**Report(rank=rank, **facts).to_json(), "node": self.node})


@pytest.fixture
def agents() -> list[Agent]:
    store: Any = dist.HashStore()
    return [Agent(store, node, 3, 1) for node in range(3)]


def go_on(agents: list[Agent]) -> None:
    """All ranks do their part."""
    for agent in agents:
        agent.hear()
        agent.reports(agent.own[0])
    agents[0].rank_writes("state", path="/shm/x")
    for agent in agents:
        agent.rank_writes(f"ready/{agent.own[0]}", ready=1.0)


def test_every_agent_takes_part_in_what_one_has_begun(agents: list[Agent]) -> None:
    agents[1].kill(1)
    go_on(agents)
    assert [agent.told for agent in agents] == [[1], [], [1]]
    assert [agent.recovery.look() for agent in agents] == [Phase.RUN] * 3
    assert [agent.started for agent in agents] == [[], [1], []]
    assert agents[0].board(1).read(["1/over"])["1/over"] == {"done": True}


def test_an_agent_whose_rank_cannot_take_part_ends_it_for_all(agents: list[Agent]) -> None:
    agents[2].pages[2] = replace(agents[2].pages[2], in_place=0)
    agents[1].kill(1)
    go_on(agents)
    assert [agent.recovery.look() for agent in agents] == [Phase.FALLBACK] * 3
    assert {agent.recovery.reason for agent in agents} == {"rank 2 is not inside of guard.run(...)"}
    assert agents[2].told == []


def test_two_agents_that_begin_at_the_same_time(agents: list[Agent]) -> None:
    agents[0].kill(0)
    agents[2].kill(2)
    agents[1].hear()
    agents[1].reports(1)
    agents[1].rank_writes("state", path="/shm/x")
    for rank in range(3):
        agents[1].rank_writes(f"ready/{rank}", ready=1.0)
    assert [agent.recovery.look() for agent in agents] == [Phase.RUN] * 3
    assert [agent.started for agent in agents] == [[0], [], [2]]


def test_one_that_refuses_while_another_has_begun(agents: list[Agent]) -> None:
    agents[0].kill(0)
    agents[2].pages[2] = replace(agents[2].pages[2], phase=WorkerPhase.LEFT)
    agents[2].kill(2)  # its own error: no new process
    assert agents[2].started == []
    assert agents[0].recovery.look() is Phase.FALLBACK


def test_a_success_that_stands_is_not_taken_back_by_a_clock(agents: list[Agent]) -> None:
    agents[1].kill(1)
    go_on(agents)
    assert agents[0].recovery.look() is Phase.RUN
    agents[2].time_is_up()
    assert agents[2].recovery.look() is Phase.RUN


def test_a_time_out_of_one_is_one_of_all(agents: list[Agent]) -> None:
    agents[1].kill(1)
    agents[0].hear()
    agents[2].hear()
    agents[2].time_is_up()
    assert [agent.recovery.look() for agent in agents] == [Phase.FALLBACK] * 3
    assert not any(agent.recovery.must_kill for agent in agents)


def test_a_plan_that_is_none(agents: list[Agent]) -> None:
    agents[0].board(1).write("1/plan", {"generation": 1, "rank": 99, "cause": "x"})
    agents[1].hear()
    assert agents[1].recovery.phase is Phase.RUN


def test_a_hang_is_not_recovered_from(agents: list[Agent]) -> None:
    assert "over several nodes" in agents[0].recovery.why_not([0])
    assert agents[0].recovery.why_not([]) == ""


# --- the parts ---


def test_a_store_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each board: the agent's main thread waits. It is asked again once it has answered."""
    monkeypatch.setattr("mindx_elastic.agent.boards._ANSWER_S", 0.05)
    asked: list[str] = []
    goes_on = threading.Event()

    def check(keys: list[str]) -> bool:
        asked.extend(keys)
        return not goes_on.wait(60.0)

    store = SimpleNamespace(check=check, multi_get=lambda keys: [])
    boards = Boards(lambda: store, "s", 2)
    with pytest.raises(TimeoutError, match="has not answered"):
        boards(1).read(["first"])
    for generation in (1, 2):
        with pytest.raises(TimeoutError, match="does not answer"):
            boards(generation).read(["second"])
    assert asked == ["first"]
    goes_on.set()
    assert boards._question is not None and boards._question.done.wait(60.0)
    monkeypatch.setattr("mindx_elastic.agent.boards._ANSWER_S", 60.0)
    assert boards(2).read(["third"]) == {} and asked == ["first", "third"]
    boards.close()


def test_a_plan_is_seen_by_the_watch() -> None:
    import select

    store = dist.HashStore()
    watch = PlanWatch(lambda: store, 2).start()
    try:
        store.set("1/plan", "{}")
        assert select.select([watch.wakeup.fd], [], [], 10.0)[0]
        assert watch.newest == 1
    finally:
        watch.stop()
