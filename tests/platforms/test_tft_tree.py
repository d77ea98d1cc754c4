"""The TTP tree: renamed once whole, by whoever comes first, with dead, late and stuck ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mindx_elastic.core.folders import step_folders_of_rank
from mindx_elastic.persist.catalog import read_entries, root_of
from mindx_elastic.persist.storage import create_temp, remove_stale_temps
from mindx_elastic.persist.writer import previous_path
from mindx_elastic.platforms import tft_tree
from mindx_elastic.platforms.tft_tree import settle_tft_file, tft_path
from tests import checkpoint_files

FINAL = "tft_saved_checkpoints-step_7"


def write(root: Path, rank: int, *, world_size: int = 3, attempt: int = 0) -> Path:
    path = tft_path(root, step=7, rank=rank, epoch=2, step_in_epoch=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    return checkpoint_files.write(path, rank=rank, world_size=world_size, step=7, kind="ttp", attempt=attempt)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def final(*ranks: int) -> list[str]:
    return [f"{FINAL}/rank_{rank}/ttp_rank_{rank}-2_3.safetensors" for rank in ranks]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits at all waits until the test is ended."""
    monkeypatch.setattr(tft_tree, "_PATIENCE_S", 3600.0)
    monkeypatch.setattr(tft_tree, "_QUIET_S", 3600.0)


def test_all_ranks_at_once(tmp_path: Path) -> None:
    """Whoever is first: every rank finds its own file under the final name."""
    paths = [write(tmp_path, rank, world_size=6) for rank in range(6)]
    start = threading.Barrier(6)
    found: list[Path] = []

    def settle(path: Path) -> None:
        start.wait()
        found.append(settle_tft_file(path, world_size=6))

    threads = [threading.Thread(target=settle, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(str(path.relative_to(tmp_path)) for path in found) == files(tmp_path) == final(*range(6))


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_known_to_be_gone_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path, 2)
    settle_tft_file(write(tmp_path, 1), world_size=3, gone=lambda: [0], timeout_s=3600)
    assert files(tmp_path) == final(1, 2)


def test_a_rank_that_never_begins_is_waited_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tft_tree, "_QUIET_S", 0.05)
    write(tmp_path, 2)
    settle_tft_file(write(tmp_path, 1), world_size=3)
    assert files(tmp_path) == final(1, 2)
    settle_tft_file(write(tmp_path, 0), world_size=3)  # it comes after all, and moves its own file
    assert files(tmp_path) == final(0, 1, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == [FINAL]


def test_a_rank_that_is_writing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tft_tree, "_QUIET_S", 0.0)
    path, other = write(tmp_path, 0, world_size=2), tft_path(tmp_path, step=7, rank=1, epoch=2, step_in_epoch=3)
    other.parent.mkdir()
    fd, temporary = create_temp(other)
    thread = threading.Thread(target=lambda: settle_tft_file(path, world_size=2))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and path.exists()
    write(tmp_path, 1, world_size=2)
    temporary.unlink()
    os.close(fd)
    thread.join()
    assert files(tmp_path) == final(0, 1)


def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    """The others leave it behind: the tree is not renamed under a writer who may only be slow."""
    folder = tft_path(tmp_path, step=7, rank=1, epoch=2, step_in_epoch=3).parent
    folder.mkdir(parents=True)
    (folder / ".ttp.0123.mindx-tmp").write_bytes(b"half")
    settle_tft_file(write(tmp_path, 0), world_size=3, timeout_s=0.05)
    assert files(tmp_path) == [*final(0), f"{FINAL}_tmp/rank_1/.ttp.0123.mindx-tmp"]
    assert step_folders_of_rank(tmp_path, 0) == [tmp_path / FINAL / "rank_0"]
    assert step_folders_of_rank(tmp_path, 1) == [folder]  # where a start clears up after the dead writer
    remove_stale_temps(folder)
    assert files(tmp_path) == final(0)


def test_a_file_of_an_earlier_attempt_is_kept(tmp_path: Path) -> None:
    for attempt in (0, 1):
        path = settle_tft_file(write(tmp_path, 0, world_size=1, attempt=attempt), world_size=1)
    assert {entry.info.attempt for entry in read_entries(tmp_path) if entry.info} == {0, 1}
    assert files(tmp_path) == sorted([*final(0), str(previous_path(path).relative_to(tmp_path))])


def test_a_scan_finds_both_kinds_of_trees(tmp_path: Path) -> None:
    settle_tft_file(write(tmp_path, 0, world_size=2), world_size=2, gone=lambda: [1])
    late = write(tmp_path, 1, world_size=2)
    ranks = {entry.info.rank: entry.path for entry in read_entries(tmp_path) if entry.info is not None}
    assert set(ranks) == {0, 1} and late.exists()
    assert {root_of(path, rank) for rank, path in ranks.items()} == {tmp_path}
    assert root_of(tmp_path / "rank_1" / "x", 1) == tmp_path and root_of(tmp_path / "x", 0) == tmp_path
