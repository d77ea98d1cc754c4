"""Attempts of one run are branches: a start continues one of them and names the others in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.resume.restore import Resumed
from tests.checkpoint_files import EPOCH_0, write, write_step
from tests.resume.finding import find, find_on


def test_the_last_attempt_goes_before_higher_steps_of_an_earlier_one(tmp_path: Path) -> None:
    """Attempt 1 reached 200; somebody resumed from step 100 by path, and attempt 2 was stopped at 150."""
    for step in (100, 200):
        write(tmp_path / f"a-1_{step}.safetensors", step=step, attempt=1, created=EPOCH_0 + step)
    write(tmp_path / "a-1_150.safetensors", step=150, attempt=2, kind="breakpoint", created=EPOCH_0 + 300)
    found = find(tmp_path)
    assert found is not None
    assert found.checkpoint.info.moment == ("run-a", 2, 150) and not found.rejected
    again = find(tmp_path, resume=tmp_path / "a-1_200.safetensors")
    assert again is not None and (again.checkpoint.info.attempt, again.next_attempt) == (1, 3)


def test_a_last_attempt_without_a_whole_step_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (100, 200):
        write_step(tmp_path, step, attempt=1)
    for rank, step in ((0, 150), (0, 140), (1, 130)):
        path = tmp_path / f"rank_{rank}" / f"b-1_{step}.safetensors"
        write(path, step=step, rank=rank, world_size=2, attempt=2)
    write(tmp_path / "rank_1" / "b-1_200.safetensors", step=200, rank=1, world_size=2, attempt=2)
    line = "run run-a attempt 2 step 200 is not used: rank 0 has no file of it"
    for result in find_on(2, tmp_path):
        assert isinstance(result, Resumed)
        assert result.checkpoint.info.moment == ("run-a", 1, 200)
        assert result.rejected == [line]
    assert [r.getMessage() for r in caplog.records] == [line]


def test_a_newer_run_without_a_whole_step_is_named(tmp_path: Path) -> None:
    write_step(tmp_path, 90, world_size=3)
    write(tmp_path / "rank_1" / "b-1_4.safetensors", step=4, rank=1, world_size=3, run_id="new", created=EPOCH_0 + 500)
    for result in find_on(3, tmp_path):
        assert isinstance(result, Resumed) and result.checkpoint.info.step == 90
        assert result.rejected == ["run new step 4 is not used: ranks 0, 2 have no file of it"]


def test_files_of_two_attempts_are_never_put_together(tmp_path: Path) -> None:
    write_step(tmp_path, 3)
    for rank in range(2):
        write(tmp_path / f"rank_{rank}" / "a-1_9.safetensors", step=9, rank=rank, world_size=2, attempt=rank)
    for result in find_on(2, tmp_path):
        assert isinstance(result, Resumed) and result.checkpoint.info.moment == ("run-a", 0, 3)
        assert result.rejected == [
            "run run-a attempt 1 step 9 is not used: rank 0 has no file of it",
            "run run-a step 9 is not used: rank 1 has no file of it",
        ]
