from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindx_elastic.persist import catalog as catalog_module
from mindx_elastic.persist.catalog import Catalog, CatalogEntry, StepSet, looks_ours, read_entry, scan
from mindx_elastic.persist.format import Header, read_header
from mindx_elastic.persist.storage import TEMP_SUFFIX
from tests.checkpoint_files import DAMAGED_HEADERS, flip_bit_in_data, write, write_step


def only_step(catalog: Catalog) -> StepSet:
    (step_set,) = catalog.steps
    return step_set


def only_problem(catalog: Catalog) -> CatalogEntry:
    (entry,) = catalog.problems
    return entry


def names(entries: tuple[CatalogEntry, ...]) -> list[str]:
    return [entry.path.name for entry in entries]


# --- where it looks -------------------------------------------------------------------------------------------


def test_an_empty_and_a_missing_directory_hold_nothing(tmp_path: Path) -> None:
    assert scan(tmp_path).entries == ()
    assert scan(tmp_path / "not there").entries == ()
    assert scan(tmp_path).newest_complete() is None


def test_a_single_process_writes_into_the_directory_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "resnet-2_7.safetensors", step=17)
    step_set = only_step(scan(tmp_path))
    assert (step_set.run_id, step_set.step, step_set.world_size, step_set.complete) == ("run-a", 17, 1, True)
    (entry,) = step_set.entries
    assert (entry.path, entry.problem, entry.foreign, entry.looks_ours) == (path, None, False, True)
    assert entry.size == path.stat().st_size and entry.mtime == path.stat().st_mtime
    assert entry.info is not None and entry.info.epoch == 2


def test_rank_folders_make_one_step(tmp_path: Path) -> None:
    write_step(tmp_path, 17, world_size=3)
    step_set = only_step(scan(tmp_path))
    assert step_set.complete and step_set.missing_ranks == () and step_set.why_incomplete is None
    assert {rank: entry.path.parent.name for rank, entry in step_set.best.items()} == {
        0: "rank_0",
        1: "rank_1",
        2: "rank_2",
    }


def test_tft_folders_are_walked_with_and_without_rank_folders(tmp_path: Path) -> None:
    write_step(tmp_path / "tft_saved_checkpoints-step_17", 17, name="ttp_rank-1_7.safetensors")
    write(tmp_path / "tft_saved_checkpoints-step_5" / "ttp_rank_0-1_5.safetensors", step=5, run_id="alone")
    assert {(s.run_id, s.step, s.complete) for s in scan(tmp_path).steps} == {
        ("run-a", 17, True),
        ("alone", 5, True),
    }


def test_a_rank_folder_and_a_tft_folder_may_be_scanned_themselves(tmp_path: Path) -> None:
    write_step(tmp_path, 17)
    alone = only_step(scan(tmp_path / "rank_1"))
    assert (alone.complete, alone.missing_ranks) == (False, (0,))
    tft = tmp_path / "tft_saved_checkpoints-step_17"
    write_step(tft, 17)
    assert only_step(scan(tft)).complete


def test_quarantine_temporary_files_and_deeper_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "quarantine" / "resnet-1_1.safetensors")
    write(tmp_path / "archive" / "resnet-1_1.safetensors")
    write(tmp_path / "rank_0" / "rank_0" / "resnet-1_1.safetensors")
    write(tmp_path / "rank_0" / "quarantine" / "resnet-1_1.safetensors")
    (tmp_path / f"resnet-1_1.safetensors{TEMP_SUFFIX}").write_bytes(b"half a file")
    assert scan(tmp_path).entries == ()
    assert len(scan(tmp_path / "quarantine").entries) == 1  # when asked for by name


def test_names_do_not_matter(tmp_path: Path) -> None:
    # Swapped folders, a lying name, no suffix at all: the headers decide.
    write(tmp_path / "rank_1" / "resnet-9_9.safetensors", step=17, rank=0, world_size=2)
    write(tmp_path / "rank_0" / "backup of the other one", step=17, rank=1, world_size=2)
    step_set = only_step(scan(tmp_path))
    assert step_set.step == 17 and step_set.complete
    assert [entry.path.parent.name for entry in step_set.entries] == ["rank_1", "rank_0"]


def test_a_symlinked_folder_is_followed(tmp_path: Path) -> None:
    other_disk = tmp_path / "other disk"
    write(other_disk / "resnet-2_7.safetensors", rank=1, world_size=2)
    root = tmp_path / "ckpt"
    write(root / "rank_0" / "resnet-2_7.safetensors", rank=0, world_size=2)
    (root / "rank_1").symlink_to(other_disk, target_is_directory=True)
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert only_step(scan(tmp_path / "link")).complete


def test_only_one_rank(tmp_path: Path) -> None:
    write_step(tmp_path, 17)
    (tmp_path / "rank_1" / "broken.safetensors").write_bytes(b"")
    mine = scan(tmp_path, rank=0)
    assert mine.rank == 0 and mine.problems == ()
    step_set = only_step(mine)
    assert step_set.complete and step_set.world_size == 2 and names(step_set.entries) == ["resnet-1_17.safetensors"]
    assert scan(tmp_path, rank=1).problems
    assert scan(tmp_path, rank=2).steps == ()


def test_an_earlier_catalog_spares_reading_unchanged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, 10)
    earlier = scan(tmp_path)
    write_step(tmp_path, 17)
    (tmp_path / "rank_1" / "resnet-1_10.safetensors").unlink()
    replaced = write(tmp_path / "rank_0" / "resnet-1_10.safetensors", step=11, world_size=2)
    os.utime(replaced, (0, 0))  # a coarse clock may give both the same time
    read = []

    def read_and_note(path: Path, *more: Any) -> Header:
        read.append(path.name)
        return read_header(path, *more)

    monkeypatch.setattr(catalog_module, "read_header", read_and_note)
    later = scan(tmp_path, known=earlier)
    assert sorted(read) == ["resnet-1_10.prev.safetensors", "resnet-1_10.safetensors", *["resnet-1_17.safetensors"] * 2]
    assert [(s.step, s.complete) for s in later.steps] == [(17, True), (11, False), (10, False)]
    read.clear()
    assert scan(tmp_path, known=later) == later and read == []


# --- what is complete -----------------------------------------------------------------------------------------


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_step(tmp_path, 17, world_size=4)
    (tmp_path / "rank_1" / "resnet-1_17.safetensors").unlink()
    (tmp_path / "rank_3" / "resnet-1_17.safetensors").unlink()
    step_set = only_step(scan(tmp_path))
    assert not step_set.complete and step_set.missing_ranks == (1, 3) and step_set.resumable
    assert step_set.why_incomplete == "ranks 1, 3 of 4 missing"


def test_a_long_list_of_missing_ranks_stays_one_line(tmp_path: Path) -> None:
    write(tmp_path / "rank_0" / "a-1_1.safetensors", world_size=1000)
    assert only_step(scan(tmp_path)).why_incomplete == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more of 1000 missing"


def test_a_state_that_cannot_be_resumed_from_does_not_count(tmp_path: Path) -> None:
    write(tmp_path / "rank_0" / "a-1_1.safetensors", rank=0, world_size=2)
    write(tmp_path / "rank_1" / "a-1_1.safetensors", rank=1, world_size=2, resumable=False)
    step_set = only_step(scan(tmp_path))
    assert not step_set.complete and step_set.missing_ranks == (1,)
    assert step_set.why_incomplete == "rank 1 saved a state that cannot be resumed from"
    assert sorted(step_set.best) == [0, 1]


def test_two_world_sizes_in_one_step_are_never_complete(tmp_path: Path) -> None:
    write(tmp_path / "rank_0" / "a-1_1.safetensors", rank=0, world_size=2)
    write(tmp_path / "rank_1" / "a-1_1.safetensors", rank=1, world_size=2)
    write(tmp_path / "rank_2" / "a-1_1.safetensors", rank=2, world_size=3)
    step_set = only_step(scan(tmp_path))
    assert not step_set.complete
    assert step_set.why_incomplete == "files disagree on the world size (2, 3)"


def test_ranks_of_different_steps_do_not_add_up(tmp_path: Path) -> None:
    write(tmp_path / "rank_0" / "a_breakpoint.safetensors", rank=0, world_size=2, step=17)
    write(tmp_path / "rank_1" / "a_breakpoint.safetensors", rank=1, world_size=2, step=18)
    write_step(tmp_path, 10)
    catalog = scan(tmp_path)
    assert [(s.step, s.complete) for s in catalog.steps] == [(18, False), (17, False), (10, True)]
    newest = catalog.newest_complete()
    assert newest is not None and newest.step == 10


# --- order ----------------------------------------------------------------------------------------------------


def test_breakpoints_first_then_request_exit_then_periodic_then_the_newest(tmp_path: Path) -> None:
    write(tmp_path / "e.safetensors", kind="eval", created=9e8)
    write(tmp_path / "old.safetensors", kind="periodic", created=1e8)
    write(tmp_path / "new.safetensors", kind="periodic", created=2e8)
    write(tmp_path / "m.safetensors", kind="manual", created=8e8)
    write(tmp_path / "r.safetensors", kind="request_exit", created=1e8)
    write(tmp_path / "b.safetensors", kind="breakpoint", created=1e8, reason="SIGTERM")
    write(tmp_path / "b2.safetensors", kind="breakpoint", created=9e8, reason="torn", resumable=False)
    step_set = only_step(scan(tmp_path))
    stems = [entry.path.stem for entry in step_set.entries]
    assert stems == ["b", "r", "new", "old", "m", "e", "b2"]  # what cannot be resumed from comes last of all
    assert step_set.reasons == ("SIGTERM",) and step_set.created == 9e8
    assert step_set.info.kind == "breakpoint"
    assert [entry.path.stem for entry in step_set.of_rank(0)] == stems and step_set.of_rank(1) == ()


def test_the_run_that_was_active_last_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "old-high.safetensors", run_id="old", step=900, created=1e8)
    write(tmp_path / "old-low.safetensors", run_id="old", step=800, created=2e8)
    write(tmp_path / "new-1.safetensors", run_id="new", step=1, created=3e8)
    write(tmp_path / "new-2.safetensors", run_id="new", step=2, created=2.5e8)
    catalog = scan(tmp_path)
    order = [(s.run_id, s.step) for s in catalog.steps]
    assert order == [("new", 2), ("new", 1), ("old", 900), ("old", 800)]
    newest_of_old = catalog.newest_complete("old")
    assert newest_of_old is not None and newest_of_old.step == 900
    assert catalog.newest_complete("nobody") is None


def test_attempts_are_branches_and_the_last_one_comes_first(tmp_path: Path) -> None:
    for step in (100, 200):
        write_step(tmp_path, step)
    write_step(tmp_path, 150, attempt=2)
    write(tmp_path / "rank_0" / "a-1_200.safetensors", step=200, world_size=2, attempt=2, created=2e9)
    catalog = scan(tmp_path)
    assert [(s.attempt, s.step, s.complete) for s in catalog.steps] == [
        (2, 200, False),  # rank 1 has a file of step 200, but of another attempt
        (2, 150, True),
        (0, 200, True),
        (0, 100, True),
    ]
    assert catalog.steps[0].missing_ranks == (1,)
    newest = catalog.newest_complete()
    assert newest is not None and newest.moment == ("run-a", 2, 150)


# --- what cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGED_HEADERS)
def test_a_damaged_file_is_a_problem_and_the_others_stand(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write(tmp_path / "resnet-1_1.safetensors", step=1)
    victim = write(tmp_path / "resnet-1_2.safetensors", step=2)
    damage(victim)
    catalog = scan(tmp_path)
    entry = only_problem(catalog)
    assert entry.path == victim and entry.header is None and entry.info is None
    assert entry.problem and not entry.foreign and entry.looks_ours
    assert str(tmp_path) not in entry.problem  # the path is the entry's other field
    assert [s.step for s in catalog.steps] == [1]


def test_flipped_data_is_not_seen_by_a_scan(tmp_path: Path) -> None:
    # A scan reads headers only; the digests are the reader's and `mindx-elastic verify`'s business.
    path = write(tmp_path / "resnet-1_1.safetensors")
    flip_bit_in_data(path)
    assert scan(tmp_path).problems == ()


def test_a_foreign_file(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "bert.safetensors")
    entry = only_problem(scan(tmp_path))
    assert entry.foreign and not entry.looks_ours and entry.problem
    (tmp_path / "rank_0").mkdir()
    os.rename(tmp_path / "bert.safetensors", tmp_path / "rank_0" / "bert.safetensors")
    assert only_problem(scan(tmp_path)).looks_ours


def test_files_of_other_kinds_are_no_business_of_ours(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "save"}\n')
    (tmp_path / "graceful_exit.json").write_text("{}")
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "notes.txt").write_text("")
    (tmp_path / "rank_7").write_text("only called like a folder")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latest").symlink_to(tmp_path / "events.jsonl")
    assert scan(tmp_path).entries == ()


def test_a_symlinked_file_is_never_followed(tmp_path: Path) -> None:
    target = write(tmp_path / "elsewhere" / "resnet-1_1.safetensors")
    (tmp_path / "resnet-1_1.safetensors").symlink_to(target)
    (tmp_path / "resnet-1_2.safetensors").symlink_to(tmp_path / "nowhere")
    catalog = scan(tmp_path)
    assert catalog.steps == () and names(catalog.problems) == ["resnet-1_1.safetensors", "resnet-1_2.safetensors"]
    assert all("symbolic link" in str(entry.problem) and entry.looks_ours for entry in catalog.problems)


def test_things_that_are_not_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder-1_1.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe-1_1.safetensors")  # opening it for reading would block for ever
    monkeypatch.chdir(tmp_path)  # a socket's path is limited to about 100 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket-1_1.safetensors")
    problems = {entry.path.name.split("-")[0]: entry.problem for entry in scan(tmp_path).problems}
    assert problems == {
        "folder": "is a folder, not a file",
        "pipe": "is a pipe, not a file",
        "socket": "is a socket, not a file",
    }


def test_a_folder_that_cannot_be_listed_is_a_problem_that_looks_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 17)
    real = os.listdir

    def refuse(folder: Path) -> list[str]:
        if folder.name == "rank_1":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "listdir", refuse)
    catalog = scan(tmp_path)
    entry = only_problem(catalog)
    assert entry.path == tmp_path / "rank_1" and entry.looks_ours
    assert entry.problem == "folder cannot be listed: Permission denied"
    assert only_step(catalog).missing_ranks == (1,)


def test_a_file_in_place_of_the_directory_is_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "resnet-1_1.safetensors")
    assert only_problem(scan(path)).problem == "folder cannot be listed: Not a directory"


def test_a_link_to_a_disk_that_is_not_mounted_is_not_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "rank_0").symlink_to(tmp_path / "not mounted", target_is_directory=True)
    assert only_problem(scan(tmp_path)).looks_ours


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "resnet-1_1.safetensors")

    def refuse(_path: Path, *_more: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(catalog_module, "read_header", refuse)
    entry = read_entry(path)
    assert entry is not None and entry.problem == "cannot be read: Input/output error"


def test_files_that_vanish_during_the_scan_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "resnet-1_1.safetensors", step=1)
    write(tmp_path / "resnet-1_2.safetensors", step=2)

    def read_after_deletion(path: Path, *more: Any) -> Header:
        if path.name == "resnet-1_1.safetensors":
            path.unlink()
        return read_header(path, *more)

    monkeypatch.setattr(catalog_module, "read_header", read_after_deletion)
    catalog = scan(tmp_path)
    assert [s.step for s in catalog.steps] == [2] and catalog.problems == ()
    assert read_entry(tmp_path / "resnet-1_1.safetensors") is None


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("resnet-1_5.safetensors", True),
        ("resnet-1_5_breakpoint.safetensors", True),
        ("resnet_1-12_345.safetensors", True),
        ("net_train.safetensors", True),
        ("resnet-1_5.prev.safetensors", True),
        ("ttp_rank_3-1_5.safetensors", True),
        ("rank_0/anything.safetensors", True),
        ("bert.safetensors", False),
        ("resnet-1_5.pt", False),
        ("rank_0/notes.txt", False),
        ("rank_x/anything.safetensors", False),
        ("resnet-1_5.safetensors.bak", False),
    ],
)
def test_shape_of_our_names(name: str, ours: bool) -> None:
    assert looks_ours(name) is ours
