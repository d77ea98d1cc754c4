"""Weights that differ between the ranks of a DDP job, which replace each other, are told when the training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job

pytestmark = pytest.mark.slow


def test_an_average_of_each_ranks_own_first_weights_is_told(tmp_path: Path) -> None:
    job = run_job("own_average.py", tmp_path, "before", ranks=2)
    found = job.matches(r'rank (\d).* the weights of module "average" \(Linear\) are not the same on all ranks')
    assert {m[1] for m in found} == {"0", "1"}, job.report()


def test_one_that_is_made_behind_ddp_is_the_same_everywhere(tmp_path: Path) -> None:
    job = run_job("own_average.py", tmp_path, "behind", ranks=2)
    assert not job.matches("are not the same on all ranks"), job.report()
