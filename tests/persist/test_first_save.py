"""The note that a rank has never saved: what it proves after a cut at any moment, and what it never proves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mindx_elastic.persist import first_save as module
from mindx_elastic.persist.first_save import FirstSave, find_notes, settle
from mindx_elastic.persist.storage import TEMP_SUFFIX, create_temp, remove_stale_temps

RUN = "20260101T000000-0123abcd"


class Cut(Exception):
    """The power fails here."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FirstSave(tmp_path / "rank_1", RUN).begin(1, 2)
    return tmp_path / "rank_1"


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def proved(folder: Path) -> list[tuple[str, int, int]]:
    """What a later start is told: after the rank's own preparations, and before them (another rank's look)."""
    before = [(note.run_id, note.rank, note.world_size) for note in find_notes(folder.parent)]
    settle(folder)
    remove_stale_temps(folder)
    assert not list(folder.glob(f"*{TEMP_SUFFIX}"))
    after = [(note.run_id, note.rank, note.world_size) for note in find_notes(folder.parent)]
    assert before == after
    return after


def save(folder: Path, note: FirstSave, *, until: str = "") -> Path:
    """As `persist.writer` does it; `until`: the stage at which the power fails."""
    fd, temp = create_temp(folder / "one.safetensors")
    os.write(fd, b"content")
    os.close(fd)
    if until == "written":
        raise Cut
    note.before_publish(temp)
    if until == "noted":
        raise Cut
    os.rename(temp, folder / "one.safetensors")
    if until == "named":
        raise Cut
    note.after_publish()
    return folder / "one.safetensors"


def test_a_rank_that_has_not_saved_can_prove_it(folder: Path) -> None:
    assert proved(folder) == [(RUN, 1, 2)]


@pytest.mark.parametrize("stage", ["written", "noted"])
def test_cut_off_before_the_file_had_its_name(folder: Path, stage: str) -> None:
    for _ in range(3):  # and again in the next start of another run
        with pytest.raises(Cut):
            save(folder, FirstSave(folder, RUN), until=stage)
        assert proved(folder) == [(RUN, 1, 2)]
    note = FirstSave(folder, RUN)
    save(folder, note)
    assert proved(folder) == []


def test_cut_off_when_the_file_had_its_name(folder: Path) -> None:
    with pytest.raises(Cut):
        save(folder, FirstSave(folder, RUN), until="named")
    (folder / "one.safetensors").unlink()
    assert proved(folder) == []


def test_a_file_that_is_lost_later_proves_nothing(folder: Path) -> None:
    save(folder, FirstSave(folder, RUN)).unlink()
    assert proved(folder) == []
    assert list(folder.iterdir()) == []


def test_the_order_is_durable_step_by_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file's name before the note that names it; the note before the rename."""
    calls: list[str] = []

    def fsync_dir(path: Path) -> None:
        notes = [json.loads(each.read_text()) for each in path.glob("first-save-*.json")]
        calls.append("named" if any("publishing" in note for note in notes) else "plain")

    monkeypatch.setattr(module, "fsync_dir", fsync_dir)
    with pytest.raises(Cut):
        save(folder, FirstSave(folder, RUN), until="noted")
    assert calls == ["plain", "named"]


def test_two_saves_at_once_prove_nothing(folder: Path) -> None:
    """No note names both files; and the first one may be there already."""
    note = FirstSave(folder, RUN)
    temps = []
    for name in ("one", "two"):
        fd, temp = create_temp(folder / f"{name}.safetensors")
        os.close(fd)
        note.before_publish(temp)
        temps.append(temp)
    os.rename(temps[0], folder / "one.safetensors")
    assert list(find_notes(folder.parent)) == []


def test_a_full_disk_costs_the_proof_and_not_the_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    note = FirstSave(folder, RUN)
    monkeypatch.setattr(module.FirstSave, "_write", full)
    assert save(folder, note).exists()
    assert proved(folder) == []


def test_a_note_that_cannot_be_taken_away_fails_the_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "no")

    note = FirstSave(folder, RUN)
    monkeypatch.setattr(module.FirstSave, "_write", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        save(folder, note)
    monkeypatch.undo()
    assert not (folder / "one.safetensors").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b'{"run_id": 3, "rank": 1, "world_size": 2}'),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "rank": True})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "rank": 0})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "rank": 2})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "publishing": 7})),
        lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
        replace_by_pipe,
    ],
)
def test_what_is_no_note_proves_nothing(folder: Path, damage: object) -> None:
    (path,) = folder.iterdir()
    damage(path)  # type: ignore[operator]
    assert list(find_notes(folder.parent)) == []
    settle(folder)
    assert list(find_notes(folder.parent)) == []


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
