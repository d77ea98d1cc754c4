"""The agent's side of a recovery in place: what it writes to the board, whom it starts, when it gives up, and why."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.agent.recovery import Recovery
from mindx_elastic.agent.workers import WorkerExit
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.rejoin.board import Board
from mindx_elastic.rejoin.protocol import Phase, Report
from mindx_elastic.rejoin.record import FORKED, SPARE, RecoveryRecord, Replacement

KILLED = "killed by SIGKILL"


class Node:
    """Workers without processes, and a board in this process."""

    def __init__(self, *, ranks: int = 3, most: int = 10, timeout_s: float = 60.0, **more: Any) -> None:
        self.store: Any = dist.HashStore()
        self.started: list[tuple[int, int]] = []
        self.told: list[RecoveryRecord] = []
        self.spares = 0
        self.pages = {
            rank: Status(pid=100 + rank, phase=WorkerPhase.TRAINING, step=7, in_place=1) for rank in range(ranks)
        }
        self.live: dict[int, Any] = {rank: SimpleNamespace(pid=100 + rank) for rank in range(ranks)}
        workers: Any = SimpleNamespace(
            processes=dict(self.live), live=self.live, statuses=lambda: self.pages, replace=self.live.__setitem__
        )
        more |= {"timeout_s": timeout_s, "most": most, "note": self.told.append}
        self.recovery = Recovery(workers, self.board, self.start, **more)

    def board(self, generation: int) -> Board:
        return Board(self.store, key=None, scope=f"0/{generation}", writer=len(self.pages))

    def start(self, rank: int, generation: int) -> Any:
        self.started.append((rank, generation))
        self.spares -= 1
        process: Any = SimpleNamespace(pid=100 * (1 + len(self.started)) + rank)
        return process, SPARE if self.spares >= 0 else FORKED

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

    def succeed(self, victim: int, generation: int, cause: str = "") -> None:
        ranks = range(len(self.pages))
        assert self.recovery.begin(self.end(victim), cause or f"{KILLED} in generation {generation}")
        for rank in set(ranks) - {victim}:
            self.report(rank, generation)
        assert self.recovery.look() is Phase.AGREED
        self.write(f"{generation}/state", path="/dev/shm/slot")
        for rank in ranks:
            self.write(f"{generation}/ready/{rank}", ready=1.0)
        assert self.recovery.look() is Phase.RUN


@pytest.fixture
def node() -> Node:
    return Node()


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


def test_the_time_is_up() -> None:
    node = Node(timeout_s=0.0)
    assert node.recovery.begin(node.end(1), KILLED)
    node.report(0)
    assert node.recovery.look() is Phase.FALLBACK
    assert "rank 2 did not come out of the training within 0 s (--rejoin-timeout)" in node.recovery.reason


def test_what_makes_no_sense_on_the_board_ends_it(node: Node) -> None:
    assert node.recovery.begin(node.end(1), KILLED)
    node.write("1/out/0", step="seven")
    assert node.recovery.look() is Phase.FALLBACK


def test_the_same_end_at_the_same_step_again_and_again_is_left_to_the_restart(node: Node) -> None:
    for generation in (1, 2):
        node.succeed(1, generation, KILLED)
    assert not node.recovery.begin(node.end(1), KILLED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in_place": 0}, "rank 0 is not inside of guard.run"),
        ({"phase": WorkerPhase.STOPPING, "reason": "rank 1: ValueError"}, "rank 0 stops already (rank 1: ValueError)"),
        ({"finished": True}, "rank 0 has finished its training"),
    ],
)
def test_a_survivor_that_cannot_take_part(node: Node, change: dict[str, Any], words: str) -> None:
    node.pages[0] = node.pages[0]._replace(**change)
    assert words in node.recovery.why_not([1])


# --- what is told of it ---


def finish(node: Node, step: int) -> None:
    """All ranks have passed a boundary."""
    pages = {rank: page._replace(step=step, generation=1) for rank, page in node.pages.items()}
    assert node.recovery.look_at_first_step(pages)


def test_what_a_recovery_was(node: Node) -> None:
    node.spares = 1
    began = time.time()
    node.pages[2] = node.pages[2]._replace(step=8)
    assert node.recovery.begin(node.end(1), KILLED)
    node.report(0)
    node.report(2, step=8)
    assert node.recovery.look() is Phase.AGREED
    node.write("1/state", path="/dev/shm/slot")
    for rank in range(3):
        node.write(f"1/ready/{rank}", heard=began - 0.5 * (rank == 2))
    assert node.recovery.look() is Phase.RUN
    assert node.told == [], "it is over with the first step"
    assert not node.recovery.look_at_first_step(node.pages)
    finish(node, 9)
    assert node.recovery.look_at_first_step(node.pages)
    node.recovery.close()
    (record,) = node.told
    assert (record.generation, record.outcome, record.cause, record.reason) == (1, "in place", KILLED, "")
    assert (record.ranks, record.behind, record.donor, record.step, record.steps_lost) == ((1,), (0,), 2, 8, 0)
    assert record.stood_in == (Replacement(rank=1, pid=201, by=SPARE),)
    assert record.duration_s is not None and record.duration_s >= 0.5, "since a survivor heard of it"


def test_a_stuck_rank_had_failed_before_it_was_killed(node: Node) -> None:
    began = time.monotonic()
    assert node.recovery.begin(node.end(1), "hang", stuck_s=40.0)
    failed_at, noticed_at = node.recovery.moments
    assert began - 40.0 <= failed_at <= time.monotonic() - 40.0
    assert began <= noticed_at <= time.monotonic()
    for rank in (0, 2):
        node.report(rank)
    node.recovery.look()
    node.write("1/state", path="/dev/shm/slot")
    for rank in range(3):
        node.write(f"1/ready/{rank}", heard=time.time())
    assert node.recovery.look() is Phase.RUN
    finish(node, 8)
    (record,) = node.told
    assert record.duration_s is not None and record.duration_s > 40.0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_finishes_meanwhile(node: Node, is_late: bool) -> None:
    """Late: it has failed for another reason already, so the job is restarted."""
    assert node.recovery.begin(node.end(1), KILLED)
    if is_late:
        node.write("1/refusal", rank=2, refusal="the store is full")
        node.recovery.look()
    node.pages[0] = node.pages[0]._replace(finished=True)
    node.recovery.hear_end(node.end(0, code=0))
    assert node.recovery.look() is Phase.FALLBACK
    node.recovery.close()
    assert [record.outcome for record in node.told] == ["restart" if is_late else "finished"]
