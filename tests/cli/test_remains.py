"""A save has failed (a full disk): what shared memory still holds, and why nothing is on disk, is said everywhere."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from mindx_elastic.agent.history import STOPPED, AttemptRecord, as_attempt_event
from mindx_elastic.core.events import EventLog
from mindx_elastic.report.page import make_page
from mindx_elastic.report.run_history import tell
from tests.checkpoint_files import write
from tests.cli.conftest import Run
from tests.cli.test_clean import make_arena

WHY = "SaveError: t-2_6.safetensors: No space left on device"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a job that was stopped at step 14, when the disk was full."""
    base, found = tmp_path / "shm", tmp_path / "ckpt"
    base.mkdir()
    found.mkdir()
    monkeypatch.setenv("MINDX_ARENA_DIR", str(base))
    make_arena(base, found, [(14, -1)])
    log = EventLog(found / "events.jsonl")
    log.emit("save", step=10, outcome="saved")
    log.emit("save", step=14, outcome=f"failed: {WHY}")
    return found


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_commands_that_look_at_checkpoints(run: Run, directory: Path, command: str) -> None:
    result = run(command, directory)
    assert result.exit_code == 3 and "from the beginning" not in result.stdout
    assert f"the save of step 14 has failed: {WHY}" in result.stdout
    assert "step 14 is in this machine's shared memory" in result.stdout
    document = json.loads(run(command, directory, "--json").stdout)
    assert document["failed_save"] == {"step": 14, "reason": WHY} and document["in_memory"]["step"] == 14


def test_nothing_is_said_of_steps_before_the_newest_on_disk(run: Run, directory: Path) -> None:
    write(directory / "t-3_1.safetensors", step=15)
    result = run("plan", directory)
    assert result.exit_code == 0 and "has failed" not in result.stdout and "shared memory" not in result.stdout


def test_commands_that_look_at_a_job(run: Run, directory: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    log = EventLog(run_dir / "events.jsonl")
    log.emit("agent_start", pid=os.getpid(), host=socket.gethostname())
    record = AttemptRecord(attempt=0, world_size=1, resumed_step=-1, outcome=STOPPED, cause="SIGTERM", step_reached=14)
    log.emit("attempt", **as_attempt_event(record))
    log.emit("agent_end", outcome="stopped, exit code 143", pid=os.getpid(), directories=[str(directory)])
    shown = run("status", run_dir).stdout
    assert f"{directory}: the save of step 14 has failed: {WHY}" in shown and "shared memory" in shown
    assert len(json.loads(run("status", run_dir, "--json").stdout)["remarks"]) == 3
    story = tell(run_dir / "events.jsonl")
    assert story is not None and "No space left on device" in make_page(story)
