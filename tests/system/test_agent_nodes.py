"""``mindx-elastic run`` on several nodes, all of them on this machine: agents that die, nodes that come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Job, events, start_agent
from tests.resets import can_reset, reset_connections
from tests.system.test_agent import free_port

pytestmark = pytest.mark.slow

LOOP = "loop.py"
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
"""The rendezvous notices a dead node after 3 s and waits 1 s for a late one."""


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shm").mkdir()


class Nodes:
    """Agents that meet under one rendezvous id; node `a` is started first and hosts the rendezvous."""

    def __init__(self, stack: ExitStack, *args: object, nnodes: str, options: Sequence[str] = ()) -> None:
        self._stack, self._args = stack, args
        self._options = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "nodes", "--rdzv-conf", QUICK]
        self._options += ["--rdzv-endpoint", f"localhost:{free_port()}", *options]
        self.jobs: dict[str, Job] = {}

    def start(self, name: str, *, env: dict[str, str] | None = None) -> Job:
        env = {"MINDX_ARENA_DIR": str(Path("shm").absolute()), **(env or {})}
        options = [*self._options, "--log-dir", f"{name}/logs"]
        job = start_agent(LOOP, "ckpt", *self._args, options=options, env=env, run_dir=Path(name))
        self.jobs[name] = self._stack.enter_context(job)
        return self.jobs[name]

    def report(self) -> str:
        return "\n\n".join(f"=== node {name} ===\n{job.report()}" for name, job in self.jobs.items())


def outcomes(name: str) -> list[tuple[str, str | None]]:
    """Outcome and cause of each attempt of one node."""
    return [(event["outcome"], event["reason"]) for event in events(Path(name), "attempt_end")]


def test_a_killed_agent_does_not_stop_the_others() -> None:
    """Its worker dies with it; the other nodes must take that for a lost node, not for a stop that somebody wanted."""
    with ExitStack() as stack:
        nodes = Nodes(stack, "--hold-at", 7, nnodes="1:3")
        jobs = [nodes.start(name) for name in "abc"]
        for job in jobs:
            job.wait_for("HOLD")
        victim = nodes.jobs["c"]
        victim.process.kill()
        victim.wait()
        for name in "ab":
            code = nodes.jobs[name].wait()
            assert code == 0, f"node {name}: exit code {code}\n{nodes.report()}"
            first, last = outcomes(name)
            assert first[0] == "failed" and "the agent of rank" in str(first[1]), nodes.report()
            assert last[0] == "finished"


# --- broken connections ---


@pytest.mark.skipif(not can_reset(), reason="needs pidfd_getfd")
@pytest.mark.parametrize("mode", ["--standalone", pytest.param("endpoint", marks=pytest.mark.drill)])
def test_one_node_whose_connections_are_reset_restarts(mode: str) -> None:
    """One node needs nobody: its workers meet again, whatever became of the agent's own connections."""
    options = ["--standalone"]
    if mode == "endpoint":
        options = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    env = {"MINDX_ARENA_DIR": str(Path("shm").absolute())}
    with start_agent(LOOP, "ckpt", "--hold-at", 7, ranks=2, options=options, env=env, run_dir=Path("a")) as job:
        job.wait_for("HOLD", 2)
        own = reset_connections(job.process.pid)
        assert own > 0 or mode == "--standalone"
        for pid in job.pids().values():
            assert reset_connections(pid) > 0, "the fault has fired"
        job.signal_rank(1, signal.SIGKILL)  # else nobody of them would notice before the next collective
        job.expect(0)
    assert len(job.matches(r"^READY \d+ \d+ 7")) == 2, job.report()


@pytest.mark.skipif(not can_reset(), reason="needs pidfd_getfd")
def test_an_agent_whose_connection_to_the_rendezvous_is_reset_meets_the_others_again() -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, "--hold-at", 7, nnodes="2")
        one, two = nodes.start("a"), nodes.start("b")
        for job in (one, two):
            job.wait_for("HOLD")
        for job in (one, two):
            assert reset_connections(job.process.pid) > 0, "the fault has fired"
        (pid,) = two.pids().values()
        os.kill(pid, signal.SIGKILL)
        for name in "ab":
            code = nodes.jobs[name].wait()
            assert code == 0, f"node {name}: exit code {code}\n{nodes.report()}"
            assert nodes.jobs[name].matches(r"^READY \d+ \d+ 7"), nodes.report()
