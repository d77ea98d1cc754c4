"""The worker processes of an attempt, with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mindx_elastic.agent.workers import WorkerExit, Workers, process_state, write_stacks
from mindx_elastic.core.status_page import PAGE_BYTES, Status, StatusPage, WorkerPhase, page_path
from mindx_elastic.memory.agent_folder import STACK_SIGNAL
from tests.harness import wait_until

FOR_EVER = 3600.0  # pytest's limit ends a wait that is not woken
WAIT = "import sys, time; print('up', flush=True); time.sleep(3600)"
CATCH = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(9))\n" + WAIT
NEST = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(3600)\n"
)


class Group:
    """Starts processes as torch does: each leads a session of its own."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.said: list[bytes] = []

    def start(self, code: str, *, speaks: bool = True) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        self.said.append(process.stdout.readline() if speaks else b"")
        return process


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group()
    yield found
    for process in found.processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until_all_ended(workers: Workers) -> list[WorkerExit]:
    while workers.live:
        workers.wait(FOR_EVER)
    return workers.exits


BY_THREADS = (
    "import threading\n"
    "stay = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(2)]\n"
    "[thread.start() for thread in stay]\n"
    "filled = bytearray(b'x') * (300 << 20)\n"  # its end takes a while
)


def test_a_killed_worker_is_noticed_before_it_is_gone(group: Group, tmp_path: Path) -> None:
    workers = Workers({0: group.start(BY_THREADS + WAIT), 1: group.start(BY_THREADS + WAIT)}, tmp_path)
    workers.look_for_early_signs()
    first, second = (workers.processes[rank] for rank in range(2))
    os.kill(first.pid, signal.SIGKILL)
    found: list[WorkerExit] = []
    while not found:  # its threads end one after the other, and each wakes this one
        found = workers.wait(FOR_EVER)
    (end,) = found
    assert (end.rank, end.pid, end.code) == (0, first.pid, -signal.SIGKILL) and list(workers.live) == [1]
    workers.send(1, signal.SIGTERM)
    assert [end.code for end in until_all_ended(workers)] == [-signal.SIGKILL, -signal.SIGTERM]
    workers.close()
    assert not any(Path(f"/proc/{process.pid}").exists() for process in (first, second)), "both were waited for"


def test_without_pidfds_it_polls(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    workers = Workers({0: group.start(WAIT)}, tmp_path)
    workers.send(0, signal.SIGKILL)
    assert [end.code for end in until_all_ended(workers)] == [-signal.SIGKILL]


def test_a_signal_is_for_the_trainer_alone_and_a_kill_for_all_that_is_its_own(group: Group, tmp_path: Path) -> None:
    """But for a daemon with a session of its own, which was meant to live on."""
    daemon = "'])\n", "'], start_new_session=True)\n"
    workers = Workers({0: group.start(NEST), 1: group.start(NEST.replace(*daemon))}, tmp_path)
    child, own_session = map(int, group.said)
    workers.send(0, signal.SIGSTOP)
    wait_until(lambda: process_state(workers.live[0].pid) == "T", "stop of the trainer")
    assert process_state(child) in ("R", "S")
    workers.kill(0)
    workers.kill(1)
    assert {signal.SIGSTOP, signal.SIGKILL} in [end.sent for end in until_all_ended(workers)]  # in any order
    wait_until(lambda: process_state(child) in ("", "Z"), "end of its child")
    workers.close()
    assert process_state(own_session) in ("R", "S")
    os.kill(own_session, signal.SIGKILL)


@pytest.mark.parametrize("own_group", [False, pytest.param(True, marks=pytest.mark.drill)])
def test_nothing_of_a_worker_outlives_it_also_while_others_live_on(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture, own_group: bool
) -> None:
    """Also what has made itself a process group of its own, as a shell's background jobs do."""
    program = NEST.replace("time.sleep(3600)\n", "", 1)
    program = program.replace("'])\n", "'], preexec_fn=__import__('os').setpgrp)\n") if own_group else program
    workers = Workers({0: group.start(program), 1: group.start(WAIT)}, tmp_path)
    child = int(group.said[0])
    with caplog.at_level("INFO", "mindx_elastic"):
        wait_until(lambda: not workers.wait(0.05) and process_state(child) in ("", "Z"), "end of its child")
    assert list(workers.live) == [1] and [end.code for end in workers.exits] == [0]
    assert f"rank 0 has left processes [{child}] behind" in caplog.text
    workers.kill(1)
    until_all_ended(workers)
    workers.close()


def test_what_ends_by_itself_behind_a_worker_is_not_killed(
    group: Group, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As multiprocessing's resource tracker, which cleans up when the other end of its pipe is closed."""
    monkeypatch.setattr("mindx_elastic.agent.workers._REMAINS_GRACE_S", 60.0)
    tracker = f"import sys; sys.stdin.read(); open({str(tmp_path / 'cleaned')!r}, 'w')"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {tracker!r}], stdin=subprocess.PIPE)\n"
        "print('up', flush=True)\n"
    )
    workers = Workers({0: group.start(code)}, tmp_path)
    with caplog.at_level("INFO", "mindx_elastic"):
        until_all_ended(workers)
        workers.close()
    assert (tmp_path / "cleaned").exists() and "behind" not in caplog.text


def test_what_the_pages_say(group: Group, tmp_path: Path) -> None:
    workers = Workers({0: group.start(CATCH), 1: group.start(WAIT), 2: group.start(WAIT)}, tmp_path)
    page = StatusPage(page_path(tmp_path, 0))
    page.set(pid=workers.live[0].pid, step=4)
    StatusPage(page_path(tmp_path, 2)).close()  # of another process: left from before
    page_path(tmp_path, 1).write_bytes(b"\xff" * PAGE_BYTES)
    assert {rank: status.step for rank, status in workers.statuses().items()} == {0: 4}
    assert [workers.is_guarded(rank) for rank in range(3)] == [True, False, False]
    assert [workers.catches(rank, signal.SIGTERM) for rank in range(2)] == [True, False]
    page.set(phase=WorkerPhase.LEFT, step=5)
    assert not workers.is_guarded(0)
    workers.send(0, signal.SIGTERM)
    (end,) = workers.wait(FOR_EVER)
    assert end.code == 9 and end.status is not None and end.status.step == 5
    assert {rank: status.step for rank, status in workers.last_statuses().items()} == {0: 5}
    page.close()
    workers.close()


def test_giving_up_counts_as_killed(group: Group, tmp_path: Path) -> None:
    workers = Workers({0: group.start(WAIT)}, tmp_path)
    workers.give_up(0)
    assert not workers.live and workers.exits[0].code == -signal.SIGKILL


# --- stacks on demand, asked for by the agent ---


DUMP = "import faulthandler; faulthandler.register({}, file=open({!r}, 'a'), all_threads=True)\n"
SLEEP = "def stuck_here():\n    print('up', flush=True)\n    sys.stdin.read()\nimport sys\nstuck_here()\n"


@pytest.mark.parametrize("phase", [WorkerPhase.TRAINING, WorkerPhase.LEFT])
@pytest.mark.parametrize("listens", [True, False])
def test_only_a_process_that_listens_is_asked(tmp_path: Path, phase: WorkerPhase, listens: bool) -> None:
    """To another one the signal would be the end: its file could not be opened, or its interpreter is ending."""
    file = tmp_path / "attempt_2_rank_0.txt"
    code = (DUMP.format(int(STACK_SIGNAL), str(file)) if listens else "") + SLEEP
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    workers = Workers({0: process}, tmp_path)
    status = Status(pid=process.pid, phase=phase, step=7, entered_ns=1)
    assert write_stacks(workers, {0: status}, tmp_path, attempt=2) == [file]
    assert f"rank 0 pid {process.pid} step 7: state " in file.read_text()
    assert ("stuck_here" in file.read_text()) is listens
    process.communicate()
    assert process.returncode == 0
    workers.close()
