"""A node is lost, or a rank, when the others have ended their training: what the others' agents make of it."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import Job, events, wait_until
from tests.system.conftest import Plain
from tests.system.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
drill = pytest.mark.drill

LAST = 24
"""The last step."""


def held_in_final_save(nodes: Nodes, rank: int) -> tuple[Job, list[Job]]:
    """The agent of `rank`, which stands still in its final save, and the others, whose workers have ended."""
    wait_until(lambda: nodes.found("^FAULT "), "the final save", 300)
    (job,) = [job for job in nodes.jobs if rank in job.pids()]
    others = [each for each in nodes.jobs if each is not job]
    for other in others:
        run = nodes.folder / f"node{nodes.jobs.index(other)}" / "run"
        wait_until(lambda run=run: events(run, "worker_end"), "the end of a worker", 300)
    return job, others


def signal_node(job: Job, rank: int, signum: int) -> None:
    worker = job.pids()[rank]
    os.kill(job.process.pid, signum)
    os.kill(worker, signum)


@drill
@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("shard", ["no", "fsdp"])
def test_a_node_lost_in_its_final_save_is_waited_for(tmp_path: Path, plain: Plain, shard: str, lost: int) -> None:
    """Its part of the state may be nowhere: the job must not say that it has finished."""
    with ExitStack() as stack:
        args = ("--epochs", 2, "--shard", shard, "--fault", f"{lost}:{LAST}:save:stop")
        nodes = Nodes(stack, tmp_path / "hurt", 2, 1, *args)
        job, (other,) = held_in_final_save(nodes, lost)
        signal_node(job, lost, signal.SIGKILL)
        other.wait_for(r"restart 1", 1, 200)
        new = nodes.start()
        assert other.wait(400) == 0 and new.wait(400) == 0, nodes.report()
        (told,) = events(nodes.folder / f"node{nodes.jobs.index(other)}" / "run", "restart")
        assert re.search(rf"node {lost} has not ended: ", told["reason"]), told
        undisturbed = plain(2, "--shard", shard)[0]
        # What the lost node alone had (its random numbers) starts over where the end was saved, and a warning says so.
        # The nodes meet in any order, so the survivor may have the lost node's rank now.
        ended = {**other.hashes(), **new.hashes()}
        assert sorted(ended) == [0, 1], nodes.report()
        differing = ended.items() - undisturbed.items()
        assert {rank for rank, _ in differing} <= {lost}, nodes.report()
        assert not differing or nodes.found(rf"rank {lost} .*not bit for bit"), nodes.report()
