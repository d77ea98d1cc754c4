"""A start that finds files but no complete step: it starts over if it is proved that none ever was, else refuses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.core.events import EVENTS_FILE, EventLog, older_generation
from mindx_elastic.errors import MismatchError, NoUsableCheckpointError
from tests.checkpoint_files import write
from tests.start.finding import find_on, found_on


def begin(directory: Path, run: str = "run-a", *, ranks: Iterable[int] = (0, 1)) -> None:
    """A fresh start."""
    directory.mkdir(exist_ok=True)
    for rank in ranks:
        EventLog(directory / EVENTS_FILE, run_id=run, rank=rank).emit("start", outcome="fresh")


def saved(directory: Path, rank: int, step: int = 4, *, world_size: int = 2, **more: Any) -> Path:
    path = directory / f"rank_{rank}" / f"resnet-1_{step}.safetensors"
    write(path, step=step, rank=rank, world_size=world_size, **more)
    log = EventLog(directory / EVENTS_FILE, run_id=more.get("run_id", "run-a"), rank=rank)
    log.emit("save", step=step, outcome="saved")
    return path


def test_a_first_save_of_one_rank_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path)
    kept = saved(tmp_path, 0)
    assert find_on(2, tmp_path) == [None, None]
    lines = [record.message for record in caplog.records if "starts over" in record.message]
    assert len(lines) == 1 and "step 4" in lines[0] and "rank 1" in lines[0], "once, by rank 0"
    assert kept.exists()


def test_a_whole_step_of_which_a_file_was_deleted_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    saved(tmp_path, 0)
    saved(tmp_path, 1).unlink()
    assert all(isinstance(one, NoUsableCheckpointError) for one in find_on(2, tmp_path))


def test_a_whole_step_that_cannot_be_spread_over_the_new_ranks_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    for rank in range(2):
        saved(tmp_path, rank)
    assert all(isinstance(one, MismatchError) for one in find_on(3, tmp_path))


@pytest.mark.parametrize("lost", ["all", "older", "resumed", "start", "on a full disk"])
def test_a_log_that_does_not_have_it_all_proves_nothing(tmp_path: Path, lost: str) -> None:
    begin(tmp_path, ranks=[0] if lost == "start" else [0, 1])
    saved(tmp_path, 0)
    if lost == "all":
        (tmp_path / EVENTS_FILE).unlink()
    if lost == "older":
        older_generation(tmp_path / EVENTS_FILE).touch()
    if lost == "on a full disk":  # perhaps what follows was of a save of rank 1
        with open(tmp_path / EVENTS_FILE, "a") as log:
            log.write('{"time": 1796034320.157378, "run_id": "run')
    if lost == "resumed":
        EventLog(tmp_path / EVENTS_FILE, run_id="run-a").emit("resume", step=3, outcome="resumed")
    assert all(isinstance(one, NoUsableCheckpointError) for one in find_on(2, tmp_path))


def test_a_whole_older_run_goes_on(tmp_path: Path) -> None:
    for rank in range(2):
        saved(tmp_path, rank, 3)
    begin(tmp_path, "run-b")
    saved(tmp_path, 0, 5, run_id="run-b")
    assert all(one.plan.moment == ("run-a", 0, 3) for one in found_on(2, tmp_path))


def test_on_disks_that_are_not_shared(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank, node in enumerate(nodes):
        begin(node, ranks=[rank])
    saved(nodes[0], 0)
    assert all(isinstance(one, NoUsableCheckpointError) for one in find_on(2, *nodes))


def test_a_directory_that_was_asked_for_by_name_is_refused(tmp_path: Path) -> None:
    begin(tmp_path)
    saved(tmp_path, 0)
    assert all(isinstance(one, NoUsableCheckpointError) for one in find_on(2, tmp_path, resume=str(tmp_path)))
