"""``mindx-elastic run`` forks restarted workers from its zygote: what must hold as with fresh ones."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, children, start_agent, wait_until
from tests.system.test_agent import nothing_left
from tests.system.test_agent_guarded import attempts, resumed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]

LOOP = "loop.py"


def agent(*args: object, env: dict[str, str] | None = None, **more: Any) -> Any:
    shm = str(Path("shm").absolute())
    return start_agent(
        LOOP, *args, env={"MINDX_ARENA_DIR": shm, "MINDX_LOG_LEVEL": "DEBUG", **(env or {})}, plain=True, **more
    )


def command_line(pid: int) -> str:
    """Empty for a process that has ended just now."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def find_zygote(job: Job) -> list[int]:
    return [pid for pid in children(job.process.pid) if "zygote_process" in command_line(pid)]


def wait_for_zygote(job: Job, but: int = 0) -> int:
    """Another one than `but`. Asked for once: a moment later it may have been exchanged."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = find_zygote(job)
        return len(found) == 1 and found != [but]

    wait_until(is_there, "start of the zygote")
    return found[0]


def forked(job: Job) -> int:
    """How many workers."""
    return len(job.matches(r"process \d+ is forked from the zygote"))


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--redirects", "3", "--log-dir", "logs"], marks=pytest.mark.drill),
        pytest.param(["--tee", "3"], marks=pytest.mark.drill),
    ],
)
def test_restarted_workers_are_forked(options: list[str]) -> None:
    unbuffered = {"PYTHONUNBUFFERED": "1"}  # else the agent keeps for a while what its workers print
    with agent("ckpt", "--hold-at", 7, ranks=2, options=options, env=unbuffered, under=["env"]) as job:
        redirected = "--redirects" in options
        if redirected:
            wait_until(lambda: said("HOLD") == 2, "both ranks at their step")
            pid = int(re.findall(r"READY \d+ (\d+)", read("stdout"))[0])
            zygote = wait_for_zygote(job)
            os.kill(pid, signal.SIGKILL)
        else:
            job.wait_for("HOLD", 2)
            zygote = wait_for_zygote(job)
            job.signal_rank(0, signal.SIGKILL)
        job.expect(0)
    assert forked(job) == 2
    assert attempts() == [("failed", 0), ("finished", None)]
    if redirected:
        assert said("READY", attempt=1) == 2 and not resumed(job)
    else:
        prefix = r"^\[default[01]\]:" if options else "^"
        assert [match[1] for match in job.matches(prefix + r"READY \d+ \d+ (\w+)")][2:] == ["7", "7"]
    assert nothing_left() and not Path(f"/proc/{zygote}").exists()


def read(name: str, attempt: int = 0) -> str:
    return "".join(path.read_text() for path in sorted(Path("logs").glob(f"*/attempt_{attempt}/*/{name}.log")))


def said(word: str, attempt: int = 0) -> int:
    return read("stdout", attempt).count(word)


@pytest.mark.drill
def test_a_forked_worker_dies_and_is_replaced_and_looks_as_ever() -> None:
    with agent("ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        fresh = {pid: command_line(pid) for pid in job.pids().values()}
        wait_for_zygote(job)
        job.signal_rank(0, signal.SIGKILL)
        job.wait_for("READY", 4)
        pids = job.pids()
        assert set(pids.values()) <= set(children(job.process.pid)) and not set(pids.values()) & set(fresh)
        job.expect(0)
    assert forked(job) == 2


@pytest.mark.drill
@pytest.mark.parametrize(
    ("options", "env"),
    [
        (["--recover", "in-place"], {}),
        pytest.param(["--max-restarts", "0"], {"MINDX_ZYGOTE": "first"}, marks=pytest.mark.drill),
    ],
)
def test_the_first_workers_are_forked_in_place_and_where_that_is_asked_for(
    options: list[str], env: dict[str, str]
) -> None:
    with agent("ckpt", ranks=2, options=options, env=env) as job:
        job.expect(0)
    assert forked(job) == 2 and attempts() == [("finished", None)]


@pytest.mark.drill
def test_a_killed_zygote_is_replaced() -> None:
    with agent("ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        first = wait_for_zygote(job)
        os.kill(first, signal.SIGKILL)
        wait_for_zygote(job, but=first)
        job.signal_rank(1, signal.SIGKILL)
        job.expect(0)
    assert forked(job) == 2 and job.matches("its process has ended: exit code -9; another one is started")
    assert attempts() == [("failed", 0), ("finished", None)]


@pytest.mark.drill
def test_a_killed_agent_takes_forked_workers_and_zygote_with_it() -> None:
    with agent("ckpt", "--hold-after", 5, ranks=2) as job:
        job.wait_for("HOLD", 2)
        zygote = wait_for_zygote(job)
        job.signal_rank(0, signal.SIGKILL)
        job.wait_for("HOLD", 4)
        workers = list(job.pids().values())
        job.process.kill()
        job.expect(-signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [zygote, *workers]), "end of all processes")
    assert forked(job) == 2
    assert max(int(match[1]) for match in job.matches(r"step (\d+) saved in")) >= 10, "at the agent's death"
