"""The note that a rank has never saved: what it proves after a cut at any moment, and what it never proves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mindx_elastic.persist.first_save import FirstSave, find_notes

RUN = "20260101T000000-0123abcd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FirstSave(tmp_path / "rank_1", RUN).begin(1, 2)
    return tmp_path / "rank_1"


def proved(folder: Path) -> list[tuple[str, int, int]]:
    """What a later start is told."""
    return [(note.run_id, note.rank, note.world_size) for note in find_notes(folder.parent)]


def test_a_note_that_is_gone_proves_nothing(folder: Path) -> None:
    FirstSave(folder, RUN).withdraw()
    assert proved(folder) == [] and list(folder.iterdir()) == []
    FirstSave(folder, RUN).withdraw()  # there is none


def test_a_note_that_cannot_be_taken_away_fails_the_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        FirstSave(folder, RUN).withdraw()


@pytest.mark.parametrize("change", [{"run_id": 3}, {"rank": True}, {"rank": 0}, {"rank": 2}, {"publishing": 7}])
def test_what_is_no_note_proves_nothing(folder: Path, change: dict[str, object]) -> None:
    (path,) = folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert proved(folder) == []


def test_what_others_have_planted_proves_nothing(folder: Path) -> None:
    (path,) = folder.iterdir()
    path.rename(path.with_name("x"))
    path.symlink_to("x")
    assert proved(folder) == []
    path.unlink()
    os.mkfifo(path)
    assert proved(folder) == []


def test_of_runs_that_never_saved_the_last_ones_are_kept(folder: Path) -> None:
    """And those that a start still needs, because a file of the run is there."""
    for number in range(30):
        for note in find_notes(folder.parent):
            if note.run_id == RUN:
                note.touch()
        FirstSave(folder, f"run {number}").begin(1, 2)
    runs = {note.run_id for note in find_notes(folder.parent)}
    assert len(runs) == 8 and {RUN, "run 29"} <= runs


def test_a_run_id_from_a_file_is_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "rank_1"
    assert FirstSave(folder, "../../../etc/passwd").path.parent == folder
