"""``mindx-elastic run`` forks restarted workers from its zygote: what must hold as with fresh ones."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, children, wait_until
from tests.system import agents
from tests.system.agents import attempts, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_own_folder")]

LOOP = "loop.py"
drill = pytest.mark.drill


def agent(*args: object, env: dict[str, str] | None = None, **more: Any) -> Any:
    return agents.agent(LOOP, *args, env={"MINDX_LOG_LEVEL": "DEBUG", **(env or {})}, plain=True, **more)


def command_line(pid: int) -> str:
    """Empty for a process that has ended just now."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def find_zygote(job: Job) -> list[int]:
    return [pid for pid in children(job.process.pid) if "zygote_process" in command_line(pid)]


def wait_for_zygote(job: Job) -> int:
    wait_until(lambda: len(find_zygote(job)) == 1, "start of the zygote")
    return find_zygote(job)[0]


def forked(job: Job) -> int:
    """How many workers."""
    return len(job.matches(r"process \d+ is forked from the zygote"))


def written(word: str, attempt: int = 0) -> list[str]:
    """The lines of all workers' logs that begin with a word."""
    logs = sorted(Path("logs").glob(f"*/attempt_{attempt}/*/stdout.log"))
    return [line for log in logs for line in log.read_text().splitlines() if line.startswith(word)]


@pytest.mark.parametrize("options", [[], pytest.param(["--tee", "3"], marks=drill)])
def test_restarted_workers_are_forked_and_look_as_ever(options: list[str]) -> None:
    unbuffered = {"PYTHONUNBUFFERED": "1"}  # else the agent keeps for a while what its workers print
    with agent("ckpt", "--hold-at", 7, ranks=2, options=options, env=unbuffered) as job:
        job.wait_for("HOLD", 2)
        fresh = set(job.pids().values())
        zygote = wait_for_zygote(job)
        job.signal_rank(0, signal.SIGKILL)
        job.wait_for("READY", 4)
        assert set(job.pids().values()) <= set(children(job.process.pid)) - fresh
        job.expect(0)
    assert forked(job) == 2 and attempts() == [("failed", 0), ("finished", None)]
    assert job.resumed()[2:] == ["7", "7"] and len(job.matches(r"^\[default[01]\]:READY")) == 4 * bool(options)
    assert nothing_left() and not Path(f"/proc/{zygote}").exists()


@drill
def test_the_output_of_forked_workers_is_redirected_too() -> None:
    with agent("ckpt", "--hold-at", 7, ranks=2, options=["--redirects", "3", "--log-dir", "logs"]) as job:
        wait_until(lambda: len(written("HOLD")) == 2, "both ranks at their step")
        wait_for_zygote(job)
        os.kill(int(written("READY")[0].split()[2]), signal.SIGKILL)
        job.expect(0)
    assert forked(job) == 2 and attempts() == [("failed", 0), ("finished", None)]
    assert [line.split()[3] for line in written("READY", attempt=1)] == ["7", "7"] and not job.resumed()


@drill
def test_the_first_workers_are_forked_in_place() -> None:
    with agent("ckpt", ranks=2, options=["--recover", "in-place"]) as job:
        job.expect(0)
    assert forked(job) == 2 and attempts() == [("finished", None)]


@drill
def test_a_killed_zygote_is_said_and_its_workers_are_fresh() -> None:
    with agent("ckpt", "--hold-at", 7, ranks=2) as job:
        job.wait_for("HOLD", 2)
        os.kill(wait_for_zygote(job), signal.SIGKILL)
        job.wait_for("fresh processes, not forks of the zygote: its process has ended: exit code -9")
        job.signal_rank(1, signal.SIGKILL)
        job.expect(0)
    assert forked(job) == 0 and attempts() == [("failed", 0), ("finished", None)]
