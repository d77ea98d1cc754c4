from __future__ import annotations

import sys
from pathlib import Path

import pytest

import demo
from tests.watchdog import finish


def make_run(folder: Path, stderr: str = "") -> demo.Run:
    return demo.Run(folder, folder / "stderr-1.txt", stderr=stderr)


def test_a_broken_promise_shows_the_workers_stderr_and_not_torchruns(tmp_path: Path) -> None:
    run = make_run(tmp_path, stderr="ValueError: the cause\nE1121 10:00:59.432000 7331 torch/x.py:1] failed\nTraceback")
    with pytest.raises(demo.BrokenPromise, match="the cause") as caught:
        run.expect(False, "it failed")
    assert "Traceback" not in str(caught.value)


@pytest.mark.drill
@pytest.mark.slow
def test_the_demo_keeps_its_promises(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, demo.__file__, "--output", str(tmp_path)]
    done = finish(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resnet-2_" in done.stdout
    assert "NO" not in done.stdout
