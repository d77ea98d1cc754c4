"""A rank is killed between its update and its boundary, which the others pass: what it kept for itself is as it was, or
the resumed run says that it may not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindx_elastic.persist.format import read_header
from tests.harness import Job, run_job, start_job
from tests.system.conftest import Uninterrupted

pytestmark = pytest.mark.slow
SCRIPT = "own_objects.py"
MAY_DIFFER = "so from here the run may differ from the uninterrupted one"


def killed_and_resumed(folder: Path, *args: object, victim: int, step: int = 5) -> Job:
    """The resumed job, run to its end; it goes on from the step in which `victim` was killed."""
    directory = folder / "ckpt"
    directory.mkdir()
    (folder / "shm").mkdir()
    env = {"MINDX_ARENA_DIR": str(folder / "shm"), "MINDX_SNAPSHOT_EVERY": "0"}
    with start_job(SCRIPT, directory, *args, "--kill", f"{step}:{victim}", ranks=2, env=env) as job:
        job.expect(1)
    assert job.matches(f"KILLED {victim} in step {step}"), job.report()
    resumed = run_job(SCRIPT, directory, *args, ranks=2, env=env)
    assert {m[1] for m in resumed.matches(r"READY \d+ \d+ (\w+)")} == {str(step)}, resumed.report()
    return resumed


def notes(folder: Path, rank: int) -> str:
    (final,) = (folder / "ckpt" / f"rank_{rank}").glob("*_final.safetensors")
    return "; ".join(read_header(final).info.unmanaged)


@pytest.mark.drill
def test_what_moves_before_the_forward_is_the_ranks_own_bit_for_bit(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """Generators, counters and a non-persistent buffer that differ from rank to rank. An average and a counter that
    all ranks have alike move behind the update: they are the donor's."""
    resumed = killed_and_resumed(tmp_path, victim=1)
    assert resumed.matches("rank 1 has no file of step 5: .* are foreseen"), resumed.report()
    assert not resumed.matches(MAY_DIFFER), resumed.report()
    assert resumed.hashes() == uninterrupted(SCRIPT, 2).hashes(), resumed.report()
    assert not notes(tmp_path, 1)


@pytest.mark.drill
def test_what_moves_behind_the_update_is_told_and_recorded(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    resumed = killed_and_resumed(tmp_path, "--late", victim=1)
    told = resumed.matches(rf"WARNING rank 1 was killed .*{MAY_DIFFER}: losses \(differs from rank to rank; this")
    assert len(told) == 1, resumed.report()
    assert resumed.hashes() == uninterrupted(SCRIPT, 2).hashes(), "all else is the rank's own"
    assert [m[2] for m in resumed.matches(r"LOSSES (1) (\d+)")] == ["15"], "one of its 16 is lost, and none is rank 0's"
    assert "losses" in notes(tmp_path, 1)


@pytest.mark.drill
@pytest.mark.parametrize("others", ["missing", pytest.param("empty", marks=pytest.mark.drill)])
def test_an_object_of_the_killed_rank_alone_is_its_last_copy(tmp_path: Path, others: str) -> None:
    resumed = killed_and_resumed(tmp_path, "--ema", others, victim=0)
    assert resumed.matches(rf"WARNING rank 0 was killed .*{MAY_DIFFER}: ema \(.*this rank's last known"), (
        resumed.report()
    )
    assert "ema" in notes(tmp_path, 0)
