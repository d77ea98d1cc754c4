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
STAGES = ("wiped", "reserved", "copying", "copied", "headed", "committed", "sealed")
LONG = ("--epochs", 8, "--say-passed")


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


def resumed_from(job: Job) -> set[str]:
    return {m[1] for m in job.matches(r"READY \d+ \d+ (\w+)")}


def kill_all(job: Job) -> None:
    """At one instant: nobody can do anything for the others."""
    pids = job.pids().values()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


# --- replicas: the survivors hold the weights, the boundary log holds what was the killed rank's own ---


def drilled(*values: object) -> Any:
    """A case for `make drill`: one of its kind is enough each time."""
    return pytest.param(*values, marks=pytest.mark.drill)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("ranks", "victim"), [drilled(2, 0), drilled(2, 1), drilled(3, 0), (3, 1), drilled(4, 0), drilled(4, 2)]
)
def test_a_killed_rank_costs_no_step_and_no_bit(place: Place, reference: Reference, ranks: int, victim: int) -> None:
    with place.start("--kill", f"forward:8:{victim}", "--say-passed", ranks=ranks) as job:
        job.expect(1)
    assert len(job.matches("KILLED in forward 8")) == 1
    seen = passed(job)
    assert seen.pop(victim) == 7 and set(seen.values()) <= {6, 7}, job.report()  # one that stops at 7 prints it no more
    assert {path.parent.name for path in place.files()} == {f"rank_{r}" for r in range(ranks) if r != victim}
    resumed = place.run(ranks=ranks)
    assert resumed_from(resumed) == {"7"}, resumed.report()
    assert resumed.matches(f"rank {victim} has no file of step 7.* from memory"), resumed.report()
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("where", "ranks", "victim"), [("update", 2, 0), drilled("update", 3, 2), drilled("boundary", 2, 1)]
)
def test_a_rank_killed_where_the_others_can_end_the_step(
    place: Place, reference: Reference, where: str, ranks: int, victim: int
) -> None:
    """They save this boundary or the one before; the killed rank's own state of it is known or foreseen."""
    with place.start("--kill", f"{where}:8:{victim}", ranks=ranks) as job:
        job.expect(1)
    assert len(job.matches(f"KILLED in {where} 8")) == 1
    resumed = place.run(ranks=ranks)
    steps = resumed_from(resumed)
    assert len(steps) == 1 and steps <= ({"8"} if where == "boundary" else {"7", "8"}), resumed.report()
    assert not resumed.matches("random numbers start over"), resumed.report()
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()


@pytest.mark.parametrize("victim", [drilled(0), drilled(2)])
def test_a_rank_killed_at_any_moment(place: Place, reference: Reference, victim: int) -> None:
    with place.start(*LONG, ranks=3) as job:
        job.wait_for(f"PASSED {victim} 11")
        job.signal_rank(victim, signal.SIGKILL)
        job.expect(1)
    assert job.matches(r"exitcode\s*: -9|Signal 9"), job.report()
    resumed = place.run(*LONG, ranks=3)
    (step,) = resumed_from(resumed)
    assert step.isdecimal() and int(step) >= min(passed(job).values()), f"{job.report()}\n{resumed.report()}"
    assert resumed.hashes() == reference(3, *LONG).hashes(), f"{job.report()}\n{resumed.report()}"


# --- everybody at once: only shared memory is left ---


@pytest.mark.drill
@pytest.mark.parametrize("ranks", [1, 4])
def test_all_killed_with_a_snapshot_of_every_step(place: Place, reference: Reference, ranks: int) -> None:
    with place.start(*LONG, ranks=ranks, every=1) as job:
        job.wait_for(r"PASSED \d 9", count=ranks)
        kill_all(job)
        job.expect(1 if ranks > 1 else -signal.SIGKILL)
    assert place.files() == []
    resumed = place.run(*LONG, ranks=ranks, every=1)
    (step,) = resumed_from(resumed)
    assert step.isdecimal() and int(step) >= min(passed(job).values()), f"{job.report()}\n{resumed.report()}"
    assert len(resumed.matches("INFO resumed from .*/shm/.*/slot_.*because of snapshot")) == 1, resumed.report()
    assert resumed.hashes() == reference(ranks, *LONG).hashes(), f"{job.report()}\n{resumed.report()}"


@pytest.mark.parametrize("ranks", [1, drilled(2)])
def test_save_every_keeps_steps_on_disk_for_a_plain_program(place: Place, reference: Reference, ranks: int) -> None:
    """No agent, no snapshots. Two steps are kept, and what is written beside the training may not be durable yet."""
    with place.start(*LONG, "--save-every", 4, ranks=ranks) as job:
        job.wait_for(r"PASSED \d 21", count=ranks)
        kill_all(job)
        job.expect(1 if ranks > 1 else -signal.SIGKILL)
    assert 1 <= len(place.files()) <= 6 * ranks, place.files()
    resumed = place.run(*LONG, "--save-every", 4, ranks=ranks)
    (step,) = resumed_from(resumed)
    assert step.isdecimal() and int(step) >= 12 and int(step) % 4 == 0, f"{job.report()}\n{resumed.report()}"
    assert resumed.hashes() == reference(ranks, *LONG).hashes(), f"{job.report()}\n{resumed.report()}"
    assert not job.matches("nothing is saved between the stops"), job.report()
    assert len(resumed.matches("resumed from .*because of periodic")) == 1, resumed.report()


@pytest.mark.drill
def test_real_shared_memory(tmp_path: Path, reference: Reference) -> None:
    """All killed, with a snapshot of every step; the one test that uses /dev/shm, with the defaults but for the
    interval."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK):
        pytest.skip("no /dev/shm here")
    env = {"MINDX_SNAPSHOT_EVERY": "1"}
    with start_job("loop.py", tmp_path, *LONG, ranks=2, env=env) as job:
        job.wait_for(r"PASSED \d 9", count=2)
        kill_all(job)
        job.expect(1)
    assert not list(tmp_path.rglob("*.safetensors"))
    job_arenas = job_folder(base, tmp_path.resolve())
    assert sorted(rank_folders(job_arenas)) == [0, 1]
    for path in (user_folder(base), job_arenas, *rank_folders(job_arenas).values()):
        assert path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in job_arenas.rglob("*") if path.is_file()} == {0o600}
    resumed = run_job("loop.py", tmp_path, *LONG, ranks=2, env=env)
    (step,) = resumed_from(resumed)
    assert step.isdecimal() and int(step) >= min(passed(job).values()), f"{job.report()}\n{resumed.report()}"
    assert len(resumed.matches("INFO resumed from .*/slot_.*because of snapshot")) == 1, resumed.report()
    assert resumed.hashes() == reference(2, *LONG).hashes(), resumed.report()
    assert not job_arenas.exists()


def test_a_directory_that_was_emptied_begins_anew(place: Place, reference: Reference) -> None:
    with place.start("--kill", "boundary:5:0", every=1) as job:
        job.expect(-signal.SIGKILL)
    assert rank_folders(job_folder(place.memory, place.directory))
    for path in place.directory.iterdir():
        path.unlink()
    fresh = place.run(every=1)
    assert resumed_from(fresh) == {"None"}
    assert fresh.hashes() == reference(1).hashes()


# --- killed in the middle of a copy ---


@pytest.mark.parametrize("stage", [s if s in ("copying", "committed") else drilled(s) for s in STAGES])
def test_killed_in_the_middle_of_a_copy(place: Place, reference: Reference, stage: str) -> None:
    """The fourth snapshot, of step 8: a record that was not written yet means that the other slot is used."""
    with place.start("--kill-in-snapshot", f"{stage}:4", every=2) as job:
        job.expect(-signal.SIGKILL)
    assert len(job.matches(f"KILLED in {stage}")) == 1
    resumed = place.run(every=2)
    is_kept = stage in ("committed", "sealed")
    assert resumed_from(resumed) == {"8" if is_kept else "6"}, resumed.report()
    assert len(resumed.matches("verified: steps 7 to 8, done again")) == (not is_kept), resumed.report()
    assert resumed.hashes() == reference(1).hashes(), resumed.report()


@pytest.mark.parametrize("stage", [drilled("wiped"), drilled("copying"), drilled("headed")])
def test_killed_again_in_the_first_copy_after_the_resume(place: Place, reference: Reference, stage: str) -> None:
    """What the job goes on from is the last to be overwritten."""
    for count in (4, 1, 1):
        with place.start("--kill-in-snapshot", f"{stage}:{count}", every=2) as job:
            job.expect(-signal.SIGKILL)
        assert len(job.matches(f"KILLED in {stage}")) == 1
    resumed = place.run(every=2)
    assert resumed_from(resumed) == {"6"}, resumed.report()
    assert resumed.hashes() == reference(1).hashes(), resumed.report()


# --- sharded state: nobody else has it ---


@pytest.mark.drill
@pytest.mark.parametrize("every", [1, drilled(2)])
def test_all_ranks_of_a_sharded_job_killed(place: Place, uninterrupted: Uninterrupted, every: int) -> None:
    with place.start("--steps", 40, script="fsdp.py", ranks=4, every=every) as job:
        job.wait_for(r"PASSED \d 9", count=4)
        kill_all(job)
        job.expect(1)
    assert place.files() == []
    resumed = place.run("--steps", 40, script="fsdp.py", ranks=4, every=every)
    (step,) = resumed_from(resumed)
    lost = min(passed(job).values()) - int(step)
    assert lost <= every - 1 + (every > 1), f"{lost} steps lost\n{job.report()}\n{resumed.report()}"
    assert resumed.hashes() == uninterrupted("fsdp.py", 4, "--steps", 40).hashes(), (
        f"{job.report()}\n{resumed.report()}"
    )


@pytest.mark.drill
@pytest.mark.parametrize("stage", [drilled("wiped"), "copying", drilled("committed")])
def test_one_rank_of_a_sharded_job_killed_in_its_copies(place: Place, uninterrupted: Uninterrupted, stage: str) -> None:
    """Twice: the slot that the job goes on from must not be overwritten first on a rank that has a newer one too."""
    args = ("--steps", 12)
    for count in (6, 1):
        with place.start(*args, "--kill-in-snapshot", f"{stage}:{count}:1", script="fsdp.py", ranks=2, every=1) as job:
            job.expect(1)
        assert len(job.matches(f"KILLED in {stage}")) == 1, job.report()
    resumed = place.run(*args, script="fsdp.py", ranks=2, every=1)
    (step,) = resumed_from(resumed)
    assert step.isdecimal() and int(step) >= 5, resumed.report()
    assert resumed.hashes() == uninterrupted("fsdp.py", 2, *args).hashes(), resumed.report()
