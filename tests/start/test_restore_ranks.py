"""All ranks of a start together: they share the work, and no rank waits for one that cannot continue."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.errors import PeerStartError
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.format import open_checkpoint
from mindx_elastic.persist.reader import read_checked
from mindx_elastic.start import findings as looking
from mindx_elastic.start import reader as reading
from mindx_elastic.start import reshard as resharding
from mindx_elastic.start import restore
from mindx_elastic.start.loading import _how_to_restore_rng
from mindx_elastic.start.restore import Resumed
from tests.checkpoint_files import write_step
from tests.start.finding import find_and_read, find_on, found_on
from tests.start.shared_store import on_all_ranks
from tests.start.strategies import rows
from tests.start.worlds import Saved, target_of


def start(root: Path, world_size: int) -> list[Resumed | Exception | None]:
    wanted = {"w": ((12, 3), rows(world_size))}
    return find_on(world_size, root, target=lambda rank: target_of(world_size, wanted, rank=rank))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Saved(4, {"w": (torch.arange(36.0).reshape(12, 3), rows(4))}).write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("where", ["assemble", "read_checked"])
def test_an_error_that_nobody_foresaw_ends_the_start_of_all(
    saved: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module = reading if where == "assemble" else resharding
    real = getattr(module, where)

    def without_memory(*arguments: Any) -> Any:
        if where == "assemble":
            fails = arguments[0].reader == 1
        else:
            fails = arguments[3].parent.name == "rank_1"
        if fails:
            raise MemoryError("no room for w")
        return real(*arguments)

    monkeypatch.setattr(module, where, without_memory)
    found = start(saved, 2)
    failed, other = sorted(found, key=lambda one: isinstance(one, PeerStartError))
    assert isinstance(failed, MemoryError) and isinstance(other, PeerStartError)
    assert other.cause == "MemoryError: no room for w" and found[other.rank] is failed


def test_a_file_that_cannot_be_opened_for_a_moment_is_not_called_damaged(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = open_checkpoint
    failed: list[Path] = []

    def stale(path: Any, owners: Any) -> Any:
        if "rank_3" in str(path) and not failed:
            failed.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, owners)

    monkeypatch.setattr(resharding, "open_checkpoint", stale)
    start(saved, 2)
    assert failed and not (saved / "quarantine").exists()
    assert len(list(saved.glob("rank_*/*.safetensors"))) == 4


# --- disks that are not shared ---


def test_random_numbers_of_a_rank_with_a_donor_are_its_own_and_always_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_step(tmp_path, 7, world_size=3, coordinates={"replicas": 3})
    for rank in (0, 2):
        (tmp_path / f"rank_{rank}" / "resnet-1_7.safetensors").unlink()
    found = found_on(3, tmp_path)
    found[0].checkpoint.state["rng"] = found[2].checkpoint.state["rng"] = None  # the donor's are not looked at
    drawn = []
    for rank in (0, 2, 0):
        _how_to_restore_rng(found[rank], None, RankInfo(rank=rank, world_size=3), Unmanaged("error"))()  # type: ignore[arg-type]
        drawn.append((torch.rand(4).tolist(), random.random(), float(np.random.rand())))
    assert drawn[0] == drawn[2] != drawn[1]
    assert "rank 2 has no file of step 7 and takes rank 1's" in caplog.text


def test_copies_of_one_path_on_two_disks_are_both_verified(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with copies of all files under the same paths: each assembles from its own disk."""
    real_list = looking.list_files
    checked: list[tuple[str, str]] = []
    node = threading.local()

    def list_files(directories: Any, arenas: Any = None) -> Any:
        found = real_list(directories, arenas)
        return found._replace(disk=f"{found.disk} of {node.name}")

    def read(fd: int, header: Any, entry: Any, path: Path, wanted: Any) -> None:
        if entry.name == "model.w":
            checked.append((node.name, path.parent.name))
        read_checked(fd, header, entry, path, wanted)

    monkeypatch.setattr(restore, "list_files", list_files)
    monkeypatch.setattr(resharding, "read_checked", read)
    columns = Layout((2,), (parse_placement("S(1)"),))

    def on_its_node(rank: int, exchange: Any) -> Resumed | None:
        node.name = "AB"[rank]
        target = target_of(2, {"w": ((12, 3), columns)}, rank=rank)
        return find_and_read([saved], RankInfo(rank=rank, world_size=2), exchange, target=target)

    found = on_all_ranks(2, on_its_node)
    assert all(isinstance(each, Resumed) for each in found), found
    assert sorted(checked) == [(name, f"rank_{rank}") for name in "AB" for rank in range(4)]
