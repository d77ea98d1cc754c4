"""``mindx-elastic run`` on several nodes, all of them on this machine: agents that die, nodes that come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, free_port, start_agent
from tests.resets import can_reset, reset_connections
from tests.system.nodes import serve_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("in_own_folder")]

LOOP = "loop.py"
CONF = "is_host=0,last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5"
"""The rendezvous notices a dead node after 10 s, and waits 10 s for one that may still come, unless all are there."""


class Nodes:
    """Agents that meet under one rendezvous id. This process hosts the rendezvous, so that none of them is special."""

    def __init__(self, stack: ExitStack, *args: object, nnodes: str, options: Sequence[str] = ()) -> None:
        self._stack, self._args = stack, args
        port = free_port()
        serve_table(stack, port, nnodes)
        self._options = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "nodes", "--rdzv-conf", CONF]
        self._options += ["--rdzv-endpoint", f"127.0.0.1:{port}", *options]
        self.jobs: dict[str, Job] = {}

    def start(self, name: str, *, env: dict[str, str] | None = None) -> Job:
        env = {"MINDX_ARENA_DIR": str(Path("shm").absolute()), **(env or {})}
        options = [*self._options, "--log-dir", f"{name}/logs"]
        job = start_agent(LOOP, "ckpt", *self._args, options=options, env=env, run_dir=Path(name))
        self.jobs[name] = self._stack.enter_context(job)
        return self.jobs[name]

    def resumed(self, name: str) -> list[str]:
        """The step that each attempt of a node's worker went on from."""
        return [match[1] for match in self.jobs[name].matches(r"^READY \d+ \d+ (\w+)")]

    def report(self) -> str:
        return "\n\n".join(f"=== node {name} ===\n{job.report()}" for name, job in self.jobs.items())


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


@pytest.mark.drill
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
            code = nodes.jobs[name].wait(400)
            assert code == 0, f"node {name}: exit code {code}\n{nodes.report()}"
            assert nodes.jobs[name].matches(r"^READY \d+ \d+ 7"), nodes.report()
