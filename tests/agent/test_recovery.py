"""The agent's side of a recovery in place: what it writes to the board, whom it starts, when it gives up, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.agent.recovery import Recovery
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.protocol import Phase, Report

KILLED = "killed by SIGKILL"


class Node:
    """Workers without processes, and a board in this process."""

    def __init__(self, tmp_path: Path, *, ranks: int = 3, most: int = 10, timeout_s: float = 60.0) -> None:
        self.store: Any = dist.HashStore()
        self.started: list[tuple[int, int]] = []
        self.pages = {
            rank: Status(pid=100 + rank, phase=WorkerPhase.TRAINING, step=7, in_place=1) for rank in range(ranks)
        }
        self.live: dict[int, Any] = {rank: SimpleNamespace(pid=100 + rank) for rank in range(ranks)}
        workers: Any = SimpleNamespace(
            processes=dict(self.live), live=self.live, statuses=lambda: self.pages, replace=self.live.__setitem__
        )
        self.recovery = Recovery(
            workers, self.board, self.start, timeout_s=timeout_s, most=most, events=EventLog(tmp_path / "events.jsonl")
        )

    def board(self, generation: int) -> Board:
        return Board(self.store, key=None, scope=f"0/{generation}", writer=len(self.pages))

    def start(self, rank: int, generation: int, *, can_wait: bool) -> Any:
        self.started.append((rank, generation))
        return SimpleNamespace(pid=200 + rank)

    def end(self, rank: int, code: int = -9, **more: Any) -> WorkerExit:
        del self.live[rank]
        return WorkerExit(rank=rank, pid=100 + rank, code=code, status=self.pages[rank], **more)

    def report(self, rank: int, generation: int = 1, **more: Any) -> None:
        facts: dict[str, Any] = {"run_id": "run", "attempt": 0, "step": 7, "clean": True, "groups": "g"}
        note = Report(rank=rank, **{**facts, **more}).to_json()
        self.board(generation).write(f"{generation}/out/{rank}", note)

    def write(self, key: str, **content: Any) -> dict[str, Any]:
        return self.board(1).write(key, content)

    def read(self, key: str) -> dict[str, Any]:
        return self.board(1).read([key]).get(key, {})

    def succeed(self, victim: int, generation: int) -> None:
        ranks = range(len(self.pages))
        assert self.recovery.begin(self.end(victim), f"{KILLED} in generation {generation}")
        for rank in set(ranks) - {victim}:
            self.report(rank, generation)
        assert self.recovery.look() is Phase.AGREED
        self.write(f"{generation}/state", path="/dev/shm/slot")
        for rank in ranks:
            self.write(f"{generation}/ready/{rank}", ready=1.0)
        assert self.recovery.look() is Phase.RUN


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_dead_rank_gets_a_new_process_at_once_and_the_survivors_hear_of_it(node: Node) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    assert node.started == [(1, 1)]
    assert node.read("1/plan") == {"generation": 1}
    assert node.read("1/out/1") == {"dead": True}
    assert node.recovery.look() is Phase.CUT


def test_a_second_death_before_its_report_only_makes_one_more_place(node: Node) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    node.recovery.hear_end(node.end(2))
    assert node.started == [(1, 1), (2, 1)]
    node.report(0)
    assert node.recovery.look() is Phase.AGREED


@pytest.mark.parametrize("has_reported", [True, False], ids=["seen", "not seen yet"])
def test_a_second_death_after_its_report_ends_it(node: Node, has_reported: bool) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    node.report(2)
    if has_reported:
        node.recovery.look()
    node.recovery.hear_end(node.end(2))
    assert node.recovery.look() is Phase.FALLBACK
    assert "rank 2 has died during the recovery" in node.recovery.reason
    assert not node.recovery.must_kill
    assert "refusal" in node.read("1/state"), "the survivors are released"
    assert "refusal" in node.read("1/out/0")


def test_the_donor_may_be_faster_than_the_end_of_the_recovery(node: Node) -> None:
    """Then its state is in shared memory, and no rank saves any more."""
    assert node.recovery.begin(node.end(1), KILLED)
    node.report(0)
    node.report(2)
    assert node.recovery.look() is Phase.AGREED
    node.write("1/state", path="/dev/shm/slot")
    node.recovery.hear_end(node.end(2))
    assert node.recovery.look() is Phase.FALLBACK
    assert node.recovery.must_kill


def test_a_rank_that_cannot_go_on_says_why(node: Node) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    node.write("1/refusal", rank=0, refusal="the store is full")
    assert node.recovery.look() is Phase.FALLBACK
    assert node.recovery.reason == "rank 0: the store is full"


def test_a_rank_that_leaves_is_the_reason(node: Node) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    node.pages[2] = replace(node.pages[2], phase=WorkerPhase.LEFT, exit_code=143)
    node.recovery.hear_end(node.end(2, 143))
    assert node.recovery.look() is Phase.FALLBACK
    assert node.recovery.reason.startswith("rank 2 has left: exit code 143")


def test_the_time_is_up(tmp_path: Path) -> None:
    node = Node(tmp_path, timeout_s=0.0)
    assert node.recovery.begin(node.end(1), KILLED)
    node.report(0)
    assert node.recovery.look() is Phase.FALLBACK
    assert "rank 2 did not come out of the training within 0 s (--rejoin-timeout)" in node.recovery.reason


def test_what_makes_no_sense_on_the_board_ends_it(node: Node) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    node.write("1/out/0", step="seven")
    assert node.recovery.look() is Phase.FALLBACK


def test_a_process_that_cannot_be_started_ends_it(node: Node) -> None:
    def fail(rank: int, generation: int, *, can_wait: bool) -> Any:
        raise OSError("no memory")

    node.recovery._start = fail
    assert not node.recovery.begin(node.end(1), KILLED)
    assert "no memory" in node.recovery.reason


def test_after_so_many_the_job_is_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path, most=2)
    node.succeed(1, 1)
    node.succeed(2, 2)
    assert not node.recovery.begin(node.end(1), KILLED)
    assert "there were 2 in this attempt" in node.board(3).read(["3/plan"])["3/plan"]["refusal"]


def test_the_same_end_at_the_same_step_again_and_again_is_left_to_the_restart(node: Node) -> None:
    for generation in (1, 2):
        assert node.recovery.begin(node.end(1), KILLED)
        for rank in (0, 2):
            node.report(rank, generation)
        node.recovery.look()
        node.write(f"{generation}/state", path="/dev/shm/slot")
        for rank in range(3):
            node.write(f"{generation}/ready/{rank}", ready=1.0)
        assert node.recovery.look() is Phase.RUN
    assert not node.recovery.begin(node.end(1), KILLED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in_place": 0}, "rank 0 is not inside of guard.run"),
        ({"phase": WorkerPhase.STOPPING}, "rank 0 is not inside of guard.run"),
        ({"finished": True}, "rank 0 has finished its training"),
    ],
)
def test_a_survivor_that_cannot_take_part(node: Node, change: dict[str, Any], words: str) -> None:
    node.pages[0] = replace(node.pages[0], **change)
    assert words in node.recovery.why_not([1])


def test_without_a_survivor_there_is_none(tmp_path: Path) -> None:
    node = Node(tmp_path, ranks=2)
    node.end(0)
    assert not node.recovery.begin(node.end(1), KILLED)
