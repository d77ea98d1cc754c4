"""Fault reports and reset.json: what is an alarm, what is old, and files of every quality."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.config import FaultPaths
from mindx_elastic.platforms.fault_watch import FaultEvent, FaultWatch
from tests.platforms.test_faults import entry

LONG_AGO = 1_600_000_000.0


class Mount:
    """Both folders, plain ones, and a watch that believes to have been started at `started_at`."""

    def __init__(self, root: Path) -> None:
        self.paths = FaultPaths(fault_dir=root / "fault", reset_dir=root / "reset")
        self.paths.fault_dir.mkdir()
        self.paths.reset_dir.mkdir()

    def watch(self, **options: Any) -> FaultWatch:
        return FaultWatch(self.paths, **{"started_at": time.time() - 1, **options})

    def fault(self, content: object, *, mtime: float | None = None) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (self.paths.fault_dir / "fault-npus").write_text(text)
        if mtime is not None:
            os.utime(self.paths.fault_dir / "fault-npus", (mtime, mtime))

    def reset(self, content: object, *, mtime: float | None = None) -> None:
        path = self.paths.reset_dir / "reset.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        if mtime is not None:
            os.utime(path, (mtime, mtime))


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def ranks(event: FaultEvent | None) -> list[int] | None:
    return None if event is None else sorted(event.ranks)


# --- what is old ---


def test_a_report_from_before_the_start_is_done_until_it_changes(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mindx_elastic")
    mount.fault({"FaultRankIds": ["1"], "CreatTime": 1690000000}, mtime=LONG_AGO)
    watch = mount.watch()
    assert watch.poll() is None and watch.poll() is None
    assert sum("before this start" in record.getMessage() for record in caplog.records) == 1
    mount.fault({"FaultRankIds": ["1"], "CreatTime": 1690000000})  # another key of the ConfigMap has changed
    assert watch.poll() is None
    mount.fault({"FaultRankIds": ["1", "2"], "CreatTime": 1690000000})
    assert ranks(watch.poll()) == [1, 2]


@pytest.mark.parametrize(
    ("created", "mtime"),
    [
        (1690000000, None),
        ("now", LONG_AGO),
    ],
)
def test_a_report_written_between_the_start_and_the_first_look_is_an_alarm(
    mount: Mount, created: object, mtime: float | None
) -> None:
    content = {"FaultRankIds": ["1"], "CreatTime": time.time() if created == "now" else created}
    mount.fault(content, mtime=mtime)
    assert ranks(mount.watch(started_at=time.time() - 60).poll()) == [1]


@pytest.mark.parametrize(("ahead_s", "mtime_ahead_s"), [(300, None), (None, 300), (300, 300)])
def test_a_report_from_the_future_stops_no_start_and_its_next_change_does(
    mount: Mount, ahead_s: float | None, mtime_ahead_s: float | None
) -> None:
    """The platform's clock, or the one of the file's server, is ahead: each new start ended with 75."""
    created = LONG_AGO if ahead_s is None else time.time() + ahead_s
    mtime = LONG_AGO if mtime_ahead_s is None else time.time() + mtime_ahead_s
    mount.fault({"FaultRankIds": ["1"], "CreatTime": created}, mtime=mtime)
    mount.reset({"GracefulExit": 1, "UpdateTime": created}, mtime=mtime)
    watch = mount.watch()
    assert watch.poll() is None
    mount.fault({"FaultRankIds": ["1"], "CreatTime": created + 1}, mtime=mtime)
    assert ranks(watch.poll()) == [1]


def test_repaired_ranks_are_no_alarm_and_a_second_fault_is(mount: Mount) -> None:
    mount.fault({"FaultRank": [1, 3], "UpdateTime": 1690000000}, mtime=LONG_AGO)
    watch = mount.watch()
    assert watch.poll() is None
    for time_stamp, left in ((1690000005, [1]), (1690000009, [])):
        mount.fault({"FaultRank": left, "UpdateTime": time_stamp})
        assert watch.poll() is None
    mount.fault({"FaultRank": [3], "UpdateTime": 1690000009})
    assert ranks(watch.poll()) == [3]


# --- mounts and half-written files ---


def publish(folder: Path, name: str, files: dict[str, str]) -> None:
    """What the kubelet does for an update: a new dated folder, ``..data`` is renamed over, the old folder goes."""
    old = os.readlink(folder / "..data") if (folder / "..data").is_symlink() else None
    (folder / name).mkdir(parents=True)
    for key, text in files.items():
        (folder / name / key).write_text(text)
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(Path("..data") / key)
    (folder / "..data_tmp").symlink_to(name)
    os.rename(folder / "..data_tmp", folder / "..data")
    if old is not None:
        shutil.rmtree(folder / old)


def report(*faulty: int, created: int = 1690000000) -> dict[str, str]:
    text = json.dumps({"FaultRankIds": [str(rank) for rank in faulty], "CreatTime": created})
    return {"fault-npus": text}


def test_a_config_map_that_swaps_its_data_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = FaultPaths(fault_dir=tmp_path / "fault", reset_dir=tmp_path / "reset")
    publish(paths.fault_dir, "..2024_01", report())
    publish(paths.reset_dir, "..2024_01", {"reset.json": '{"FaultFlushing": true}'})
    watch = FaultWatch(paths, started_at=time.time() - 1)
    assert watch.poll() is None and watch.flushing()
    publish(paths.fault_dir, "..2024_02", report(2, created=1690000100))
    publish(paths.reset_dir, "..2024_02", {"reset.json": '{"FaultFlushing": false}'})
    assert ranks(watch.poll()) == [2]
    assert not watch.flushing()
    publish(paths.fault_dir, "..2024_03", report(2, created=1690000100))
    assert watch.poll() is None
    assert not warnings(caplog)


def test_ranks_that_are_none_are_left_out(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    watch = mount.watch(world_size=4)
    mount.fault({"FaultRank": [1, "2", -1, 4, True, 1.5, None, "x", "²", [0]]})
    assert ranks(watch.poll()) == [1, 2]
    assert watch.poll() is None
    (line,) = warnings(caplog)
    assert "rank 4" in line and "-1" in line and "the rest of it counts" in line


# --- reset.json ---


@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        ({"GracefulExit": "1", "RankList": None}, "request", []),
        ({"RankList": [entry("3", policy="isolate"), entry(4, policy="ignore")]}, "fault", [3]),
        ({"RankList": [entry(policy="empty")]}, None, []),
        ({"RankList": [entry(status="recovered")], "GracefulExit": 0}, None, []),
        ({"FaultFlushing": True}, None, []),
    ],
)
def test_what_reset_json_asks_for(mount: Mount, content: object, kind: str | None, expected: list[int]) -> None:
    watch = mount.watch()
    assert watch.poll() is None
    mount.reset(content)
    event = watch.poll()
    if kind is None:
        assert event is None
    else:
        assert event is not None and (event.kind, sorted(event.ranks)) == (kind, expected)
        assert str(mount.paths.reset_dir / "reset.json") in event.reason
    assert watch.poll() is None


def test_reset_json_from_before_the_start_is_done_until_it_changes(mount: Mount) -> None:
    mount.reset({"GracefulExit": 1, "RankList": [entry(1)]}, mtime=LONG_AGO)
    watch = mount.watch()
    assert watch.poll() is None
    mount.reset({"GracefulExit": 1, "RankList": [entry(1)], "UpdateTime": 1690000000})
    assert watch.poll() is None
    mount.reset({"GracefulExit": 0, "RankList": [entry(1, status="recovered")]})
    assert watch.poll() is None
    mount.reset({"GracefulExit": 1, "RankList": [entry(1, status="recovered")]})
    event = watch.poll()
    assert event is not None and event.kind == "request"


def test_flushing_keeps_its_last_state_while_the_file_is_half_written(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    watch = mount.watch()
    mount.reset({"FaultFlushing": True})
    assert watch.flushing()
    mount.reset('{"FaultFl')
    assert watch.flushing() and watch.flushing()
    assert len(warnings(caplog)) == 1
    (mount.paths.reset_dir / "reset.json").unlink()
    assert not watch.flushing()
