"""Ranks without replicas (FSDP2), cut off in their very first save: nothing was ever whole, so the job starts over by
itself. What looks the same and is not, because files were lost, is refused as ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness import Job, run_job, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow
drill = pytest.mark.drill
ENV = {"MINDX_ARENA_DIR": "none"}  # as after a power cut
STEPS = ("--steps", 8)


def stop_at_4(directory: Path, *args: object) -> Job:
    with start_job("fsdp.py", directory, *STEPS, "--hold-at", 3, *args, ranks=2, env=ENV) as job:
        job.wait_for("HOLD", count=2)
        job.signal_rank(0)
        return job.expect(1)


def saved(directory: Path) -> list[str]:
    return sorted(path.parent.name for path in directory.rglob("*.safetensors"))


@drill
def test_cut_off_in_the_very_first_save_the_job_begins_anew(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    for number in range(2):  # the second time with the first one's files beside it
        job = stop_at_4(tmp_path, "--kill-in-save", "written:1")
        assert job.matches("KILLED in written"), job.report()
        assert {m[1] for m in job.matches(r"READY \d \d+ (\w+)")} == {"None"}, job.report()
        assert len(job.matches("the job starts over: it was cut off in its very first save")) == number, job.report()
        assert set(saved(tmp_path)) == {"rank_0"}
    again = run_job("fsdp.py", tmp_path, *STEPS, ranks=2, env=ENV)
    (line,) = again.matches(r"WARNING the job starts over: (.*)")
    assert "step 4 is not used" in line[1] and "rank 1" in line[1], again.report()
    assert again.hashes() == uninterrupted("fsdp.py", 2, *STEPS).hashes(), again.report()


@pytest.mark.parametrize(
    "lost",
    [pytest.param("file", marks=drill), pytest.param("folder", marks=drill), pytest.param("events", marks=drill)],
)
def test_a_lost_file_of_a_whole_step_is_refused(tmp_path: Path, lost: str) -> None:
    job = stop_at_4(tmp_path)
    assert saved(tmp_path) == ["rank_0", "rank_1"], job.report()
    for path in (tmp_path / "rank_1").glob("*.safetensors"):
        path.unlink()
    if lost == "folder":
        shutil.rmtree(tmp_path / "rank_1")
    if lost == "events":
        (tmp_path / "events.jsonl").unlink()
    failed = run_job("fsdp.py", tmp_path, *STEPS, ranks=2, env=ENV, code=1)
    assert failed.matches("NoUsableCheckpointError"), failed.report()
    assert not failed.matches("starts over:"), failed.report()


@pytest.mark.drill
def test_a_file_that_had_its_name_and_was_lost_is_refused(tmp_path: Path) -> None:
    """Rank 1 died right after the rename: the step was whole."""
    job = stop_at_4(tmp_path, "--kill-in-save", "named:1")
    assert job.matches("KILLED in named"), job.report()
    assert saved(tmp_path) == ["rank_0", "rank_1"]
    assert not list((tmp_path / "rank_1").glob("first-save-*"))
    for path in (tmp_path / "rank_1").glob("*.safetensors"):
        path.unlink()
    failed = run_job("fsdp.py", tmp_path, *STEPS, ranks=2, env=ENV, code=1)
    assert failed.matches("NoUsableCheckpointError"), failed.report()
