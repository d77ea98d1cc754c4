"""What `pause` and `resume` order, and answer, by the workers' pages alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.cli.pause import PauseAnswer, PauseOrder
from mindx_elastic.core.posix import read_json_object
from mindx_elastic.core.status_page import (
    Status,
    StatusPage,
    WorkerPhase,
    page_path,
    read_pages,
    who_waits,
    why_gone_on,
)
from mindx_elastic.memory.agent_folder import PAUSE, PAUSE_FILE, RESUME


class Node:
    """Two ranks that do what the test says. Their process is this one, which ignores what it is called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages = [StatusPage(page_path(folder, rank)) for rank in range(2)]
        for page in self.pages:
            page.set(phase=WorkerPhase.TRAINING, step=3, boundaries=3, pause_heard=0)

    def order(self, kind: str = PAUSE) -> PauseOrder:
        return PauseOrder(self.folder, kind, f"mindx-elastic {kind}")

    def lies_there(self) -> str:
        return str(read_json_object(self.folder / PAUSE_FILE)["kind"])

    def statuses(self) -> dict[int, Status]:
        return read_pages(self.folder)

    def hear(self, order: int, ranks: tuple[int, ...] = (0, 1), reason: str = "", **fields: Any) -> None:
        number = read_json_object(self.folder / PAUSE_FILE)["seq"]
        for rank in ranks:
            self.pages[rank].set_text("pause_reason", reason)
            self.pages[rank].set(pause_heard=number, pause_order=order, **fields)

    def all_wait(self, order: int = 1, step: int = 4) -> None:
        self.hear(order, step=step, paused_step=step)
        for page in self.pages:
            page.set(phase=WorkerPhase.BETWEEN, paused_ns=1, all_paused=order)

    def all_go(self, order: int = 2) -> None:
        self.hear(order, phase=WorkerPhase.TRAINING, paused_step=-1, paused_ns=0, all_paused=0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_pause_is_there_when_every_rank_waits_and_over_when_all_go_on(node: Node) -> None:
    pause = node.order()
    assert pause.answer_at_once() is None
    pause.give()
    (node.folder / PAUSE_FILE).unlink()  # by the agent, with the pages of the old workers: new ones hear it, too
    assert pause.look() is None
    node.hear(1, (0,))
    assert pause.look() is None and node.lies_there() == PAUSE
    node.all_wait()
    assert who_waits(node.statuses()) == 1 and why_gone_on(node.statuses()) == ""
    assert pause.look() == PauseAnswer(True, "paused at step 4: every rank waits")
    resume = node.order(RESUME)
    assert resume.answer_at_once() is None
    resume.give()
    assert resume.look() is None
    again = node.order().answer_at_once()
    assert again is not None and again.good and again.text.startswith("paused at step 4 already, for ")
    node.all_go()
    assert resume.look() == PauseAnswer(True, "training goes on from step 4")
    resume.withdraw()
    assert not (node.folder / PAUSE_FILE).exists()
    assert node.order(RESUME).answer_at_once() == PauseAnswer(True, "the run is not paused; nothing to do")


def test_a_resume_is_answered_when_no_rank_can_still_pass_on_the_pause(node: Node) -> None:
    """A rank has read the order to pause and has not told the others yet."""
    pause, resume = node.order(), node.order(RESUME)
    pause.give()
    assert resume.answer_at_once() is None
    resume.give()
    assert pause.look() == PauseAnswer(False, "another command was given meanwhile")
    assert resume.look() is None, "no page says so, and yet"
    pause.withdraw()
    assert node.lies_there() == RESUME, "not its own"
    node.hear(2, (0,))
    assert resume.look() is None
    node.hear(2)
    assert resume.look() == PauseAnswer(True, "training goes on")


@pytest.mark.parametrize(
    ("fields", "reason", "said"),
    [
        ({"pause_order": 2}, "the pause was taken back: rank 5 has finished", "the pause was taken back: rank 5 has"),
        ({"pause_order": 2}, "mindx-elastic pause", "the ranks have gone on, because they stop or were replaced"),
        ({"phase": WorkerPhase.STOPPING}, "", "rank 1 stops"),
        ({"phase": WorkerPhase.LEFT, "finished": 1}, "", "the training has finished (rank 1, step 3)"),
    ],
)
def test_what_ends_a_pause_is_told(node: Node, fields: dict[str, int], reason: str, said: str) -> None:
    pause = node.order()
    pause.give()
    for page in node.pages[1:] if "phase" in fields else node.pages:
        page.set_text("pause_reason", reason)
        page.set(**fields)
    answer = pause.look()
    assert answer is not None and not answer.good and answer.text.startswith(said)


def test_who_does_not_come_in_time_is_named(node: Node) -> None:
    pause = node.order()
    pause.give()
    node.hear(1)
    node.pages[0].set(phase=WorkerPhase.BETWEEN, paused_ns=1, paused_step=4, step=4)
    assert pause.look() is None
    assert pause.why_late(5).startswith("rank 1 did not come to a boundary in 5 s; the")
    resume = node.order(RESUME)
    resume.give()
    node.hear(2, (0,))
    assert resume.why_late(5).startswith("rank 1 did not go on")
