"""Directories, temporary files, the atomic commit, quarantine."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mindx_elastic.errors import SaveError, UsageError
from mindx_elastic.persist.storage import (
    TEMP_SUFFIX,
    create_temp,
    prepare_owned_directory,
    quarantine,
    quarantined,
    remove_stale_temps,
)
from tests.harness import no_descriptor_left


# ------------------------------------------------------------------------------------------------ directories
def test_link_to_a_directory_is_resolved_once(tmp_path: Path) -> None:
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk2").mkdir()
    link = tmp_path / "ckpt"
    link.symlink_to("disk1")
    directory = prepare_owned_directory(link)[0]
    link.unlink()
    link.symlink_to("disk2")
    assert directory == tmp_path.resolve() / "disk1"


@pytest.mark.parametrize("name", ["file", "file/below", "link"])
def test_file_in_the_place_of_the_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UsageError, match="give a directory"):
        prepare_owned_directory(tmp_path / name)


def test_own_directory_that_the_group_may_write_to_is_accepted(tmp_path: Path) -> None:
    """As on Kubernetes volumes with fsGroup."""
    tmp_path.chmod(0o2775)
    assert prepare_owned_directory(tmp_path)[0] == tmp_path.resolve()


def test_unwritable_directory_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SaveError, match="cannot write there: Permission denied; check its permissions"):
        prepare_owned_directory(tmp_path)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SaveError, match="cannot create the directory: Permission denied"):
        prepare_owned_directory(tmp_path / "new")


# ------------------------------------------------------------------------------------------------ temporary files
def test_temporary_file_of_a_living_writer_stays(tmp_path: Path) -> None:
    fd, temp = create_temp(tmp_path / "x.safetensors")
    assert temp.name.endswith(TEMP_SUFFIX)
    assert remove_stale_temps(tmp_path) == []
    os.close(fd)
    assert remove_stale_temps(tmp_path) == [temp]
    assert list(tmp_path.iterdir()) == []


def test_only_our_regular_temporary_files_are_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("")
    (tmp_path / f"link{TEMP_SUFFIX}").symlink_to(precious)
    (tmp_path / f"folder{TEMP_SUFFIX}").mkdir()
    assert remove_stale_temps(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_cleaner_between_creation_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock
    removed: list[Path] = []

    def clean_first(fd: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", clean_first)
    with no_descriptor_left():
        fd, temp = create_temp(tmp_path / "x")
        os.close(fd)
    assert temp.exists() and temp != removed[0]


# ------------------------------------------------------------------------------------------------ quarantine
def test_quarantine_never_overwrites_and_lists_what_is_there(tmp_path: Path) -> None:
    assert quarantined(tmp_path) == quarantined(tmp_path / "not there") == []
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "quarantine" / "rank_0").mkdir(parents=True)
    (tmp_path / "quarantine" / "rank_0" / "x.1").write_text("without a note")
    bad = tmp_path / "rank_0" / "x"
    places = []
    for content in "ab":
        bad.write_text(content)
        places.append(quarantine(bad, content, tmp_path))
    assert [place.name for place in places] == ["x", "x.2"]
    assert [place.read_text() for place in places] == ["a", "b"]
    assert (places[0].with_name("x.1")).read_text() == "without a note"
    assert not (places[0].with_name("x.1.reason.txt")).exists()
    bad.symlink_to(tmp_path)
    places.append(quarantine(bad, "on another disk", tmp_path / "rank_0"))
    assert sorted(quarantined(tmp_path)) == sorted([*places, places[0].with_name("x.1")])


def test_quarantine_by_several_ranks_at_once(tmp_path: Path) -> None:
    bad = tmp_path / "x"
    bad.write_text("bad")

    def move(_: int) -> bool:
        try:
            quarantine(bad, "bad", tmp_path)
        except FileNotFoundError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(move, range(8))) == 1
    file, note = sorted(path.name for path in (tmp_path / "quarantine").iterdir())  # under any number, but once
    assert note == f"{file}.reason.txt"


def test_quarantine_beside_the_file_when_the_root_is_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def across_disks(source: Path, target: Path) -> None:
        if target.is_relative_to(tmp_path / "quarantine"):
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", across_disks)
    bad = tmp_path / "rank_0" / "x"
    bad.parent.mkdir()
    bad.write_text("bad")
    assert quarantine(bad, "bad", tmp_path) == tmp_path / "rank_0" / "quarantine" / "x"
