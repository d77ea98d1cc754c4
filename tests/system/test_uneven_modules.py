"""Weights that differ between the ranks of a DDP job, which replace each other, are told when the training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_job, start_agent
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow


def test_an_average_of_each_ranks_own_first_weights_is_told_and_one_that_is_made_behind_ddp_is_not(
    tmp_path: Path,
) -> None:
    job = run_job("own_average.py", tmp_path, ranks=2)
    found = job.matches(r'the weights of module "(\w+)" \(Linear\) are not the same on all ranks')
    assert [match[1] for match in found] == ["before"], job.report()


def test_an_average_that_rank_0_alone_updates_is_its_own_or_told_behind_its_death(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    averages = r"AVERAGES (\d) (\S+) (\S+)"
    whole = uninterrupted("rank_zero_average.py", 2)
    expected = {m[1]: m[2] for m in whole.matches(averages)}
    assert len({*expected.values()}) == 2, whole.report()
    with start_agent("rank_zero_average.py", tmp_path / "job", 5, ranks=2, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert (tmp_path / "job.killed").exists()
    assert {m[1]: m[2] for m in job.matches(averages)} == expected, job.report()
    told = job.matches(
        r"rank 0 was killed before it had kept all .* the weights of (\w+) \(only some ranks change them"
    )
    assert {m[1] for m in told} == {"large"}, job.report()
