"""A dynamic cluster of real processes: killed, stopped, started again, refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.processes import Processes, cluster
from tests.harness import Job, run_job, wait_until

pytestmark = pytest.mark.slow
EXIT_TEMPORARY = 75


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def hashes_of(jobs: list[Job]) -> dict[int, str]:
    return {rank: digest for job in jobs for rank, digest in job.hashes().items()}


def uninterrupted(size: int, tmp_path: Path, *arguments: str) -> dict[int, str]:
    """The same program under torchrun's variables: `cluster.init` knows them, too."""
    folder = tmp_path / "uninterrupted"
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        return run_job("clustered.py", *arguments, ranks=size).hashes()
    finally:
        os.chdir(before)


def finish(run: Processes, scheduler: Job, jobs: list[Job]) -> None:
    for job in jobs:
        job.expect(0)
    scheduler.expect(0)


def held(run: Processes, *arguments: str, fresh: bool = False) -> tuple[Job, list[Job]]:
    """The scheduler and the workers, once these hold where `arguments` say."""
    scheduler = run.scheduler()
    jobs = run.workers(*arguments, fresh=fresh)
    for job in jobs:
        job.wait_for("HOLD")
    return scheduler, jobs


# --- a killed worker ---


@pytest.mark.parametrize(
    ("size", "victim", "where"), [(2, 0, "boundary"), pytest.param(3, 1, "forward", marks=pytest.mark.drill)]
)
def test_a_killed_worker_that_is_started_again_costs_no_step(
    size: int, victim: int, where: str, tmp_path: Path
) -> None:
    with cluster(size) as run:
        scheduler = run.scheduler()
        jobs = run.workers(f"--kill={where}:7:{victim}")
        assert jobs[victim].wait() == -signal.SIGKILL
        again = run.worker(victim, f"--kill={where}:7:{victim}")
        living = [job for number, job in enumerate(jobs) if number != victim]
        finish(run, scheduler, [*living, again])
        for job in living:
            begun = job.matches(r"READY (\d+) (\d+) (\w+)")
            assert [match[2] for match in begun] == [str(job.process.pid)] * 2, "the survivors keep their processes"
            assert begun[1][3] == "6" if where == "forward" else "7"
        assert hashes_of([*living, again]) == uninterrupted(size, tmp_path)


# --- the scheduler ---


@pytest.mark.drill
def test_the_scheduler_is_killed_and_started_again_while_the_training_goes_on(tmp_path: Path) -> None:
    with cluster(2) as run:
        first, jobs = held(run, "--hold-at=5,9")
        first.process.kill()
        first.wait()
        # One of them says it for all.
        wait_until(lambda: any(job.matches("the training goes on") for job in jobs), "the word of a lost scheduler")
        run.go()
        for job in jobs:
            job.wait_for(r"HOLD \d 9")  # without a scheduler
        second = run.scheduler()
        second.wait_for("table is recovered")
        run.go(9)
        finish(run, second, jobs)
        assert all(len(job.matches("READY")) == 1 for job in jobs)
        assert hashes_of(jobs) == uninterrupted(2, tmp_path)


# --- without recovery ---


def test_without_recovery_a_death_ends_the_job_with_the_reason() -> None:
    """Also where the dead one's loader worker, which was forked, lives on."""
    with cluster(2, recovery=False) as run:
        scheduler = run.scheduler()
        jobs = run.workers("--kill=forward:7:1", "--num-workers=1", fresh=False)
        assert jobs[1].wait() == -signal.SIGKILL
        scheduler.expect(1)
        jobs[0].expect(EXIT_TEMPORARY)
        reason = (
            rf"rank 1 \(node id 1, process {jobs[1].process.pid} on .*\) is dead: its connection has ended\. MS_ENABLE_"
        )
        assert scheduler.matches(reason) and jobs[0].matches(reason)


# --- other starts ---


def test_one_process_without_any_variable_is_rank_0_of_1() -> None:
    job = run_job("clustered.py")
    assert job.matches(r"READY 0 \d+ None") and job.matches("DONE 0")
