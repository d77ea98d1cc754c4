"""A momentum encoder that follows by ``.data``, which no version counter shows: a step that is cut off behind it is
not taken for the boundary before it, nor for the one behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow
SCRIPT = "momentum.py"


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.drill), 1])
def test_a_peer_is_killed_behind_the_hidden_change(tmp_path: Path, uninterrupted: Uninterrupted, every: int) -> None:
    """Without snapshots the job starts over, with them it loses no step: in no case it goes on from torn weights."""
    (tmp_path / "shm").mkdir()
    env = {"MINDX_ARENA_DIR": str(tmp_path / "shm"), "MINDX_SNAPSHOT_EVERY": str(every)}
    whole = uninterrupted(SCRIPT, 2).hashes()
    with start_job(SCRIPT, tmp_path / "ckpt", "--kill", "9:1", ranks=2, env=env) as job:
        job.expect(1)
    assert job.matches("2 parameters were changed since the boundary without torch's knowledge"), job.report()
    resumed = run_job(SCRIPT, tmp_path / "ckpt", ranks=2, env=env)
    assert {m[1] for m in resumed.matches(r"READY \d+ \d+ (\w+)")} == {"8" if every else "None"}, resumed.report()
    assert resumed.hashes() == whole, resumed.report()


@pytest.mark.drill
def test_a_peer_is_killed_in_the_second_step_of_the_process(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """No update has shown yet that the weights move in front of it."""
    env = {"MINDX_SNAPSHOT_EVERY": "0"}
    whole = uninterrupted(SCRIPT, 2).hashes()
    with start_job(SCRIPT, tmp_path / "ckpt", "--kill", "2:1", ranks=2, env=env) as job:
        job.expect(1)
    assert job.matches("2 parameters were changed since the boundary without torch's knowledge"), job.report()
    resumed = run_job(SCRIPT, tmp_path / "ckpt", ranks=2, env=env)
    assert {m[1] for m in resumed.matches(r"READY \d+ \d+ (\w+)")} == {"None"}, resumed.report()
    assert resumed.hashes() == whole, resumed.report()


def test_an_exception_in_front_of_the_hidden_change(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    """Behind the update, where a step counts as done if nothing of it is left to do."""
    env = {"MINDX_SNAPSHOT_EVERY": "0"}
    whole = uninterrupted(SCRIPT, 1, "--behind").hashes()
    failed = run_job(SCRIPT, tmp_path / "ckpt", "--behind", "--kill", "9!0", env=env, code=1)
    assert failed.matches("2 parameters are changed between the last .* without torch's knowledge"), failed.report()
    assert not failed.matches("counts as done"), failed.report()
    assert run_job(SCRIPT, tmp_path / "ckpt", "--behind", env=env).hashes() == whole
