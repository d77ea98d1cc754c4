"""What a DDP program sets on its data set, when a rank is killed: the others go back, a new one comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import start_agent
from tests.system.conftest import Uninterrupted

drill = pytest.mark.drill


@pytest.mark.parametrize(
    ("ranks", "victim", "step", "where", "recover", "workers"),
    [
        (2, 0, 13, "step", "in-place", 0),
        (2, 1, 10, "tail", "in-place", 1),
        pytest.param(2, 0, 11, "step", "in-place", 0, marks=drill),
        pytest.param(2, 1, 6, "step", "restart", 1, marks=drill),
        pytest.param(2, 0, 15, "tail", "restart", 0, marks=drill),
        pytest.param(3, 1, 13, "step", "in-place", 1, marks=drill),
        pytest.param(3, 2, 10, "tail", "in-place", 0, marks=drill),
    ],
)
def test_a_rank_is_killed(
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    ranks: int,
    victim: int,
    step: int,
    where: str,
    recover: str,
    workers: int,
) -> None:
    expected = uninterrupted("set_data.py", ranks)
    options = ["--max-restarts", "1", "--recover", recover]
    args = (tmp_path / "job", workers, victim, step, where)
    with start_agent("set_data.py", *args, ranks=ranks, options=options, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert len(job.matches(f"KILLED {victim}")) == 1, job.report()
    assert len(job.matches(r"recovery \d in place")) == (recover == "in-place"), job.report()
    assert job.hashes() == expected.hashes() and len(expected.hashes()) == ranks, job.report()
    assert len(job.matches(r"DONE \d \w+ False 4")) == ranks, job.report()
    assert not job.matches("WARNING.*(killed before it had kept|not kept|the guard does not keep)"), job.report()
