"""A dynamic cluster whose processes are stopped, killed and started again by hand at odd moments."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.processes import cluster
from tests.cluster.test_cluster import finish, hashes_of, held, in_its_own_folder, uninterrupted
from tests.harness import wait_until

__all__ = ["in_its_own_folder"]

pytestmark = [pytest.mark.slow, pytest.mark.drill]


def test_a_scheduler_that_stands_still_for_longer_than_the_heartbeat_holds_nobody_for_dead(tmp_path: Path) -> None:
    with cluster(2, MINDX_HEARTBEAT_S="3") as run:
        scheduler, jobs = held(run, "--hold-at=5,9")
        os.kill(scheduler.process.pid, signal.SIGSTOP)
        since = time.monotonic()
        run.go()
        for job in jobs:
            job.wait_for(r"HOLD \d 9")  # without it
        wait_until(lambda: time.monotonic() > since + 6.5, "the end of two heartbeats")
        os.kill(scheduler.process.pid, signal.SIGCONT)
        run.go(9)
        finish(run, scheduler, jobs)
        assert not scheduler.matches("is dead"), scheduler.report()
        assert all(len(job.matches("READY")) == 1 for job in jobs)
        assert hashes_of(jobs) == uninterrupted(2, tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_killed_before_the_group_is_formed(victim: int, tmp_path: Path) -> None:
    with cluster(2) as run:
        scheduler = run.scheduler()
        first = run.worker(victim)
        first.wait_for(f"registered as node id {victim}")
        first.process.kill()
        first.wait()
        scheduler.wait_for(f"node id {victim}, .* is gone before the group is formed")
        jobs = [run.worker(1 - victim), run.worker(victim)]
        finish(run, scheduler, jobs)
        assert hashes_of(jobs) == uninterrupted(2, tmp_path)


@pytest.mark.parametrize("second", ["registered as node id 1", "READY"])
def test_the_new_process_is_killed_as_well(second: str, tmp_path: Path) -> None:
    """While the survivors start over, and when all have begun."""
    with cluster(3) as run:
        scheduler = run.scheduler()
        jobs = run.workers("--kill=forward:7:1")
        assert jobs[1].wait() == -signal.SIGKILL
        again = run.worker(1, "--kill=forward:7:1")
        again.wait_for(second)
        again.process.kill()
        again.wait()
        third = run.worker(1, "--kill=forward:7:1")
        finish(run, scheduler, [jobs[0], jobs[2], third])
        assert hashes_of([jobs[0], jobs[2], third]) == uninterrupted(3, tmp_path)
        for job in (jobs[0], jobs[2]):
            assert {match[1] for match in job.matches(r"READY \d+ (\d+)")} == {str(job.process.pid)}
