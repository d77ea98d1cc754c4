"""Exceptions, stuck ranks, dead peers and full disks, in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import events, run_job
from tests.system.conftest import Reference
from tests.system.test_stop_resume import drilled, resume, saved_steps, stop

pytestmark = pytest.mark.slow
drill = pytest.mark.drill


@pytest.mark.parametrize(
    ("ranks", "fail_rank", "where"),
    [
        (2, 1, "forward"),
        drilled(1, 0, "forward"),
        drilled(1, 0, "after"),
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
