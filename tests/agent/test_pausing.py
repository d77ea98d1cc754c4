"""What the agent orders for `pause` and `resume`, and answers, by the workers' pages alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindx_elastic.agent.pausing import PauseRequest, PauseWatch
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.memory.agent_folder import PAUSE, RESUME


class Node:
    """Two ranks that do what the test says, and the watch over their pages."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.watch = PauseWatch()
        page = Status(pid=1, phase=WorkerPhase.TRAINING, step=3, boundaries=3, boundary_ns=1, entered_ns=1)
        self.pages = dict.fromkeys(range(num_ranks), page)
        self.now, self.num_live, self.written = 0.0, num_ranks, 0
        self._order: Any = None

    def ask(self, kind: str, timeout_s: float = 60.0) -> PauseRequest:
        request = PauseRequest(f"{kind}{self.now}", kind, timeout_s)
        self.watch.ask(request, self.now)
        return request

    def look(self, seconds: float = 1.0) -> str | None:
        """The kind of the order."""
        self.now += seconds
        order = self.watch.look(self.pages, self.num_live, self.now)
        if order is not None and order is not self._order:
            self._order, self.written = order, self.written + 1
            self.watch.note_written(self.written)
        return None if order is None else order.kind

    def set(self, rank: int, **fields: Any) -> None:
        self.pages[rank] = replace(self.pages[rank], **fields)

    def hear(self, rank: int, order: int) -> None:
        self.set(rank, pause_heard=self.written, pause_order=order)

    def all_wait(self, order: int = 1, step: int = 4) -> None:
        for rank in self.pages:
            self.hear(rank, order)
            fields = {"step": step, "paused_step": step, "paused_ns": 1, "all_paused": order}
            self.set(rank, phase=WorkerPhase.BETWEEN, **fields)

    def all_go(self, order: int = 2) -> None:
        for rank in self.pages:
            self.hear(rank, order)
            self.set(rank, phase=WorkerPhase.TRAINING, paused_step=-1, paused_ns=0, all_paused=0)

    def answer(self, request: PauseRequest) -> tuple[bool, str]:
        (found,) = (content for each, content in self.watch.answers if each is request)
        return found.good, found.text

    def is_open(self, request: PauseRequest) -> bool:
        return not any(each is request for each, _ in self.watch.answers)


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_pause_is_there_when_every_rank_waits(node: Node) -> None:
    pause = node.ask(PAUSE)
    assert node.look() == PAUSE and all(node.watch.needs(page) for page in node.pages.values())
    node.hear(0, 1)
    assert node.look() == PAUSE and [node.watch.needs(node.pages[rank]) for rank in (0, 1)] == [False, True]
    node.hear(1, 1)
    assert node.look() == PAUSE and node.is_open(pause)
    node.all_wait()
    assert node.look() is None and node.answer(pause) == (True, "paused at step 4: every rank waits")
    assert not node.watch.is_busy and node.watch.paused_step == 4
    again = node.ask(PAUSE)
    assert node.look(7) is None and node.answer(again) == (True, "paused at step 4 already, for 7 s")
    resume = node.ask(RESUME)
    assert node.look() == RESUME
    node.all_go()
    assert node.look() is None and node.answer(resume) == (True, "training goes on from step 4")
    assert [(each.begins, each.step, each.seconds) for each in node.watch.changes] == [(True, 4, 3), (False, 4, 9)]


def test_a_resume_is_answered_when_no_rank_can_still_pass_on_the_pause(node: Node) -> None:
    """A rank has read the order to pause and has not told the others yet."""
    pause = node.ask(PAUSE)
    node.look()
    resume = node.ask(RESUME)
    assert node.look() == RESUME and node.answer(pause)[0] is False
    assert node.look() == RESUME and node.is_open(resume), "no page says so, and yet"
    node.set(0, pause_heard=1, pause_order=1)
    assert node.look() == RESUME and node.is_open(resume)
    for rank in (0, 1):
        node.hear(rank, 2)
    assert node.look() is None and node.answer(resume) == (True, "training goes on")


def test_a_rank_that_does_not_come_in_time(node: Node) -> None:
    pause = node.ask(PAUSE, 5.0)
    node.look()
    node.hear(0, 1)
    node.hear(1, 1)
    node.set(0, phase=WorkerPhase.BETWEEN, paused_ns=1, paused_step=4, step=4)
    assert node.look() == PAUSE
    assert node.look(5) == RESUME
    good, text = node.answer(pause)
    assert not good and text.startswith(
        "not paused: rank 1 (in a step, after step 3) did not come to the boundary in 5 s"
    )
    assert text.endswith("the pause is taken back and training goes on")
    node.all_go()
    assert node.look() is None and not node.watch.changes


def test_a_pause_that_the_ranks_themselves_take_back(node: Node) -> None:
    pause = node.ask(PAUSE)
    node.look()
    for rank in (0, 1):
        node.hear(rank, 2)
        node.set(rank, pause_reason="the pause was taken back: rank 5 has finished")
    assert node.look() is None
    assert node.answer(pause) == (False, "not paused: the pause was taken back: rank 5 has finished")


def test_a_pause_that_a_death_ends_says_so(node: Node) -> None:
    """The pages still have the words with which the pause was ordered."""
    pause = node.ask(PAUSE)
    node.look()
    for rank in (0, 1):
        node.hear(rank, 2)
        node.set(rank, pause_reason="mindx-elastic pause")
    assert node.look() is None
    why = "the ranks have gone on, because they stop or were replaced"
    assert node.answer(pause) == (False, f"not paused: {why}")


def test_a_pause_behind_a_resume_waits_for_its_end(node: Node) -> None:
    node.ask(PAUSE)
    node.look()
    node.all_wait()
    node.look()
    node.ask(RESUME)
    assert node.look() == RESUME
    second = node.ask(PAUSE)
    assert node.look() == RESUME and node.is_open(second), "the pages still show the first pause"
    node.all_go()
    assert node.look() == PAUSE and node.is_open(second)
    node.all_wait(order=3, step=5)
    assert node.look() is None and node.answer(second)[1] == "paused at step 5: every rank waits"


def test_a_pause_of_another_node_is_seen(node: Node) -> None:
    node.all_wait()
    assert node.look() is None and node.watch.paused_step == 4
    resume = node.ask(RESUME)
    assert node.look() == RESUME
    node.all_go()
    node.look()
    assert node.answer(resume)[0]


def test_a_stop_ends_everything(node: Node) -> None:
    node.ask(PAUSE)
    node.look()
    node.all_wait()
    node.look()
    node.set(0, phase=WorkerPhase.STOPPING, all_paused=0)
    node.look()
    pause, resume = node.ask(PAUSE), node.ask(RESUME)
    node.watch.end("the job is stopping", node.now)
    assert node.answer(pause) == (False, "not paused: the job is stopping")
    assert node.answer(resume) == (True, "no rank waits any more: the job is stopping")
    assert not node.watch.is_busy
