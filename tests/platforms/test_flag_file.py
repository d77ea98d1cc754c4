"""The flag file: seen when it changes, patient with everything that is not a flag."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mindx_elastic.platforms.flag_file import AnsweredFlags, FlagFile
from tests.platforms.test_fault_watch import publish, warnings

LONG_AGO = 1_000_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "graceful_exit.json"


def watch(path: Path) -> FlagFile:
    return FlagFile(path, started_at=LONG_AGO)


@pytest.mark.parametrize(
    "text",
    [
        '{"GracefulExit": true}',
        '{"GracefulExit": "1", "x": []}',
    ],
)
def test_a_set_flag_is_reported_once(path: Path, text: str) -> None:
    flag = watch(path)
    assert not flag.poll()
    path.write_text(text)
    assert flag.poll()
    assert not flag.poll()


def test_a_change_within_one_time_stamp_is_seen(path: Path) -> None:
    """File systems stamp in steps of milliseconds to seconds: the two contents look the same to stat."""
    flag = watch(path)
    path.write_text('{"GracefulExit": 0}')
    stamp = path.stat().st_mtime_ns
    assert not flag.poll()
    path.write_text('{"GracefulExit": 1}')
    os.utime(path, ns=(stamp, stamp))
    assert flag.poll()


BAD = {
    "half-written": b'{"GracefulEx',
    "a long word": b'{"GracefulExit": "' + b"y" * 900_000 + b'"}',
    "one key twice": b'{"GracefulExit": 1, "GracefulExit": 0}',
    "too deep": b"[" * 200_000,
    "huge": b" " * (2 << 20) + b'{"GracefulExit": 1}',
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_one_warning_and_then_a_retry(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    flag = watch(path)
    path.write_bytes(content)
    for _ in range(3):
        assert not flag.poll()
    (line,) = warnings(caplog)
    assert str(path) in line
    assert len(line) < 500, "a log line, not the file"
    path.write_text('{"GracefulExit": 1}')
    assert flag.poll()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_named_once_and_never_opened(
    path: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    flag = watch(path)
    make(path)
    for _ in range(3):
        assert not flag.poll()
    (line,) = warnings(caplog)
    assert "not a regular file" in line
    path.rename(path.with_name("moved"))
    path.write_text('{"GracefulExit": 1}')
    assert flag.poll()


def answered_by(path: Path, before: AnsweredFlags | None = None) -> AnsweredFlags:
    """As the header of the checkpoint hands it on, once the flag at `path` has stopped the job."""
    flags = AnsweredFlags()
    if before is not None:
        flags.take_over(before.identities)
    assert FlagFile(path, answered=flags).poll()
    assert flags.waiting
    flags.answer()
    assert not flags.waiting
    resumed = AnsweredFlags()
    resumed.take_over(flags.identities)
    return resumed


def test_a_flag_that_has_stopped_this_run_is_named_once_and_counts_again_when_it_is_set_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"GracefulExit": 1}')
    flags = answered_by(path)
    flag = FlagFile(path, answered=flags)
    assert not flag.poll() and not flag.poll()
    (line,) = warnings(caplog)
    assert "has stopped this run before" in line and str(path) in line
    os.utime(path, (LONG_AGO, LONG_AGO))  # written again, within one stamp of the clock for all we know
    assert flag.poll()
    flags.answer()
    assert len(flags.identities) == 2
    assert not FlagFile(path, answered=flags).poll()


def test_a_flag_that_is_taken_back_is_not_answered(path: Path) -> None:
    path.write_text('{"GracefulExit": 1}')
    flags = AnsweredFlags()
    flag = FlagFile(path, answered=flags)
    assert flag.poll() and flags.is_set(path)
    path.write_text('{"GracefulExit": 0 }')
    assert not flag.poll() and not flags.is_set(path)
    flags.answer()
    assert flags.identities == ()


def test_a_config_map_in_a_new_pod_is_the_same_flag_until_its_content_changes(tmp_path: Path) -> None:
    """Every pod has the files made again, with other times and inodes."""

    def pod(name: str) -> Path:
        mount = tmp_path / "mount"
        if mount.exists():
            mount.rename(tmp_path / f"gone before {name}")
        mount.mkdir()
        publish(mount, f"..2026_{name}", {"graceful_exit.json": '{"GracefulExit": 1}'})
        later = LONG_AGO + 1000 * len(name)
        os.utime(mount / f"..2026_{name}" / "graceful_exit.json", (later, later))
        return mount

    flags = answered_by(pod("a") / "graceful_exit.json")
    mount = pod("bb")
    flag = FlagFile(mount / "graceful_exit.json", answered=flags)
    assert not flag.poll()
    publish(mount, "..2026_off", {"graceful_exit.json": '{"GracefulExit": 0}'})
    assert not flag.poll()
    publish(mount, "..2026_set", {"graceful_exit.json": '{"GracefulExit": 1, "request": 2}'})
    assert flag.poll()


def test_only_the_newest_answers_are_kept() -> None:
    flags = AnsweredFlags()
    for number in range(40):
        flags.note(Path("flag"), str(number))
        flags.answer()
    assert flags.identities == tuple(map(str, range(8, 40)))


def test_a_flag_of_the_run_before_is_named_once_and_ignored_until_it_changes(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text('{"GracefulExit": 1}')
    flag = FlagFile(path, started_at=time.time() + 3600)
    assert not flag.poll() and not flag.poll()
    (line,) = warnings(caplog)
    assert "was set before this start" in line
    later = time.time() + 7200
    os.utime(path, (later, later))
    assert flag.poll()
