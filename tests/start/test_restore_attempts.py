"""Attempts of one run are branches: a start continues one of them and names the others in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.start.restore import Resumed
from tests.checkpoint_files import write, write_step
from tests.start.finding import find_on


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
