"""The worker's side of its agent: the page, the orders, stacks on demand."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent import child
from mindx_elastic.alarm.peers import own_identity
from mindx_elastic.config import AgentInfo, RankInfo
from mindx_elastic.core.status_page import Status, WorkerPhase, page_path, read_page
from mindx_elastic.guard.agent_link import AgentLink, between_steps
from mindx_elastic.memory.agent_folder import CONTROL_FILE, PAUSE_FILE, STACK_SIGNAL
from mindx_elastic.memory.folders import MAKER_FILE
from tests.harness import wait_until
from tests.watchdog import finish

ORDER = {"kind": "fault", "reason": "card 3 is broken", "grace_s": 20.0, "exit_code": 75, "seq": 1}


class Agent:
    """Where the agent would be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder / "agent", folder / "run"
        self.folder.mkdir()

    def link(self, *, rank: int = 1, **more: Any) -> AgentLink:
        info = AgentInfo(**{"folder": self.folder, "pid": 1, "run_dir": self.run_dir, "attempt": 2, **more})
        return AgentLink(info, RankInfo(rank=rank, world_size=4))

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
    link.enter(7, "run-a", Path("/dev/shm/x"), Path("/c"))
    page = agent.page()
    assert (page.phase, page.step, page.run_id, page.arena) == (WorkerPhase.TRAINING, 7, "run-a", "/dev/shm/x")
    assert page.entered_ns > 0 and page.boundary_ns == 0
    link.page.pass_boundary(8)
    link.close()
    page = agent.page()
    assert (page.phase, page.step, page.finished) == (WorkerPhase.LEFT, 8, 0)


def test_the_time_between_two_steps_is_no_hang(agent: Agent) -> None:
    link = agent.link()
    link.enter(None, "run-a", None, Path("/c"))
    with between_steps(link.page):
        assert (agent.page().phase, agent.page().boundary_ns) == (WorkerPhase.BETWEEN, 0), "no step has ended yet"
    link.page.pass_boundary(1)
    reached = agent.page().boundary_ns
    with between_steps(link.page):
        pass
    assert agent.page().phase == WorkerPhase.TRAINING and agent.page().boundary_ns > reached
    for phase in (WorkerPhase.STOPPING, WorkerPhase.LEFT):
        link.page.set(phase=phase)
        with between_steps(link.page):
            pass
        assert agent.page().phase == phase, "not undone"
    link.close()


# --- orders ---


def test_an_order_is_heard_once_and_half_an_order_never(agent: Agent) -> None:
    link = agent.link()
    assert link.orders() == []
    wrong: list[object] = ["", "{", "[]", "null", "3", '"text"', "{}", json.dumps(ORDER)[:-5], "[" * 10_000]
    wrong += [{key: value for key, value in ORDER.items() if key != missing} for missing in ("kind", "reason", "seq")]
    for content in (*wrong, {**ORDER, "kind": 3}, {**ORDER, "seq": "1"}):
        agent.order(content)
        assert link.orders() == [], content
    agent.order(ORDER)
    assert [link.orders(), link.orders()] == [[ORDER], []]
    agent.order({**ORDER, "seq": 2})
    (agent.folder / PAUSE_FILE).write_text(json.dumps(pause := {"kind": "pause", "reason": "asked", "seq": 2}))
    assert [link.orders(), link.orders()] == [[{**ORDER, "seq": 2}, pause], []]
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
    dump()  # what comes after the guard may get stuck, too
    wait_until(lambda: path.stat().st_size > size, "the stack after the guard")


def test_a_late_request_for_a_stack_does_not_kill_an_interpreter_that_ends(agent: Agent) -> None:
    code = (
        "import atexit, faulthandler, os, sys\n"
        "from pathlib import Path\n"
        "from mindx_elastic.guard.agent_link import AgentLink\n"
        "from mindx_elastic.memory.agent_folder import STACK_SIGNAL\n"
        "from mindx_elastic.config import AgentInfo, RankInfo\n"
        "info = AgentInfo(folder=Path(sys.argv[1]), pid=1, run_dir=Path(sys.argv[2]))\n"
        "AgentLink(info, RankInfo(rank=1, world_size=4)).close()\n"
        "faulthandler.unregister(STACK_SIGNAL)\n"  # as the interpreter's end does
        "os.kill(os.getpid(), STACK_SIGNAL)\n"
    )
    done = finish([sys.executable, "-c", code, agent.folder, agent.run_dir], fresh=False)
    assert done.returncode == 0


# --- the agent's death ---

_AGENT = """
import ctypes, os, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), sys.executable, "-c", sys.argv[2], sys.argv[3]]
subprocess.Popen(command, start_new_session=True)
sys.stdin.readline()
ctypes.CDLL(None).syscall(int(sys.argv[4]), 0)  # ends this thread alone; the other one adopts the worker
"""
_WORKER = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before any thread that would get it in `sigwait`'s stead
from pathlib import Path
from mindx_elastic.guard.agent_link import AgentLink
from mindx_elastic.config import AgentInfo, RankInfo
parent = os.getppid()
link = AgentLink(AgentInfo(folder=Path(sys.argv[1]), pid=parent), RankInfo(rank=1, world_size=4))
print("READY", os.getpid(), link.is_orphan(), flush=True)
signal.sigwait([signal.SIGTERM])
print("TERM", os.getppid() == parent, link.is_orphan(), flush=True)
"""
_EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}


@pytest.mark.skipif(os.uname().machine not in _EXIT_OF_A_THREAD, reason="the number of the system call is not known")
def test_a_dying_agent_whose_other_thread_adopts_the_worker(tmp_path: Path) -> None:
    """The kernel's SIGTERM comes while `getppid` still gives the agent: no stop that anybody asked for."""
    number = str(_EXIT_OF_A_THREAD[os.uname().machine])
    (tmp_path / "agent").mkdir()
    command = [sys.executable, "-c", _AGENT, str(child.__file__), _WORKER, str(tmp_path / "agent"), number]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert agent.stdout is not None and agent.stdin is not None
    ready = agent.stdout.readline().split()
    try:
        assert ready[::2] == ["READY", "False"], "the agent lives"
        agent.stdin.write("\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "TERM True True\n"
    finally:
        agent.kill()
        agent.wait()
        with suppress(ProcessLookupError, IndexError):
            os.kill(int(ready[1]), signal.SIGKILL)
        agent.stdin.close()
        agent.stdout.close()


@pytest.mark.parametrize("change", ["reused", "gone"])
def test_an_agent_that_died_before_the_guard_was_entered(agent: Agent, change: str) -> None:
    pid, started = (os.getpid(), "12345") if change == "reused" else (2**22 + 1, "12345")
    identity = {**json.loads(own_identity()), "pid": pid, "started": started}
    (agent.folder / MAKER_FILE).write_text(json.dumps(identity))
    link = agent.link(pid=pid)
    assert link.agent_fd == -1 and link.is_orphan()
    link.close()


def test_an_agent_in_another_namespace_is_not_looked_for_by_its_number(agent: Agent) -> None:
    identity = {**json.loads(own_identity()), "space": "boot/pid:[1]", "started": "12345"}
    (agent.folder / MAKER_FILE).write_text(json.dumps(identity))
    link = agent.link(pid=os.getpid())
    assert link.agent_fd == -1 and not link.is_orphan()
    link.close()
