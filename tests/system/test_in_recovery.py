"""What else may happen while a recovery in place is under way, at each of its stages: the new process or a survivor
dies or stands still, the job is stopped, the disk is full. See ``jobs/in_recovery.py``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness import Job
from tests.system.test_in_place import IN_PLACE, RESTART, Runs, check_in_place, check_restarted, faults, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.drill]
WORDS = ("--step-s", "0.01", "--flag-file")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("meanwhile"))


def meanwhile(order: str) -> list[str]:
    return [*faults("1:8:forward"), "--meanwhile", order]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", ["connect", "start", "guard", "out", "restore", "ready"])
def test_the_new_process_is_killed(runs: Runs, ranks: int, stage: str) -> None:
    job, _ = runs.run(ranks, *WORDS, *meanwhile(f"new:{stage}:kill"))
    check_restarted(job, "the new process of rank 1 has died during the recovery")
    assert not job.matches(IN_PLACE), job.report()


@pytest.mark.parametrize(
    "where",
    [
        *(f"0:{stage}" for stage in ("leave", "out", "donate", "connect", "restore", "ready")),  # rank 0 is the donor
        *(f"2:{stage}" for stage in ("leave", "out", "connect", "restore", "ready")),
    ],
)
def test_a_survivor_is_killed(runs: Runs, where: str) -> None:
    job, _ = runs.run(3, *WORDS, *meanwhile(f"{where}:kill"))
    if where.endswith("leave"):  # it has not reported yet, and its place is taken as well
        assert job.matches(IN_PLACE) or job.matches(RESTART), job.report()
    else:
        check_restarted(job, "has died during the recovery")
        assert not job.matches(IN_PLACE), job.report()


def stop_and_go_on(runs: Runs, order: str, code: int) -> Job:
    """A stop saves what there is, and the same command ends as if nothing had been."""
    job, folder = runs.run(3, *WORDS, *meanwhile(order), options=("--rejoin-timeout", "60", "--grace", "20"), code=code)
    with suppress(FileNotFoundError):
        (folder / "graceful_exit.json").unlink()
    again = runs.start(folder, 3, WORDS)
    assert again.hashes() == runs.undisturbed(3, WORDS)[0], again.report()
    assert all(int(step) >= 7 for step in again.resumed()), again.report()
    return job


@pytest.mark.parametrize(("what", "code"), [("term", 143), ("terms", 143), ("flag", 75)])
@pytest.mark.parametrize(
    "where",
    [
        *("0:leave", "2:out", "0:donate", "0:connect", "2:restore", "0:ready"),
        *("new:start", "new:connect", "new:restore", "new:ready"),
    ],
)
def test_the_job_is_stopped(runs: Runs, where: str, what: str, code: int) -> None:
    stop_and_go_on(runs, f"{where}:{what}", code)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_that_a_survivor_hears_when_it_leaves_its_guard_is_not_lost(runs: Runs, rank: int) -> None:
    """Where all is agreed on by then, it is answered as soon as the ranks train again. Where another rank still waits
    for the new one, it hears of the stop from this one, and calls the recovery off."""
    job = stop_and_go_on(runs, f"{rank}:closed:usr1", 138)
    assert job.matches(IN_PLACE) or job.matches("no recovery in place: the job is being stopped"), job.report()


@pytest.mark.parametrize(
    "where",
    [
        "2:restore",
        *(f"new:{stage}" for stage in ("start", "out", "connect", "restore", "ready", "guard")),
        *(f"0:{stage}" for stage in ("closed", "restore", "ready")),
    ],
)
def test_a_sigusr1_where_no_guard_is_open_stops_the_job(runs: Runs, where: str) -> None:
    """Its usual action would end the process, and the job would be restarted."""
    job = stop_and_go_on(runs, f"{where}:usr1-now", 138)
    assert not job.matches(RESTART), job.report()


def fill(folder: Path) -> None:
    for size in (1 << 16, 100):
        with suppress(OSError), open(folder / f"filler{size}", "wb", buffering=0) as file:
            while True:
                file.write(bytes(size))


@pytest.mark.parametrize("order", ["", "new:guard:kill", "new:ready:kill"])
def test_the_disk_is_full(runs: Runs, order: str) -> None:
    """A recovery needs no disk. A restart does: the state stays in memory until there is room."""

    def go_when_it_is_full(job: Job, folder: Path) -> None:
        job.wait_for("^HOLD", 2)
        fill(disk)
        (folder / "go").touch()

    folder = runs.new_folder()
    disk = folder / "ckpt"
    words = ["--hold-at", "5", *(meanwhile(order) if order else faults("1:8:forward"))]
    with small_disk(disk, "4M"):
        job = runs.start(folder, 2, words, meanwhile=go_when_it_is_full, code=1 if order else 0)
        if order:
            assert len(job.matches("^MEANWHILE ")) == 1, job.report()
            for file in disk.glob("filler*"):
                file.unlink()
            job = runs.start(folder, 2, [])
            assert "7" in job.resumed(), job.report()
        else:
            check_in_place(job, [1])
            assert job.matches("No space left on device; the training goes on"), job.report()
    assert job.hashes() == runs.undisturbed(2, [])[0], job.report()
