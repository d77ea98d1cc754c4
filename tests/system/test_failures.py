"""Exceptions, stuck ranks, dead peers and full disks, in real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness import events, run_job, start_job
from tests.system.conftest import Reference
from tests.system.test_stop_resume import resume, saved_steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "fail_rank", "where"),
    [
        pytest.param(1, 0, "forward", marks=pytest.mark.drill),
        pytest.param(1, 0, "after", marks=pytest.mark.drill),
        (1, 0, "late"),
        pytest.param(2, 1, "late", marks=pytest.mark.drill),
        (2, 1, "forward"),
        pytest.param(3, 0, "forward", marks=pytest.mark.drill),
        pytest.param(2, 0, "after", marks=pytest.mark.drill),
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


def test_a_crash_in_the_first_step_leaves_no_file(tmp_path: Path, reference: Reference) -> None:
    run_job("loop.py", tmp_path, "--fail-at", 1, code=1)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert run_job("loop.py", tmp_path).hashes() == reference(1).hashes()


@pytest.mark.drill
def test_a_step_that_does_not_end_is_salvaged_before_the_deadline(tmp_path: Path, reference: Reference) -> None:
    with start_job("loop.py", tmp_path, "--stuck-at", 8, "--grace-s", 4) as job:
        job.wait_for("STUCK")
        job.signal_rank(0)
        job.expect(143)
        assert job.matches("the training thread does not come back")
    assert saved_steps(tmp_path) == {0: 7}
    resumed = resume(tmp_path, 1)
    assert resumed.hashes() == reference(1).hashes(), resumed.report()


@pytest.mark.drill
def test_all_ranks_salvage_one_step_when_one_is_stuck(tmp_path: Path, reference: Reference) -> None:
    with start_job("loop.py", tmp_path, "--stuck-at", 8, "--stuck-rank", 1, "--grace-s", 6, ranks=3) as job:
        job.wait_for("STUCK")
        job.signal_rank(2)  # the others sit in the all-reduce of step 8
        job.expect(1)
    assert saved_steps(tmp_path) == {0: 7, 1: 7, 2: 7}, job.report()
    resumed = resume(tmp_path, 3)
    assert resumed.hashes() == reference(3).hashes(), resumed.report()


@pytest.mark.drill
def test_survivors_of_a_stopped_peer_save_in_time(tmp_path: Path) -> None:
    nothing = {"MINDX_ARENA_DIR": "none"}  # nobody starts again to take it over
    with start_job("loop.py", tmp_path, "--hold-at", 7, "--grace-s", 8, ranks=3, env=nothing) as job:
        job.wait_for("HOLD", count=3)
        job.signal_rank(1, signal.SIGSTOP)  # neither dead nor alive: collectives with it hang
        job.signal_rank(0)
        job.wait_for(r"step 7 saved in", count=2)
        job.process.wait(120)
    assert saved_steps(tmp_path) == {0: 7, 2: 7}, job.report()


@pytest.mark.drill
def test_survivors_of_a_killed_peer_save_and_leave(tmp_path: Path) -> None:
    env = {"MINDX_ARENA_DIR": "none"}  # with memory nothing at all is lost: see test_killed.py
    with start_job("loop.py", tmp_path, "--stuck-at", 8, "--stuck-rank", 1, ranks=3, env=env) as job:
        job.wait_for("STUCK")
        job.signal_rank(1, signal.SIGKILL)
        job.expect(1)
    assert saved_steps(tmp_path) == {0: 7, 2: 7}, job.report()
    # Nobody can restore rank 1's random numbers, but a replica's weights and optimizer are the same as its own were.
    again = run_job("loop.py", tmp_path, ranks=3, env=env)
    assert again.matches("rank 1 has no file of step 7 and takes rank 0's"), again.report()
    assert {m[1] for m in again.matches(r"READY \d \d+ (\d+)")} == {"7"}


def test_a_full_disk_at_the_stop_keeps_the_older_file(tmp_path: Path) -> None:
    with start_job("loop.py", tmp_path, "--hold-at", 3) as job:
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.expect(143)
    (old,) = tmp_path.glob("*.safetensors")
    content = old.read_bytes()
    # RLIMIT_FSIZE makes the next file too large, as a full disk would.
    with start_job("loop.py", tmp_path, "--hold-after", 4, env={"LOOP_FSIZE": "20000"}) as job:
        job.wait_for("HOLD")
        job.signal_rank(0)
        job.expect(143)
        assert job.matches("could not be saved"), job.report()
    assert old.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".safetensors"] == [old.name]
    assert events(tmp_path, "save")[-1]["outcome"].startswith("failed")
