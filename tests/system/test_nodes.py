"""``mindx-elastic run`` on several nodes, all of them on this machine: ranks are killed, and nodes, agents and workers.
The job restarts, or the same command goes on, and no step of it is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, events, wait_until
from tests.resets import can_reset, reset_connections
from tests.system.conftest import Plain
from tests.system.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

TWO = ("--epochs", 2)
THREE = (*TWO, "--size", 144, "--step-s", 0.05)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def kill_node(job: Job) -> None:
    """The agent first, so that it cannot say anything of its ranks."""
    pids = list(job.pids().values())
    job.process.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def hurt(nodes: Nodes, rank: int) -> tuple[Job, Job]:
    """The agent of `rank`, once the fault there has struck, and the other one of two."""
    wait_until(lambda: nodes.found("^FAULT "), "the fault", 300)
    wait_until(lambda: any(rank in job.pids() for job in nodes.jobs), "the rank", 100)
    (job,) = [job for job in nodes.jobs if rank in job.pids()]
    (other,) = [each for each in nodes.jobs if each is not job]
    return job, other


def go_on(nodes: Nodes, other: Job) -> Job:
    """Another node comes, and the job ends with the survivor's one restart."""
    other.wait_for("restart 1", 1, 200)
    new = nodes.start()
    assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
    assert len(other.matches(r"restart \d")) == 1, nodes.report()
    return new


@drill
@pytest.mark.parametrize(("rank", "where"), [(1, "update"), (0, "mid"), (0, "eval"), (0, "after")])
@pytest.mark.parametrize("snapshots", ["auto", "1"])
def test_a_killed_rank_of_two_nodes_restarts_the_job_bit_for_bit(
    tmp_path: Path, plain: Plain, stack: ExitStack, rank: int, where: str, snapshots: str
) -> None:
    """In place is for one node, and one line of each agent says so."""
    options = ("--recover", "in-place", "--snapshot-every", snapshots)
    args = ("--evaluate", "no_grad")
    fault = f"{rank}:{12 if where == 'eval' else 8}:{where}"
    nodes = Nodes(stack, tmp_path, 2, 1, *TWO, *args, "--fault", fault, options=options)
    nodes.expect(0)
    assert len(nodes.found("^FAULT ")) == 1, nodes.report()
    for words in (r"restart \d", "in-place is for a job of one node"):
        assert [len(job.matches(words)) for job in nodes.jobs] == [1, 1], nodes.report()
    assert not nodes.found("not bit for bit|may differ"), nodes.report()
    assert nodes.end == plain(2, *args), nodes.report()


@drill
def test_a_lost_node_restarts_the_job_with_another(tmp_path: Path, plain: Plain, stack: ExitStack) -> None:
    """The same samples in each step; random numbers of the lost rank went with its memory."""
    nodes = Nodes(stack, tmp_path, 2, 1, *TWO, "--fault", "1:8:update:node")
    wait_until(lambda: any(job.process.poll() is not None for job in nodes.jobs), "an agent's death", 120)
    (other,) = [job for job in nodes.jobs if job.process.poll() is None]
    go_on(nodes, other)
    assert nodes.end[1] == plain(2)[1], nodes.report()
    assert nodes.end[0] == plain(2)[0] or nodes.found("not bit for bit|may differ"), nodes.report()


@drill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_passes_the_lock_of_its_own_jobs_machine_that_stands_still(
    tmp_path: Path, plain: Plain, stack: ExitStack, rank: int
) -> None:
    """The job restarts with another node, while the old process still has its byte of the lock. Rank 0 would take
    another job for its holder, and wait for two minutes in vain."""
    args = (*TWO, "--step-s", 0.05, "--fault", f"{rank}:8:start:stop")
    nodes = Nodes(stack, tmp_path, 2, 1, *args, options=("--grace", "2"))
    job, other = hurt(nodes, rank)
    worker = job.pids()[rank]
    os.kill(job.process.pid, signal.SIGSTOP)
    new = go_on(nodes, other)
    passed = [match for each in (other, new) for match in each.matches(rf"rank {rank} goes on, though .*{worker}")]
    assert len(passed) == 1, nodes.report()
    assert nodes.end[1] == plain(2)[1], nodes.report()


@drill
@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("shard", ["no", "fsdp"])
def test_a_node_lost_in_its_final_save_is_waited_for(
    tmp_path: Path, plain: Plain, stack: ExitStack, shard: str, lost: int
) -> None:
    """Its part of the state may be nowhere: the job must not say that it has finished."""
    nodes = Nodes(stack, tmp_path, 2, 1, *TWO, "--shard", shard, "--fault", f"{lost}:24:save:stop")
    job, other = hurt(nodes, lost)
    run = tmp_path / f"node{nodes.jobs.index(other)}" / "run"
    wait_until(lambda: events(run, "worker_end"), "the end of the other's worker", 300)
    kill_node(job)
    new = go_on(nodes, other)
    (told,) = events(run, "restart")
    assert re.search(rf"node {lost} has not ended: ", told["reason"]), told
    # What the lost node alone had (its random numbers) starts over where the end was saved, and a warning says so.
    # The nodes meet in any order, so the survivor may have the lost node's rank now.
    ended = {**other.hashes(), **new.hashes()}
    assert sorted(ended) == [0, 1], nodes.report()
    differing = ended.items() - plain(2, "--shard", shard)[0].items()
    assert {rank for rank, _ in differing} <= {lost}, nodes.report()
    assert not differing or nodes.found(rf"rank {lost} .*not bit for bit"), nodes.report()


GONE = r"ERROR the job has failed: (.*); then the rendezvous at (\S+) is gone with its host, .*; exit code 75"


@pytest.mark.parametrize(
    ("num_nodes", "host"), [(2, 1), pytest.param(3, 0, marks=drill), pytest.param(3, 2, marks=drill)]
)
def test_when_the_host_is_lost_the_others_save_say_why_and_leave_and_the_same_command_goes_on(
    tmp_path: Path, plain: Plain, stack: ExitStack, num_nodes: int, host: int
) -> None:
    """No step is lost; the random numbers of the lost rank went with its machine's memory, and a warning says so."""
    nodes = Nodes(stack, tmp_path, num_nodes, 1, *THREE, "--hold-at", 8, host=host)
    for job in nodes.jobs:
        job.wait_for("^HOLD ", 1, 200)
    lost = nodes.jobs[host]
    kill_node(lost)
    (tmp_path / "job" / "go").touch()
    for job in nodes.jobs:
        if job is not lost:
            assert job.wait(400) == 75, nodes.report()
            assert len(job.matches(GONE)) == 1, nodes.report()
    assert any((tmp_path / "job").rglob("*_8_breakpoint.safetensors")), nodes.report()
    for job in [nodes.start(hosts=number == 0) for number in range(num_nodes)]:
        assert job.wait(400) == 0, nodes.report()
        assert not job.matches(r"^READY \d+ \d+ (?!8$)"), nodes.report()
    assert nodes.end[1] == plain(num_nodes, "--size", 144)[1], nodes.report()
    assert nodes.found("not bit for bit|may differ"), nodes.report()


@drill
@pytest.mark.skipif(not can_reset(), reason="needs pidfd_getfd")
def test_an_agent_whose_connection_to_the_rendezvous_is_reset_meets_the_others_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    nodes = Nodes(stack, tmp_path, 2, 1, "--hold-at", 7, script="loop.py")
    for job in nodes.jobs:
        job.wait_for("HOLD")
    for job in nodes.jobs:
        assert reset_connections(job.process.pid) > 0, "the fault has fired"
    (pid,) = nodes.jobs[1].pids().values()
    os.kill(pid, signal.SIGKILL)
    nodes.expect(0)
    assert len(nodes.found(r"^READY \d+ \d+ 7")) == 2, nodes.report()
