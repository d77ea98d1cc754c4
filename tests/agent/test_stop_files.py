"""The files that stop the job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindx_elastic.agent.stop_files import FLAG_NAME, StopFiles
from mindx_elastic.config import FaultPaths, Settings


def watch_files(run_dir: Path, graceful_exit: bool | None = None) -> StopFiles:
    paths = FaultPaths(fault_dir=run_dir / "fault", reset_dir=run_dir / "reset")
    return StopFiles(run_dir, paths, Settings(graceful_exit=graceful_exit))


@pytest.mark.parametrize(
    ("switch", "in_run_dir", "heard"),
    [(None, True, True), (None, False, False), (True, True, True), (True, False, True), (False, True, False)],
)
def test_the_flag_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: bool | None, in_run_dir: bool, heard: bool
) -> None:
    run_dir, working = tmp_path / "run", tmp_path / "working"
    for folder in (run_dir, working):
        folder.mkdir()
    monkeypatch.chdir(working)
    watch = watch_files(run_dir, switch)
    assert watch.poll() is None
    flag = (run_dir if in_run_dir else working) / FLAG_NAME
    flag.write_text('{"GracefulExit": 1}')
    event = watch.poll()
    assert (event is not None) is heard
    if event is not None:
        assert event.kind == "request" and str(flag) in event.reason
    assert watch.poll() is None, "once"


def test_a_flag_of_the_run_before_is_stale(tmp_path: Path) -> None:
    flag = tmp_path / FLAG_NAME
    flag.write_text('{"GracefulExit": 1}')
    os.utime(flag, (1, 1))  # older than this process
    watch = watch_files(tmp_path)
    assert watch.poll() is None and not watch.flushing()
