"""This user's folders in shared memory: where they are, who uses them, how they go."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from mindx_elastic.memory import folders
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.folders import (
    job_folder,
    make_user_folder,
    rank_folders,
    squatted_folder,
    user_folder,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def open_arena(base: Path, directory: Path, rank: int = 0) -> AbstractContextManager[RankArena]:
    return closing(RankArena(base, directory, rank))


@pytest.mark.parametrize("planted", ["wide", "link", "file", "stranger's"])
def test_where_somebody_else_has_the_usual_name_a_private_one_is_used_by_all(
    base: Path, directory: Path, tmp_path: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual = user_folder(base)
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        usual.symlink_to(tmp_path / "elsewhere")
    elif planted == "file":
        usual.write_text("")
    else:
        usual.mkdir(mode=0o755 if planted == "wide" else 0o700)
        if planted == "stranger's":
            if os.geteuid():
                pytest.skip("only root can make a folder of another user")
            os.chown(usual, 65534, -1)
    assert squatted_folder(base) == usual
    with open_arena(base, directory, 0) as one, open_arena(base, directory, 1) as two:
        private = one.job.parent
        assert one.job == two.job == job_folder(base, directory) and private == user_folder(base)
        assert private.name.startswith(f"{usual.name}-") and stat.S_IMODE(private.stat().st_mode) == 0o700
        one.describe(directory, "run-a")
    assert [r.message for r in caplog.records if usual.name in r.message] == [
        f"{usual} is not a folder of this user's own with mode 700; {private.name} is used in its place"
    ]
    if usual.is_dir() and not usual.is_symlink():  # whoever took it gives it back: what lies in memory is found again
        usual.rmdir()
        with open_arena(base, tmp_path / "other"):
            pass
        (usual).mkdir(mode=0o700, exist_ok=True)
        assert user_folder(base) == usual and job_folder(base, directory) == one.job
    with open_arena(base, directory, 0) as one, open_arena(base, directory, 1) as two:
        one.remove()
        two.remove()
    assert not private.exists() or planted in ("wide", "stranger's")


def test_whoever_holds_the_lock_of_the_base_holds_nothing_up(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_LOCK_S", 0.05)
    user_folder(base).write_text("")
    fd = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert make_user_folder(base).is_dir()
    finally:
        os.close(fd)


# --- removal ---


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
    with open_arena(base, directory / "other") as other:
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
    assert arena._lock == -1
