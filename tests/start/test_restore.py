"""What a start resumes from: the newest step that every rank can read, or a clear refusal."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindx_elastic.agreement.exchange import Exchange
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import EVENTS_FILE, EventLog, older_generation
from mindx_elastic.core.layout import Layout, parse_placement
from mindx_elastic.errors import (
    CorruptCheckpointError,
    ForeignCheckpointError,
    MismatchError,
    NoUsableCheckpointError,
    PeerStartError,
    UsageError,
)
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.persist.format import open_checkpoint
from mindx_elastic.persist.reader import read_checked
from mindx_elastic.persist.storage import QUARANTINE
from mindx_elastic.start import findings as looking
from mindx_elastic.start import reshard as resharding
from mindx_elastic.start import restore
from mindx_elastic.start import shares as reading
from mindx_elastic.start.loading import _how_to_restore_rng
from mindx_elastic.start.restore import Resumed
from tests import checkpoint_files as files
from tests.checkpoint_files import write, write_step
from tests.start.arenas import Machine
from tests.start.finding import find, find_and_read, find_on, found_on, step_of
from tests.start.shared_store import on_all_ranks
from tests.start.strategies import rows
from tests.start.worlds import Saved, target_of


def steps_on(world_size: int, directory: Path, resume: Any = "auto") -> set[int]:
    """The step that all ranks took; raises the first rank's error."""
    found = found_on(world_size, directory, resume=resume)
    assert [one.checkpoint.info.rank for one in found] == list(range(world_size))
    return {step_of(one) for one in found}


# --- one rank ---


def test_a_damaged_newest_file_is_quarantined_and_the_older_step_used(tmp_path: Path) -> None:
    write(tmp_path / "a-1_5.safetensors", step=5)
    bad = write(tmp_path / "a-1_9.safetensors", step=9)
    files.overwrite_header(bad)
    content = bad.read_bytes()
    found = find(tmp_path)
    assert step_of(found) == 5
    assert found is not None and any("a-1_9" in line for line in found.rejected)
    assert not bad.exists()
    moved = [p for p in (tmp_path / QUARANTINE).rglob("*") if p.suffix != ".txt" and p.is_file()]
    assert [p.read_bytes() for p in moved] == [content], "nothing on disk is lost"


def test_a_damaged_snapshot_in_memory_is_named_and_gone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.know("run-a")
    machine.snapshot(3)
    machine.snapshot(5)
    slot = machine.slots(0)[1]
    files.flip_bit_in_data(slot)
    found = find_and_read([machine.directory], RankInfo(), Exchange(), arenas=machine.job)
    assert found is not None and step_of(found) == 3 and not slot.exists() and len(machine.slots(0)) == 1
    assert any(f"{slot} is damaged" in line for line in found.rejected), found.rejected
    assert [path.name for path in machine.job.iterdir()] == ["rank_0"], "no quarantine there"


@pytest.mark.parametrize("damage", files.DAMAGES)
def test_nothing_usable_is_an_error_again_and_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(write(tmp_path / "a-1_9.safetensors", step=9))
    names = sorted(tmp_path.rglob("*"))
    assert find(tmp_path, resume="never") is None and sorted(tmp_path.rglob("*")) == names, "nothing is moved"
    for _ in range(3):
        with pytest.raises(NoUsableCheckpointError, match='pass resume="never"') as caught:
            find(tmp_path)
        assert caught.value.path == tmp_path
    assert find(tmp_path, resume="never") is None


# --- resume=path ---


def test_a_path_to_a_file_takes_that_step(tmp_path: Path) -> None:
    for step in (3, 5, 9):
        write_step(tmp_path, step, name=f"a-1_{step}.safetensors")
    for rank in range(2):  # any rank's
        assert steps_on(2, tmp_path / "new", tmp_path / f"rank_{rank}" / "a-1_5.safetensors") == {5}
    assert steps_on(2, tmp_path, str(tmp_path / "rank_0" / "a-1_3.safetensors")) == {3}


def test_a_damaged_file_that_was_asked_for_is_an_error_not_another_step(tmp_path: Path) -> None:
    write(tmp_path / "a-1_5.safetensors", step=5)
    bad = write(tmp_path / "a-1_9.safetensors", step=9)
    files.flip_bit_in_data(bad)
    with pytest.raises(
        NoUsableCheckpointError, match=r"run run-a step 9 cannot be resumed: .*model\.bias.*; give"
    ) as caught:
        find(tmp_path, resume=bad)
    assert str(bad) in str(caught.value)


def test_files_that_are_none_of_ours_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a-1_5.safetensors")
    files.leave_empty(path)
    remedy = "give another checkpoint, or a directory"
    with pytest.raises(CorruptCheckpointError, match=remedy) as corrupt:
        find(tmp_path, resume=path)
    assert str(corrupt.value).count(str(path)) == 1 and corrupt.value.path == path
    files.replace_by_foreign_file(path)
    with pytest.raises(ForeignCheckpointError, match=remedy):
        find(tmp_path, resume=path)
    assert path.exists(), "what was asked for by name is not moved"


@pytest.mark.parametrize("resume", ["atuo", "", None, True])
def test_anything_else_is_refused(tmp_path: Path, resume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a-1_5.safetensors")
    with pytest.raises(UsageError, match="resume="):
        find(tmp_path, resume=resume)


# --- several ranks ---


def test_another_world_size_is_said_with_the_way_out(tmp_path: Path) -> None:
    write_step(tmp_path, 9, world_size=4)
    with pytest.raises(MismatchError, match=r"written by 4 ranks.* over the 2 of this job: .*start it with 4 ranks"):
        steps_on(2, tmp_path)


kept = st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=5, unique_by=lambda pair: pair[0])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(kept, min_size=2, max_size=3))
def test_whatever_was_lost_all_ranks_take_one_step(
    tmp_path_factory: pytest.TempPathFactory, held: list[list[tuple[int, bool]]]
) -> None:
    """Any files on any rank, any of them damaged: the newest step that all hold undamaged, or an error on all."""
    directory = tmp_path_factory.mktemp("ranks")
    for rank, steps in enumerate(held):
        for step, sound in steps:
            path = directory / f"rank_{rank}" / f"a-1_{step}.safetensors"
            write(path, step=step, rank=rank, world_size=len(held))
            if not sound:
                files.flip_bit_in_data(path)
    usable = set.intersection(*({step for step, sound in steps if sound} for steps in held))
    results = find_on(len(held), directory)
    if usable:
        assert [r.checkpoint.info.step for r in results if isinstance(r, Resumed)] == [max(usable)] * len(held)
    elif any(held):
        assert all(isinstance(r, NoUsableCheckpointError) for r in results), results
    else:
        assert results == [None] * len(held)


# --- files and no complete step: over again if it is proved that none ever was, else refused ---


def begin(directory: Path, run: str = "run-a", *, ranks: Iterable[int] = (0, 1)) -> None:
    """A fresh start."""
    directory.mkdir(exist_ok=True)
    for rank in ranks:
        EventLog(directory / EVENTS_FILE, run_id=run, rank=rank).emit("start", outcome="fresh")


def save(directory: Path, rank: int, step: int = 4, *, world_size: int = 2, **more: Any) -> Path:
    path = directory / f"rank_{rank}" / f"resnet-1_{step}.safetensors"
    write(path, step=step, rank=rank, world_size=world_size, **more)
    log = EventLog(directory / EVENTS_FILE, run_id=more.get("run_id", "run-a"), rank=rank)
    log.emit("save", step=step, outcome="saved")
    return path


def test_a_first_save_of_one_rank_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path)
    kept = save(tmp_path, 0)
    assert find_on(2, tmp_path) == [None, None]
    lines = [record.message for record in caplog.records if "starts over" in record.message]
    assert len(lines) == 1 and "step 4" in lines[0] and "rank 1" in lines[0], "once, by rank 0"
    assert kept.exists()


LOST: dict[str, type[Exception]] = dict.fromkeys(
    ["file", "log", "older log", "half a line", "start", "resumed", "by name"], NoUsableCheckpointError
)


@pytest.mark.parametrize(("lost", "error"), [*LOST.items(), ("world", MismatchError)])
def test_where_a_whole_step_may_have_been_there_is_no_new_start(
    tmp_path: Path, lost: str, error: type[Exception]
) -> None:
    """A file was deleted; the log does not have it all; a step cannot be spread, or was asked for by name."""
    begin(tmp_path, ranks=[0] if lost == "start" else [0, 1])
    save(tmp_path, 0)
    log = tmp_path / EVENTS_FILE
    if lost in ("file", "world"):
        other = save(tmp_path, 1)
        if lost == "file":
            other.unlink()
    elif lost == "log":
        log.unlink()
    elif lost == "older log":
        older_generation(log).touch()
    elif lost == "half a line":  # on a full disk: perhaps what follows was of a save of rank 1
        with open(log, "a") as file:
            file.write('{"time": 1796034320.157378, "run_id": "run')
    elif lost == "resumed":
        EventLog(log, run_id="run-a").emit("resume", step=3, outcome="resumed")
    found = find_on(3 if lost == "world" else 2, tmp_path, resume=str(tmp_path) if lost == "by name" else "auto")
    assert all(isinstance(one, error) for one in found), found


def test_on_disks_that_are_not_shared(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for rank, node in enumerate(nodes):
        begin(node, ranks=[rank])
    save(nodes[0], 0)
    assert all(isinstance(one, NoUsableCheckpointError) for one in find_on(2, *nodes))


# --- all ranks together: they share the work, and no rank waits for one that cannot continue ---


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
    assert "rank 2 has no usable file of step 7 and takes rank 1's" in caplog.text


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
