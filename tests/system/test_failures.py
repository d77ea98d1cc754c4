"""Exceptions, stuck ranks, dead peers and full disks, in real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, events, run_job, start_job
from tests.system.conftest import Reference
from tests.system.test_stop_resume import NO_MEMORY, drilled, resume, saved_steps, stop

pytestmark = pytest.mark.slow
drill = pytest.mark.drill


@pytest.mark.parametrize(
    ("ranks", "fail_rank", "where"),
    [
        (2, 1, "forward"),
        drilled(1, 0, "forward"),
        drilled(1, 0, "after"),
        drilled(1, 0, "late"),
        drilled(2, 1, "late"),
        drilled(3, 0, "forward"),
        drilled(2, 0, "after"),
    ],
)
def test_an_exception_saves_the_last_boundary_and_is_raised(
    tmp_path: Path, reference: Reference, ranks: int, fail_rank: int, where: str
) -> None:
    args = ("--fail-at", 8, "--fail-rank", fail_rank, "--fail-where", where)
    job = run_job("loop.py", tmp_path, *args, ranks=ranks, code=1)
    assert job.matches("RuntimeError: injected"), job.report()
    assert job.matches(r"step \d+ saved in .*_breakpoint.safetensors")
    steps = saved_steps(tmp_path)
    assert sorted(steps) == list(range(ranks)), job.report()
    assert set(steps.values()) == {7 if where == "forward" else 8}
    resumed = resume(tmp_path, ranks, *args)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()


@drill
@pytest.mark.parametrize(("ranks", "stuck", "target"), [(1, 0, 0), (3, 1, 2)])
def test_a_step_that_does_not_end_is_salvaged_on_all_ranks_before_the_deadline(
    tmp_path: Path, reference: Reference, ranks: int, stuck: int, target: int
) -> None:
    """One rank sits in its step, the others in the all-reduce of it."""
    args = ("--stuck-at", 8, "--stuck-rank", stuck, "--grace-s", 6)
    with start_job("loop.py", tmp_path, *args, ranks=ranks) as job:
        job.wait_for("STUCK")
        job.signal_rank(target)
        job.expect(143 if ranks == 1 else 1)
    assert saved_steps(tmp_path) == dict.fromkeys(range(ranks), 7), job.report()
    resumed = resume(tmp_path, ranks)
    assert resumed.hashes() == reference(ranks).hashes(), resumed.report()


@drill
def test_survivors_of_a_stopped_peer_save_in_time(tmp_path: Path) -> None:
    with start_job("loop.py", tmp_path, "--hold-at", 7, "--grace-s", 8, ranks=3, env=NO_MEMORY) as job:
        job.wait_for("HOLD", count=3)
        job.signal_rank(1, signal.SIGSTOP)  # neither dead nor alive: collectives with it hang
        job.signal_rank(0)
        job.wait_for(r"step 7 saved in", count=2)
        job.process.wait(120)
    assert saved_steps(tmp_path) == {0: 7, 2: 7}, job.report()


def test_a_full_disk_at_the_stop_keeps_the_older_file(tmp_path: Path) -> None:
    stop(tmp_path, "--hold-at", 3)
    (old,) = tmp_path.glob("*.safetensors")
    content = old.read_bytes()
    job = stop(tmp_path, "--hold-after", 4, "--inject", "file-size:20000")
    assert job.matches("could not be saved"), job.report()
    assert old.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".safetensors"] == [old.name]
    assert events(tmp_path, "save")[-1]["outcome"].startswith("failed")


# --- a rank fails in the first step of an attempt, when the others can finish it ---


def moments(directory: Path) -> set[tuple[int, int, int]]:
    """Rank, attempt and step of every file on disk."""
    infos = [read_header(path).info for path in directory.rglob("*.safetensors")]
    return {(info.rank, info.attempt, info.step) for info in infos}


@drill
@pytest.mark.parametrize(
    ("ranks", "victim", "how"),
    [(2, 1, "raise"), (2, 1, "kill"), (2, 0, "raise"), (2, 0, "kill"), (3, 2, "kill"), (4, 0, "raise")],
)
@pytest.mark.parametrize("memory", [True, False])
def test_the_step_that_an_attempt_began_at_is_exact_and_goes_first(
    tmp_path: Path, reference: Reference, ranks: int, victim: int, how: str, memory: bool
) -> None:
    """It is whole on disk, but of the attempt before."""
    directory, arenas = tmp_path / "ckpt", tmp_path / "shm"
    arenas.mkdir()
    env = {"MINDX_ARENA_DIR": str(arenas) if memory else "none", "MINDX_SNAPSHOT_EVERY": "0"}
    stop(directory, "--hold-at", 5, ranks=ranks, env=env)
    assert moments(directory) == {(rank, 0, 6) for rank in range(ranks)}
    fault: tuple[object, ...] = ("--kill", f"update:7:{victim}")
    if how == "raise":
        fault = ("--fail-at", 7, "--fail-rank", victim, "--fail-where", "backward", "--fail-resumed")
    job: Job = run_job("loop.py", directory, *fault, ranks=ranks, env=env, code=1)
    assert set(job.resumed()) == {"6"}, job.report()
    assert job.matches("KILLED in update 7" if how == "kill" else "RuntimeError: injected after backward")
    survivors = {(rank, 1, 7) for rank in range(ranks) if rank != victim}
    # A killed rank's sockets are cut: of two others, one may be told of that before it has its last gradients.
    assert how == "kill" or survivors <= moments(directory), f"the others did not finish the step\n{job.report()}"
    again = run_job("loop.py", directory, ranks=ranks, env=env)
    assert not again.matches("random numbers start over"), again.report()
    assert again.hashes() == reference(ranks).hashes(), f"{job.report()}\n{again.report()}"
