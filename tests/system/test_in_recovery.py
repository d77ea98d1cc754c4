"""What else may happen while a recovery in place is under way, at each of its stages: the new process or a survivor
dies or stands still, the job is stopped, the disk is full. See ``jobs/in_recovery.py``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness import Job
from tests.system.test_in_place import IN_PLACE, WHY, Runs, check_in_place, faults, job_folder, processes

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
PATIENT = ("--rejoin-timeout", "60")
WORDS = ("--epochs", "2", "--step-s", "0.01", "--flag-file")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("meanwhile"))


def meanwhile(order: str) -> list[str]:
    return [*faults("1:8:forward"), "--meanwhile", order]


def check_restarted(job: Job, why: str) -> None:
    assert len(job.matches("^MEANWHILE ")) == 1, job.report()
    assert any(why in match[1] for match in job.matches(WHY)), job.report()
    assert len(job.matches(r"restart \d+ of")) == 1, job.report()
    assert not job.matches(IN_PLACE), job.report()


@drill
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=drill)])
@pytest.mark.parametrize(
    "stage",
    ["connect", *(pytest.param(each, marks=drill) for each in ("start", "guard", "out", "restore", "ready"))],
)
def test_the_new_process_is_killed(runs: Runs, ranks: int, stage: str) -> None:
    job, _ = runs.run(ranks, *WORDS, *meanwhile(f"new:{stage}:kill"), options=PATIENT)
    check_restarted(job, "the new process of rank 1 has died during the recovery")


@drill
@pytest.mark.parametrize("stage", ["leave", "out", "donate", "connect", "restore", "ready"])
@pytest.mark.parametrize("survivor", ["0", "2"])
def test_a_survivor_is_killed(runs: Runs, survivor: str, stage: str) -> None:
    if survivor == "2" and stage == "donate":
        pytest.skip("rank 0 is the donor")
    job, _ = runs.run(3, *WORDS, *meanwhile(f"{survivor}:{stage}:kill"), options=PATIENT)
    assert len(job.matches("^MEANWHILE ")) == 1, job.report()
    assert job.matches(IN_PLACE) or job.matches(r"restart \d+ of"), job.report()
    if stage != "leave":  # there it has not reported yet, and its place is taken as well
        check_restarted(job, "has died during the recovery")


@drill
@pytest.mark.parametrize(("what", "code"), [("term", 143), ("terms", 143), ("flag", 75)])
@pytest.mark.parametrize(
    "where",
    [
        *("0:leave", "2:out", "0:donate", "0:connect", "2:restore", "0:ready"),
        *("new:start", "new:connect", "new:restore", "new:ready"),
    ],
)
def test_the_job_is_stopped(runs: Runs, where: str, what: str, code: int) -> None:
    """It saves what there is, and the same command ends as if nothing had been."""
    options = (*PATIENT, "--grace", "20")
    job, folder = runs.run(3, *WORDS, *meanwhile(f"{where}:{what}"), options=options, code=code)
    assert len(job.matches("^MEANWHILE ")) == 1, job.report()
    with suppress(FileNotFoundError):
        (folder / "graceful_exit.json").unlink()
    again = runs.start(folder, 3, WORDS, PATIENT)
    assert again.hashes() == runs.undisturbed(3, WORDS)[0], again.report()
    assert int(again.matches(r"READY 0 \d+ (\d+)")[0][1]) >= 7, again.report()


@drill
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_that_a_survivor_hears_when_it_leaves_its_guard_is_not_lost(runs: Runs, rank: int) -> None:
    """Where all is agreed on by then, it is answered as soon as the ranks train again. Where another rank still waits
    for the new one, it hears of the stop from this one, and calls the recovery off."""
    job, folder = runs.run(3, *WORDS, *meanwhile(f"{rank}:closed:usr1"), options=PATIENT, code=138)
    assert len(job.matches("^MEANWHILE ")) == 1, job.report()
    assert job.matches(IN_PLACE) or job.matches("no recovery in place: the job is being stopped"), job.report()
    again = runs.start(folder, 3, WORDS, PATIENT)
    assert again.hashes() == runs.undisturbed(3, WORDS)[0], again.report()
    assert int(again.matches(r"READY 0 \d+ (\d+)")[0][1]) >= 7, again.report()


@drill
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
    job, folder = runs.run(3, *WORDS, *meanwhile(f"{where}:usr1-now"), options=PATIENT, code=138)
    assert len(job.matches("^MEANWHILE ")) == 1, job.report()
    assert not job.matches(r"restart \d+ of"), job.report()
    again = runs.start(folder, 3, WORDS, PATIENT)
    assert again.hashes() == runs.undisturbed(3, WORDS)[0], again.report()
    assert int(again.matches(r"READY 0 \d+ (\d+)")[0][1]) >= 7, again.report()


def fill(folder: Path) -> None:
    for size in (1 << 16, 100):
        with suppress(OSError), open(folder / f"filler{size}", "wb", buffering=0) as file:
            while True:
                file.write(bytes(size))


@drill
@pytest.mark.parametrize("order", ["", "new:guard:kill", "new:ready:kill"])
def test_the_disk_is_full(runs: Runs, order: str) -> None:
    """A recovery needs no disk. A restart does: the state stays in memory until there is room."""

    def go_when_it_is_full(job: Job) -> None:
        job.wait_for("^HOLD", 2)
        fill(disk)
        (job_folder(job) / "go").touch()

    folder = runs.new_folder()
    disk = folder / "ckpt"
    disk.mkdir(parents=True)
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=4M,mode=700 tmpfs {disk}") != 0:
        pytest.skip("a file system of a given size needs root")
    try:
        words: Sequence[str] = ["--epochs", "2", "--hold-at", "5"]
        orders = meanwhile(order) if order else faults("1:8:forward")
        job = runs.start(folder, 2, [*words, *orders], PATIENT, meanwhile=go_when_it_is_full, code=1 if order else 0)
        if order:
            assert len(job.matches("^MEANWHILE ")) == 1, job.report()
            for file in disk.glob("filler*"):
                file.unlink()
            again = runs.start(folder, 2, ["--epochs", "2"], PATIENT)
            assert again.matches(r"READY 0 \d+ 7$"), f"{job.report()}\n\n{again.report()}"
            job = again
        else:
            check_in_place(job, [1])
            assert job.matches("No space left on device; the training goes on"), job.report()
            assert len(processes(job)[0]) == 1
        assert job.hashes() == runs.undisturbed(2, ["--epochs", "2"])[0], job.report()
    finally:
        os.system(f"umount {disk}")
