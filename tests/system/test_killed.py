"""SIGKILL under plain torchrun: what survivors and shared memory hold loses no step and changes no bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.memory.folders import job_folder, rank_folders, user_folder
from tests.harness import Job, run_job, start_job
from tests.system.conftest import Reference, Uninterrupted

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
STAGES = ("wiped", "reserved", "copying", "copied", "headed", "committed", "sealed")
LONG = ("--epochs", 8, "--say-passed")


def drilled(*values: object) -> Any:
    """A case for `make drill`: one of its kind is enough each time."""
    return pytest.param(*values, marks=drill)


class Place:
    """A job's checkpoint directory and its own shared memory."""

    def __init__(self, folder: Path) -> None:
        self.directory, self.memory = folder / "ckpt", folder / "shm"
        self.directory.mkdir()
        self.memory.mkdir()

    def env(self, every: object) -> dict[str, str]:
        return {"MINDX_ARENA_DIR": str(self.memory), "MINDX_SNAPSHOT_EVERY": str(every)}

    @contextmanager
    def start(self, *args: object, script: str = "loop.py", ranks: int = 1, every: object = 0) -> Iterator[Job]:
        with start_job(script, self.directory, *args, ranks=ranks, env=self.env(every)) as job:
            yield job

    def run(self, *args: object, script: str = "loop.py", ranks: int = 1, every: object = 0) -> Job:
        job = run_job(script, self.directory, *args, ranks=ranks, env=self.env(every))
        assert not list(self.memory.iterdir()), f"something is left in memory\n{job.report()}"
        return job

    def files(self) -> list[Path]:
        return sorted(self.directory.rglob("*.safetensors"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def passed(job: Job) -> dict[int, int]:
    """The last step that each rank has passed."""
    return {int(m[1]): int(m[2]) for m in job.matches(r"PASSED (\d+) (\d+)")}


def kill_all(job: Job) -> None:
    """At one instant: nobody can do anything for the others."""
    pids = job.pids().values()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def assert_goes_on(resumed: Job, killed: Job, whole: Job, step: int) -> None:
    """At a step that is at least this one, and to the same end."""
    report = f"{killed.report()}\n{resumed.report()}"
    (found,) = set(resumed.resumed())
    assert found.isdecimal() and int(found) >= step, report
    assert resumed.hashes() == whole.hashes(), report


# --- everybody at once: only shared memory is left ---


@pytest.mark.parametrize("ranks", [1, drilled(2)])
def test_save_every_keeps_steps_on_disk_for_a_plain_program(place: Place, reference: Reference, ranks: int) -> None:
    """No agent, no snapshots. Two steps are kept, and what is written beside the training may not be durable yet."""
    with place.start(*LONG, "--save-every", 4, ranks=ranks) as job:
        job.wait_for(r"PASSED \d 21", count=ranks)
        kill_all(job)
        job.expect(1 if ranks > 1 else -signal.SIGKILL)
    assert 1 <= len(place.files()) <= 6 * ranks, place.files()
    resumed = place.run(*LONG, "--save-every", 4, ranks=ranks)
    assert_goes_on(resumed, job, reference(ranks, *LONG), 12)
    assert all(int(step) % 4 == 0 for step in resumed.resumed()), resumed.report()
    assert not job.matches("nothing is saved between the stops"), job.report()
    assert len(resumed.matches("resumed from .*because of periodic")) == 1, resumed.report()


@drill
def test_real_shared_memory(tmp_path: Path, reference: Reference) -> None:
    """All killed, with a snapshot of every step; the one test that uses /dev/shm, with the defaults but for the
    interval."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        pytest.skip("no /dev/shm here")
    env = {"MINDX_SNAPSHOT_EVERY": "1"}
    with start_job("loop.py", tmp_path, *LONG, "--hold-at", 7, ranks=2, env=env) as job:
        job.wait_for("HOLD", count=2)
        kill_all(job)
        job.expect(1)
    assert not list(tmp_path.rglob("*.safetensors"))
    job_arenas = job_folder(base, tmp_path.resolve())
    assert sorted(rank_folders(job_arenas)) == [0, 1]
    for path in (user_folder(base), job_arenas, *rank_folders(job_arenas).values()):
        assert path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in job_arenas.rglob("*") if path.is_file()} == {0o600}
    resumed = run_job("loop.py", tmp_path, *LONG, ranks=2, env=env)
    assert len(resumed.matches("INFO resumed from .*/slot_.*because of snapshot")) == 1, resumed.report()
    assert_goes_on(resumed, job, reference(2, *LONG), min(passed(job).values()))
    assert not job_arenas.exists()


# --- killed in the middle of a copy ---


@pytest.mark.parametrize("stage", [s if s == "copying" else drilled(s) for s in STAGES])
def test_killed_in_the_middle_of_a_copy(place: Place, reference: Reference, stage: str) -> None:
    """The fourth snapshot, of step 8: a record that was not written yet means that the other slot is used."""
    with place.start("--kill-in-snapshot", f"{stage}:4", every=2) as job:
        job.expect(-signal.SIGKILL)
    assert len(job.matches(f"KILLED in {stage}")) == 1
    resumed = place.run(every=2)
    is_kept = stage in ("committed", "sealed")
    assert set(resumed.resumed()) == {"8" if is_kept else "6"}, resumed.report()
    assert len(resumed.matches("INFO steps 7 to 8, done again, are what")) == (not is_kept), resumed.report()
    assert resumed.hashes() == reference(1).hashes(), resumed.report()


# --- sharded state, cut off in its very first save: nothing was ever whole ---

POWER_CUT = {"MINDX_ARENA_DIR": "none"}
STEPS = ("--steps", 8)


def stop_at_4(directory: Path, *args: object) -> Job:
    with start_job("fsdp.py", directory, *STEPS, "--hold-at", 3, *args, ranks=2, env=POWER_CUT) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(0)
        return job.expect(1)


def saved(directory: Path) -> list[str]:
    return sorted(path.parent.name for path in directory.rglob("*.safetensors"))


@drill
def test_cut_off_in_the_very_first_save_the_job_starts_over(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    for number in range(2):  # the second time with the first one's files beside it
        job = stop_at_4(tmp_path, "--kill-in-save", "1")
        assert job.matches("KILLED in written"), job.report()
        assert set(job.resumed()) == {"None"}, job.report()
        assert len(job.matches("the job starts over: it was cut off in its very first save")) == number, job.report()
        assert set(saved(tmp_path)) == {"rank_0"}
    again = run_job("fsdp.py", tmp_path, *STEPS, ranks=2, env=POWER_CUT)
    (line,) = again.matches(r"WARNING the job starts over: (.*)")
    assert "step 4 is not used" in line[1] and "rank 1" in line[1], again.report()
    assert again.hashes() == uninterrupted("fsdp.py", 2, *STEPS).hashes(), again.report()
