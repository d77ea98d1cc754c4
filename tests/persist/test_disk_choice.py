"""The way of saves to the disk, by measurement: what is noted, who reads it, and that a save is never held up by it."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn

import mindx_elastic as mx
from mindx_elastic.guard import saver
from mindx_elastic.persist import direct_io, disk_choice
from mindx_elastic.persist.direct_io import BlockWriter
from mindx_elastic.persist.disk_choice import DiskChoice, DiskChooser, measure

WAIT_S = 120.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_choice, "_TEST_BYTES", 8 << 20)


def choice_of(**changes: object) -> DiskChoice:
    return replace(DiskChoice(direct_s=2.0, cached_s=1.0, created=time.time()), **changes)  # type: ignore[arg-type]


def note(directory: Path, choice: DiskChoice) -> Path:
    path = directory / "disk-choice.json"
    path.write_text(json.dumps(asdict(choice)))
    return path


def test_both_ways_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure(tmp_path, threading.Event())
    assert found is not None and found.direct_s > 0 and found.cached_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_save_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    put = BlockWriter.put

    def slow(writer: BlockWriter, data: torch.Tensor) -> str:
        began.set()
        assert go_on.wait(WAIT_S)
        return put(writer, data)

    monkeypatch.setattr(BlockWriter, "put", slow)
    chooser = DiskChooser(tmp_path, measures=True)
    chooser.start()
    assert began.wait(WAIT_S)
    assert not chooser.is_cached(tmp_path)  # at once, though the measurement stands still
    go_on.set()
    chooser.close(WAIT_S)
    assert list(tmp_path.iterdir()) == []


def test_no_room_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_choice, "free_space", lambda path: 100 << 20)
    assert measure(tmp_path, threading.Event()) is None


def test_the_outcome_is_noted_for_the_other_ranks_and_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_choice, "measure", lambda directory, stopped: choice_of())
    note(tmp_path, choice_of(created=0.0))
    chooser = DiskChooser(tmp_path, measures=True)
    chooser.start()
    assert chooser._thread is not None
    chooser._thread.join(WAIT_S)
    assert chooser.is_cached(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["disk-choice.json"]
    monkeypatch.setattr(disk_choice, "measure", pytest.fail)
    for measures in (False, True):
        other = DiskChooser(tmp_path, measures=measures)
        other.start()
        assert other.is_cached(tmp_path) and other._thread is None


@pytest.mark.parametrize(
    "changes",
    [
        {"cached_s": 1.9},  # not clearly
        {"direct_s": "fast"},
        {"created": "today"},
    ],
)
def test_what_says_nothing_of_this_disk_now_is_not_followed(tmp_path: Path, changes: dict[str, object]) -> None:
    note(tmp_path, choice_of(**changes))
    chooser = DiskChooser(tmp_path, measures=False)
    chooser.start()
    assert not chooser.is_cached(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"created": 1}', "{", "\x00"])
def test_a_damaged_note_is_not_followed(tmp_path: Path, text: str) -> None:
    note(tmp_path, choice_of()).write_text(text)
    assert not DiskChooser(tmp_path, measures=False).is_cached(tmp_path)


def test_a_pipe_in_its_place_holds_up_no_save(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "disk-choice.json")
    assert not DiskChooser(tmp_path, measures=False).is_cached(tmp_path)


def test_a_folder_on_another_disk_goes_the_usual_way(tmp_path: Path) -> None:
    note(tmp_path, choice_of())
    chooser = DiskChooser(tmp_path, measures=False)
    assert chooser.is_cached(tmp_path) and not chooser.is_cached(Path("/proc")) and not chooser.is_cached(Path("/none"))


# --- through the page cache ---


def write(path: Path, data: torch.Tensor) -> str:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        with closing(BlockWriter(fd, 0, cached=True)) as writer:
            assert not writer.direct
            digest = writer.put(data)
            writer.finish()
        return digest
    finally:
        os.close(fd)


def test_the_device_is_told_to_begin_while_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[int] = []
    monkeypatch.setattr(direct_io, "SYNC_BYTES", 8 << 20)
    monkeypatch.setattr(os, "fdatasync", flushes.append)
    data = torch.randint(0, 256, (33 << 20,), dtype=torch.uint8)
    digest = write(tmp_path / "file", data)
    assert len(flushes) == 4
    content = (tmp_path / "file").read_bytes()
    assert content[: data.numel()] == data.numpy().tobytes()
    assert digest == xxhash.xxh3_128_hexdigest(data.numpy().data)


def test_a_disk_that_fails_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(direct_io, "SYNC_BYTES", 4 << 20)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write(tmp_path / "file", torch.zeros(33 << 20, dtype=torch.uint8))


@pytest.mark.parametrize("setting", ["auto", "always", "never"])
def test_a_guard_saves_the_way_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(saver, "LEAST_BYTES", 0)
    monkeypatch.setattr(disk_choice, "measure", lambda directory, stopped: choice_of())
    monkeypatch.setenv("MINDX_PAGE_CACHE", setting)
    ways: list[bool] = []
    original = BlockWriter.__init__

    def watched(self: BlockWriter, *args: object, cached: bool = False, **options: object) -> None:
        ways.append(cached)
        original(self, *args, cached=cached, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockWriter, "__init__", watched)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path, signals=()) as guard:
        for _ in guard.steps(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step_end()
        chooser = guard._saver._chooser
        assert (chooser is not None) is (setting == "auto")
        if chooser is not None and chooser._thread is not None:
            chooser._thread.join(WAIT_S)
    assert ways and set(ways) == {setting != "never"}
    with mx.Guard(model=model, optimizer=optimizer, directory=tmp_path, signals=()) as guard:
        assert guard.position.step == 2


def test_a_wrong_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDX_PAGE_CACHE", "yes")
    model = nn.Linear(4, 4)
    with (
        pytest.raises(mx.errors.UsageError, match=r"MINDX_PAGE_CACHE='yes': give auto, always, never or nothing"),
        mx.Guard(model=model, directory=tmp_path, signals=()),
    ):
        pass
