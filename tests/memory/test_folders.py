"""This user's folders in shared memory go with the last rank, and nothing else does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.folders import rank_folders


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def test_the_last_rank_takes_everything_away(base: Path, directory: Path) -> None:
    arenas = [RankArena(base, directory, rank) for rank in range(2)]
    for arena in arenas:
        arena.slots[0].resize(10)
        arena.describe(directory, "run-a")
    arenas[0].remove()
    assert rank_folders(arenas[1].job) == {1: arenas[1].folder} and (arenas[1].job / "owner.json").exists()
    arenas[1].remove()
    assert not list(base.iterdir())


def test_another_job_of_the_user_stays(base: Path, directory: Path) -> None:
    with closing(RankArena(base, directory / "other", 0)) as other:
        RankArena(base, directory, 0).remove()
        assert [path.name for path in other.job.parent.iterdir()] == [other.job.name]


@pytest.mark.parametrize("surprise", ["gone", "folder"])
def test_removing_never_raises(base: Path, directory: Path, surprise: str) -> None:
    arena = RankArena(base, directory, 0)
    if surprise == "gone":  # `mindx-elastic clean --all`
        for path in arena.folder.iterdir():
            path.unlink()
        arena.folder.rmdir()
    else:
        (arena.folder / "a").mkdir()
    arena.remove()
    RankArena(base, directory, 0).remove()  # the lock is free
