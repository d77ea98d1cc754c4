from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindx_elastic.persist import catalog as catalog_module
from mindx_elastic.persist.catalog import CatalogEntry, looks_ours, preference, read_entries, read_entry
from mindx_elastic.persist.format import Header, read_header
from mindx_elastic.persist.storage import TEMP_SUFFIX
from tests.checkpoint_files import cut_off_end, write, write_step


def only_problem(directory: Path) -> CatalogEntry:
    (entry,) = [entry for entry in read_entries(directory) if entry.problem is not None]
    return entry


def found_in(directory: Path) -> list[tuple[str, int, int]]:
    """Folder, rank and step of each good file."""
    infos = [(entry.path.parent.name, entry.info) for entry in read_entries(directory)]
    return [(folder, info.rank, info.step) for folder, info in infos if info is not None]


# --- where it looks -------------------------------------------------------------------------------------------


def test_tft_folders_are_walked_with_and_without_rank_folders(tmp_path: Path) -> None:
    write_step(tmp_path / "tft_saved_checkpoints-step_17", 17, name="ttp_rank-1_7.safetensors")
    write(tmp_path / "tft_saved_checkpoints-step_5" / "ttp_rank_0-1_5.safetensors", step=5, run_id="alone")
    assert sorted(found_in(tmp_path)) == [
        ("rank_0", 0, 17),
        ("rank_1", 1, 17),
        ("tft_saved_checkpoints-step_5", 0, 5),
    ]


def test_quarantine_temporary_files_and_deeper_folders_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "quarantine" / "resnet-1_1.safetensors")
    write(tmp_path / "archive" / "resnet-1_1.safetensors")
    write(tmp_path / "rank_0" / "rank_0" / "resnet-1_1.safetensors")
    write(tmp_path / "rank_0" / "quarantine" / "resnet-1_1.safetensors")
    (tmp_path / f"resnet-1_1.safetensors{TEMP_SUFFIX}").write_bytes(b"half a file")
    assert read_entries(tmp_path) == read_entries(tmp_path / "not there") == ()
    assert len(read_entries(tmp_path / "quarantine")) == 1  # when asked for by name


def test_names_do_not_matter(tmp_path: Path) -> None:
    # Swapped folders, a lying name, no suffix at all: the headers decide.
    write(tmp_path / "rank_1" / "resnet-9_9.safetensors", step=17, rank=0, world_size=2)
    write(tmp_path / "rank_0" / "backup of the other one", step=17, rank=1, world_size=2)
    assert found_in(tmp_path) == [("rank_0", 1, 17), ("rank_1", 0, 17)]


def test_an_earlier_look_spares_reading_unchanged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, 10)
    earlier = read_entries(tmp_path)
    write_step(tmp_path, 17)
    (tmp_path / "rank_1" / "resnet-1_10.safetensors").unlink()
    replaced = write(tmp_path / "rank_0" / "resnet-1_10.safetensors", step=11, world_size=2)
    os.utime(replaced, (0, 0))  # a coarse clock may give both the same time
    read = []

    def read_and_note(path: Path, *more: Any) -> Header:
        read.append(path.name)
        return read_header(path, *more)

    monkeypatch.setattr(catalog_module, "read_header", read_and_note)
    later = read_entries(tmp_path, known=earlier)
    assert sorted(read) == ["resnet-1_10.prev.safetensors", "resnet-1_10.safetensors", *["resnet-1_17.safetensors"] * 2]
    assert sorted(entry.info.step for entry in later if entry.info is not None) == [10, 11, 17, 17]
    read.clear()
    assert read_entries(tmp_path, known=later) == later and read == []


# --- order ----------------------------------------------------------------------------------------------------


def test_breakpoints_first_then_request_exit_then_periodic_then_the_newest(tmp_path: Path) -> None:
    write(tmp_path / "e.safetensors", kind="eval", created=9e8)
    write(tmp_path / "old.safetensors", kind="periodic", created=1e8)
    write(tmp_path / "new.safetensors", kind="periodic", created=2e8)
    write(tmp_path / "m.safetensors", kind="manual", created=8e8)
    write(tmp_path / "r.safetensors", kind="request_exit", created=1e8)
    write(tmp_path / "b.safetensors", kind="breakpoint", created=1e8, reason="SIGTERM")
    write(tmp_path / "b2.safetensors", kind="breakpoint", created=9e8, reason="torn", resumable=False)
    stems = [entry.path.stem for entry in sorted(read_entries(tmp_path), key=preference)]
    assert stems == ["b", "r", "new", "old", "m", "e", "b2"]  # what cannot be resumed from comes last of all


# --- what cannot be used --------------------------------------------------------------------------------------


def test_a_damaged_file_is_a_problem_and_the_others_stand(tmp_path: Path) -> None:
    write(tmp_path / "resnet-1_1.safetensors", step=1)
    victim = write(tmp_path / "resnet-1_2.safetensors", step=2)
    cut_off_end(victim)
    entry = only_problem(tmp_path)
    assert entry.path == victim and entry.header is None and entry.info is None
    assert entry.problem and not entry.foreign and entry.looks_ours
    assert str(tmp_path) not in entry.problem  # the path is the entry's other field
    assert found_in(tmp_path) == [(tmp_path.name, 0, 1)]


def test_a_foreign_file(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "bert.safetensors")
    entry = only_problem(tmp_path)
    assert entry.foreign and not entry.looks_ours and entry.problem
    (tmp_path / "rank_0").mkdir()
    os.rename(tmp_path / "bert.safetensors", tmp_path / "rank_0" / "bert.safetensors")
    assert only_problem(tmp_path).looks_ours


def test_files_of_other_kinds_are_no_business_of_ours(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "save"}\n')
    (tmp_path / "graceful_exit.json").write_text("{}")
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "notes.txt").write_text("")
    (tmp_path / "rank_7").write_text("only called like a folder")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latest").symlink_to(tmp_path / "events.jsonl")
    assert read_entries(tmp_path) == ()


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
    entry = only_problem(tmp_path)
    assert entry.path == tmp_path / "rank_1" and entry.looks_ours
    assert entry.problem == "folder cannot be listed: Permission denied"
    assert found_in(tmp_path) == [("rank_0", 0, 17)]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rank_0").symlink_to(tmp_path / "not mounted", target_is_directory=True)
    assert only_problem(tmp_path / "other").looks_ours


def test_files_that_vanish_during_the_scan_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "resnet-1_1.safetensors", step=1)
    write(tmp_path / "resnet-1_2.safetensors", step=2)

    def read_after_deletion(path: Path, *more: Any) -> Header:
        if path.name == "resnet-1_1.safetensors":
            path.unlink()
        return read_header(path, *more)

    monkeypatch.setattr(catalog_module, "read_header", read_after_deletion)
    assert [(entry.problem, entry.info and entry.info.step) for entry in read_entries(tmp_path)] == [(None, 2)]
    assert read_entry(tmp_path / "resnet-1_1.safetensors") is None


@pytest.mark.parametrize(
    "name",
    ["resnet-1_5", "net_train", "resnet-1_5.prev", "resnet-1_5_breakpoint.cover", "ttp_rank_3-1_5", "rank_0/anything"],
)
def test_shape_of_our_names(name: str) -> None:
    assert looks_ours(f"{name}.safetensors") and not looks_ours(f"{name}.pt") and not looks_ours("bert.safetensors")
