"""The worker's side of its agent: the page, the orders, stacks on demand."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent_link import CONTROL_FILE, STACK_SIGNAL, AgentLink
from mindx_elastic.config import AgentInfo, RankInfo
from mindx_elastic.errors import ArenaError
from mindx_elastic.status_page import Status, WorkerPhase, page_path, read_page
from tests.harness import wait_until

ORDER = {"kind": "fault", "reason": "card 3 is broken", "grace_s": 20.0, "exit_code": 75, "seq": 1}


class Agent:
    """Where the agent would be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder / "agent", folder / "run"
        self.folder.mkdir()

    def link(self, **more: Any) -> AgentLink:
        info = AgentInfo(**{"folder": self.folder, "pid": 1, "run_dir": self.run_dir, "attempt": 2, **more})
        return AgentLink(info, RankInfo(rank=1, world_size=4))

    def page(self) -> Status:
        found = read_page(page_path(self.folder, 1))
        assert found is not None
        return found

    def order(self, content: object) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        temp = self.folder / "temp"
        temp.write_text(text)
        os.replace(temp, self.folder / CONTROL_FILE)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    before = signal.getsignal(STACK_SIGNAL)
    yield Agent(tmp_path)
    faulthandler.unregister(STACK_SIGNAL)
    signal.signal(STACK_SIGNAL, before)


# --- the page ---


def test_the_page_follows_the_life_of_a_guard(agent: Agent) -> None:
    link = agent.link()
    assert agent.page() == Status(pid=os.getpid(), phase=WorkerPhase.STARTING)
    link.announce(7, Path("/ckpt/a"))
    assert (agent.page().resumed_step, agent.page().resumed_path) == (7, "/ckpt/a")
    assert agent.page().phase == WorkerPhase.STARTING, "loading it may be what kills the process"
    link.enter(7, "run-a", Path("/dev/shm/x"))
    page = agent.page()
    assert (page.phase, page.step, page.run_id, page.arena) == (WorkerPhase.TRAINING, 7, "run-a", "/dev/shm/x")
    assert page.entered_ns > 0 and page.boundary_ns == 0
    link.page.pass_boundary(8)
    link.close()
    assert (agent.page().phase, agent.page().step) == (WorkerPhase.LEFT, 8)


def test_a_fresh_start_without_memory(agent: Agent) -> None:
    link = agent.link()
    link.enter(None, "run-a", None)
    page = agent.page()
    assert (page.step, page.resumed_step, page.resumed_path, page.arena) == (0, -1, "", "")
    link.close()


def test_the_time_between_two_steps_is_no_hang(agent: Agent) -> None:
    link = agent.link()
    link.enter(None, "run-a", None)
    link.between(True)
    assert (agent.page().phase, agent.page().boundary_ns) == (WorkerPhase.BETWEEN, 0), "no step has ended yet"
    link.between(False)
    link.page.pass_boundary(1)
    reached = agent.page().boundary_ns
    link.between(True)
    link.between(False)
    assert agent.page().phase == WorkerPhase.TRAINING and agent.page().boundary_ns > reached
    for phase in (WorkerPhase.STOPPING, WorkerPhase.LEFT):
        link.page.set(phase=phase)
        link.between(True)
        link.between(False)
        assert agent.page().phase == phase, "not undone"
    link.close()


def test_no_folder_no_link(agent: Agent) -> None:
    with pytest.raises(ArenaError, match="the agent's folder cannot be used"):
        agent.link(folder=agent.folder / "nothing")


# --- orders ---


def test_an_order_is_heard_once(agent: Agent) -> None:
    link = agent.link()
    assert link.orders() is None
    agent.order(ORDER)
    assert link.orders() == ORDER
    assert link.orders() is None
    agent.order({**ORDER, "seq": 2})
    assert link.orders() == {**ORDER, "seq": 2}
    link.close()


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", "3", '"text"', "{}", json.dumps(ORDER)[:-5]),
        *({**ORDER, "kind": 3}, {key: value for key, value in ORDER.items() if key != "reason"}),
        *({**ORDER, "seq": "1"}, {key: value for key, value in ORDER.items() if key != "seq"}),
        "[" * 10_000,
    ],
    ids=lambda content: str(content)[:20],
)
def test_half_an_order_is_none(agent: Agent, content: object) -> None:
    link = agent.link()
    agent.order(content)
    assert link.orders() is None
    agent.order(ORDER)
    assert link.orders() == ORDER
    link.close()


# --- stacks ---


def dump() -> None:
    os.kill(os.getpid(), STACK_SIGNAL)


def test_a_stack_is_written_while_the_main_thread_hangs(agent: Agent) -> None:
    link = agent.link()
    path = agent.run_dir / "stacks" / "attempt_2_rank_1.txt"
    done = threading.Event()

    def stuck_in_a_collective() -> None:
        done.wait(30)

    thread = threading.Thread(target=stuck_in_a_collective)
    thread.start()
    dump()
    wait_until(lambda: "stuck_in_a_collective" in path.read_text(), "the stack")
    done.set()
    thread.join()
    assert "test_a_stack_is_written" in path.read_text(), "all threads"
    link.close()
    size = path.stat().st_size
    dump()  # late: it must not kill the process that is about to leave
    assert path.stat().st_size == size and signal.getsignal(STACK_SIGNAL) is signal.SIG_IGN


def test_stacks_of_two_guards_in_a_row(agent: Agent) -> None:
    agent.link().close()
    link = agent.link(attempt=3)
    dump()
    path = agent.run_dir / "stacks" / "attempt_3_rank_1.txt"
    wait_until(lambda: "test_stacks_of_two_guards" in path.read_text(), "the stack")
    link.close()


@pytest.mark.parametrize("without", [None, "file"])
def test_no_run_directory_no_stacks(
    agent: Agent, caplog: pytest.LogCaptureFixture, without: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[..., object]] = []
    monkeypatch.setattr(faulthandler, "register", lambda *args, **kwargs: registered.append(args[0]))
    if without == "file":
        agent.run_dir.write_text("")
    link = agent.link(run_dir=agent.run_dir if without else None)
    assert registered == []
    assert ("stacks of a hang cannot be written" in caplog.text) is (without is not None)
    link.close()
