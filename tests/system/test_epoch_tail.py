"""Ranks that are killed in code behind an epoch that reads what the steps have set and has a collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Job, start_agent
from tests.system.conftest import Uninterrupted

drill = pytest.mark.drill


def run_killed(folder: Path, ranks: int, victim: int, recover: str, *more: str) -> Job:
    options = ["--max-restarts", "1", "--recover", recover]
    args = (folder / "job", "--kill", victim, *more)
    with start_agent("epoch_tail.py", *args, ranks=ranks, options=options, run_dir=folder / "run") as job:
        job.expect(0)
    assert len(job.matches(f"KILLED {victim}")) == 1, job.report()
    assert len(job.matches(r"READY \d \d+ 6")) == ranks, job.report()
    assert len(job.matches(r"recovery \d in place")) == (recover == "in-place"), job.report()
    return job


def losses(job: Job) -> list[str]:
    return sorted({m[0] for m in job.matches("LOSS .*")})


@pytest.mark.parametrize(
    ("ranks", "victim", "recover", "when"),
    [
        (2, 0, "in-place", "--late"),
        pytest.param(2, 1, "restart", "--late", marks=drill),
        pytest.param(2, 1, "in-place", "", marks=drill),
        pytest.param(2, 0, "restart", "", marks=drill),
        pytest.param(2, 1, "in-place", "--late", marks=drill),
        pytest.param(2, 0, "restart", "--late", marks=drill),
        pytest.param(3, 1, "in-place", "--late", marks=drill),
        pytest.param(3, 2, "restart", "--late", marks=drill),
        pytest.param(4, 0, "in-place", "--late", marks=drill),
    ],
)
@pytest.mark.parametrize("data", ["", pytest.param("--stream", marks=drill)])
def test_all_run_that_code_again_where_one_had_not_come_to_its_end(
    uninterrupted: Uninterrupted, tmp_path: Path, ranks: int, victim: int, recover: str, when: str, data: str
) -> None:
    """The collective is done by all ranks or by none, and each rank reads its own last loss of the epoch."""
    expected = uninterrupted("epoch_tail.py", ranks, *filter(None, [data]))
    job = run_killed(tmp_path, ranks, victim, recover, *filter(None, [when, data]))
    assert job.hashes() == expected.hashes() and len(expected.hashes()) == ranks, job.report()
    assert losses(job) == losses(expected) and len(losses(expected)) == 4 * ranks, job.report()
    assert bool(job.matches("the code after epoch 2 runs again on all ranks")) == bool(when), job.report()


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=drill)])
@pytest.mark.parametrize("where", ["tail", pytest.param("next", marks=drill)])
def test_a_snapshot_of_a_last_boundary_that_nobody_knew_to_be_the_last(
    tmp_path: Path, uninterrupted: Uninterrupted, where: str, every: int
) -> None:
    """A loader without a length: the snapshot is there when its end shows, and it has what the tail reads."""
    whole = uninterrupted("stream_tail.py", 1)
    options = ["--snapshot-every", str(every), "--max-restarts", "1"]
    args = (tmp_path / "job", "--kill", where)
    with start_agent("stream_tail.py", *args, options=options, run_dir=tmp_path / "run") as job:
        job.expect(0)
    assert len(job.matches("KILLED")) == 1 and job.matches("READY 0 \\d+ 6"), job.report()
    assert {m[0] for m in job.matches("LOSS .*")} == {m[0] for m in whole.matches("LOSS .*")}, job.report()
    assert job.hashes() == whole.hashes() and len(whole.hashes()) == 1, job.report()
