"""A rank of several nodes is killed, or a whole node is lost, agent and workers: the job restarts, and no step of it is
lost."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, wait_until
from tests.resets import can_reset, reset_connections
from tests.system.conftest import Plain
from tests.system.nodes import End, Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

STEP_S = ("--step-s", 0.05)


def held(nodes: Nodes) -> dict[int, Job]:
    """Wait until all ranks stand behind the same step. Returns the agents' jobs by rank."""
    for job in nodes.jobs:
        job.wait_for("^HOLD ", 1, 200)
    return {rank: job for job in nodes.jobs for rank in job.pids()}


def release(nodes: Nodes) -> None:
    (nodes.folder / "job" / "go").touch()


def kill_node(job: Job) -> None:
    """The agent first, so that it cannot say anything of its ranks."""
    pids = list(job.pids().values())
    job.process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def dead_and_others(nodes: Nodes) -> tuple[Job, list[Job]]:
    """The agent that was killed, once it is gone, and the others."""
    wait_until(lambda: any(job.process.poll() is not None for job in nodes.jobs), "an agent's death", 120)
    (dead,) = [job for job in nodes.jobs if job.process.poll() is not None]
    return dead, [job for job in nodes.jobs if job is not dead]


def replace(
    folder: Path, num_nodes: int, ranks: int, fault: str, *args: object, stands_by: bool = False
) -> tuple[Nodes, list[Job]]:
    """A node is lost by `fault`, and another one comes, or stands by already. Returns the survivors, too."""
    with ExitStack() as stack:
        words = ("--hold-at", 6) if stands_by else ()
        nodes = Nodes(stack, folder / "hurt", num_nodes, ranks, "--epochs", 2, *args, *words, "--fault", fault)
        if stands_by:
            held(nodes)
            nodes.start().wait_for("run directory", 1, 200)
            release(nodes)
        dead, survivors = dead_and_others(nodes)
        survivors = [job for job in survivors if job in nodes.jobs[:num_nodes]]
        if not stands_by:
            nodes.start()
        for job in (*survivors, nodes.jobs[-1]):
            assert job.wait(400) == 0, nodes.report()
        dead.wait()
        assert len(nodes.found("^FAULT ")) == 1, nodes.report()
        return nodes, survivors


def check(nodes: Nodes, survivors: list[Job], undisturbed: End) -> None:
    """The same samples in each step, after one restart; random numbers of the lost ranks went with their memory."""
    assert nodes.end[1] == undisturbed[1], nodes.report()
    assert nodes.end[0] == undisturbed[0] or nodes.found("not bit for bit|may differ"), nodes.report()
    for job in survivors:
        assert len(job.matches(r"restart \d")) == 1, nodes.report()


@drill
@pytest.mark.parametrize(("rank", "where"), [(1, "update"), (0, "mid"), (0, "eval"), (0, "after")])
@pytest.mark.parametrize("snapshots", ["auto", "1"])
def test_a_killed_rank_of_two_nodes_restarts_the_job_bit_for_bit(
    tmp_path: Path, plain: Plain, rank: int, where: str, snapshots: str
) -> None:
    """In place is for one node, and one line of each agent says so."""
    options = ("--recover", "in-place", "--snapshot-every", snapshots)
    args = ("--epochs", 2, "--evaluate", "no_grad")
    with ExitStack() as stack:
        step = 12 if where == "eval" else 8
        words = ("--fault", f"{rank}:{step}:{where}")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, *args, *words, options=options)
        nodes.expect(0)
        assert len(nodes.found("^FAULT ")) == 1, nodes.report()
        for job in nodes.jobs:
            assert len(job.matches(r"restart \d")) == 1, nodes.report()
            assert len(job.matches("in-place is for a job of one node")) == 1, nodes.report()
        assert not nodes.found("not bit for bit|may differ"), nodes.report()
        assert nodes.end == plain(2, *args[2:]), nodes.report()


def test_a_lost_node_restarts_the_job_with_another(tmp_path: Path, plain: Plain) -> None:
    nodes, survivors = replace(tmp_path, 2, 1, "1:8:update:node")
    check(nodes, survivors, plain(2))


@drill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_passes_the_lock_of_its_own_jobs_machine_that_stands_still(
    tmp_path: Path, plain: Plain, rank: int
) -> None:
    """The job restarts with another node, while the old process still has its byte of the lock. Rank 0 would take
    another job for its holder, and wait for two minutes in vain."""
    with ExitStack() as stack:
        args = ("--epochs", 2, *STEP_S, "--fault", f"{rank}:8:start:stop")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, *args, options=("--grace", "2"))
        wait_until(lambda: nodes.found("^FAULT "), "the stop", 200)
        (job,) = [job for job in nodes.jobs if rank in job.pids()]
        (other,) = [each for each in nodes.jobs if each is not job]
        worker = job.pids()[rank]
        os.kill(job.process.pid, signal.SIGSTOP)
        other.wait_for("restart 1", 1, 200)
        new = nodes.start()
        assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        passed = [match for each in (other, new) for match in each.matches(rf"rank {rank} goes on, though .*{worker}")]
        assert len(passed) == 1, nodes.report()
        assert nodes.end[1] == plain(2)[1], nodes.report()


@drill
@pytest.mark.skipif(not can_reset(), reason="needs pidfd_getfd")
def test_an_agent_whose_connection_to_the_rendezvous_is_reset_meets_the_others_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(stack, tmp_path / "nodes", 2, 1, "--hold-at", 7, script="loop.py")
        for job in nodes.jobs:
            job.wait_for("HOLD")
        for job in nodes.jobs:
            assert reset_connections(job.process.pid) > 0, "the fault has fired"
        (pid,) = nodes.jobs[1].pids().values()
        os.kill(pid, signal.SIGKILL)
        nodes.expect(0)
        assert len(nodes.found(r"^READY \d+ \d+ 7")) == 2, nodes.report()
