"""Loops of several ranks: evaluations on the training's own loader, and a stop inside one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job, start_agent


@pytest.mark.drill
def test_two_ranks_stop_in_an_evaluation_and_go_on(tmp_path: Path) -> None:
    whole = run_job("stepping.py", tmp_path / "whole", ranks=2)
    expected = whole.hashes()
    assert set(expected) == {0, 1}
    stopped = run_job("stepping.py", tmp_path / "job", "--stop", 8, 1, ranks=2, code=1)
    assert not stopped.hashes()
    again = run_job("stepping.py", tmp_path / "job", ranks=2)
    begun = {m[1] for m in again.matches(r"READY \d \d+ (\w+)")}
    assert len(begun) == 1 and 8 <= int(*begun) < 13  # until the ranks have agreed
    assert again.hashes() == expected


@pytest.mark.drill
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.drill)])
def test_a_rank_that_is_killed_behind_an_epoch_goes_on_there(tmp_path: Path, rank: int) -> None:
    """Each rank gets back its own last loss of the epoch, the killed one too."""
    whole = run_job("epoch_tail.py", tmp_path / "whole", ranks=2)
    options = ["--max-restarts", "1"]
    job_args = (tmp_path / "job", "--kill", rank)
    with start_agent("epoch_tail.py", *job_args, ranks=2, options=options, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert len(job.matches(f"KILLED {rank}")) == 1 and len(job.matches(r"READY \d \d+ 6")) == 2, job.report()
    assert job.hashes() == whole.hashes() and len(whole.hashes()) == 2, job.report()
    losses = sorted(m[0] for m in whole.matches("LOSS .*"))
    assert len(losses) == 6 and sorted(m[0] for m in job.matches("LOSS .*")) == losses, job.report()
