"""Frames of a job of this test's own: pages, a folder in shared memory, checkpoints and a log as the real ones write
them. Tests of `tests/system/test_watch.py` have a real job and a real terminal."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.ledger import FAILED, AttemptRecord, Ledger
from mindx_elastic.agent.run_log import AgentRun, load_runs
from mindx_elastic.cli.possible_loss import DiskWatch, PossibleLoss, Rates, expect
from mindx_elastic.cli.watch_frame import draw_frame
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status, StatusPage, WorkerPhase, page_path
from mindx_elastic.memory.arena import SlotRecord, SlotState
from mindx_elastic.rejoin.record import RecoveryRecord
from tests.checkpoint_files import write
from tests.cli.conftest import Run


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """The folder in memory of a job that saves to ``ckpt``, where rank 0 keeps snapshots of steps 20 and 25."""
    job = tmp_path / "memory"
    rank = job / "rank_0"
    rank.mkdir(parents=True)
    for folder in (job, rank):
        folder.chmod(0o700)
    slots = [SlotRecord(SlotState.SEALED, step=20, sequence=1), SlotRecord(SlotState.COPIED, step=25, sequence=2)]
    (rank / "commit").write_bytes(b"".join(slot.pack().ljust(64, b"\0") for slot in slots))
    (tmp_path / "ckpt").mkdir()
    return job


@pytest.fixture
def run_dir(tmp_path: Path, arena: Path) -> Iterator[Path]:
    """Of an agent (this process) that runs, with a failed attempt behind it and two workers at step 27."""
    folder, agent_dir = tmp_path / "run", tmp_path / "agent"
    folder.mkdir()
    agent_dir.mkdir()
    log = EventLog(folder / "events.jsonl")
    log.emit("agent_start", pid=os.getpid(), host=socket.gethostname(), agent_dir=str(agent_dir))
    ledger = Ledger(log)
    ledger.add(AttemptRecord(attempt=0, world_size=2, resumed_step=-1))
    ledger.update(0, outcome=FAILED, cause="killed by \x1b[31mSIGKILL", cause_rank=1, steps_lost=0, first_step_s=2.0)
    ledger.start_attempt(1, world_size=2, num_workers=2, node=0, restarts=1)
    ledger.note_recovery(RecoveryRecord(generation=1, outcome="in place", cause="killed", ranks=(1,), duration_s=0.1))
    log.emit("hang", reason="rank 0 hangs", ranks=[0])
    pages = [StatusPage(page_path(agent_dir, rank)) for rank in (0, 1)]
    for page in pages:
        page.set(phase=WorkerPhase.TRAINING, resumed_step=4)
        page.set_text("directory", str(tmp_path / "ckpt"))
        page.set_text("arena", str(arena))
        for step in (26, 27):
            page.pass_boundary(step)
    yield folder
    for page in pages:
        page.close()


def newest(run_dir: Path) -> AgentRun:
    return load_runs(run_dir / "events.jsonl")[-1]


def document_of(run: Run, run_dir: Path) -> Any:
    result = run("status", run_dir, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_what_would_be_lost(run: Run, run_dir: Path, tmp_path: Path) -> None:
    document = document_of(run, run_dir)
    outlook = document["outlook"]
    assert (outlook["step"], outlook["memory_step"], outlook["disk"]) == (27, 25, None)
    assert (outlook["lost_if_killed"], outlook["lost_if_machine_lost"]) == (2, 27)
    assert [worker["steps_per_s"] > 0 for worker in document["workers"]] == [True, True]
    assert document["alarms"][0]["reason"] == "rank 0 hangs"
    write(tmp_path / "ckpt" / "resnet-1_26.safetensors", step=26)
    document = document_of(run, run_dir)
    outlook = document["outlook"]
    assert (outlook["disk"]["step"], outlook["disk"]["name"]) == (26, "resnet-1_26.safetensors")
    assert (outlook["lost_if_killed"], outlook["lost_if_machine_lost"]) == (1, 1)


def test_a_frame_says_it_in_words(run: Run, run_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "ckpt" / "resnet-1_20.safetensors", step=20)
    document = document_of(run, run_dir)
    text = "\n".join(line.plain for line in draw_frame(document, newest(run_dir), width=120, height=None))
    assert "killed now: 2 steps (" in text and "snapshot of step 25" in text
    assert "machine lost now: 7 steps (" in text and "checkpoint of step 20, " in text
    assert "rank 1: killed by \\x1b[31mSIGKILL" in text and "2 failures (1 recovered in place), 0 steps lost" in text
    assert re.search(r"^1 +2 +4 +- +running; 1 recovered in place", text, re.MULTILINE), "attempt, ranks, from, to"
    assert "hang: rank 0 hangs" in text
    assert "\x1b" not in text


def test_a_frame_fits_every_terminal(run: Run, run_dir: Path) -> None:
    document = document_of(run, run_dir)
    worker = document["workers"][0]
    document["workers"] = [{**worker, "rank": rank} for rank in range(64)]
    document["workers"][40] |= {"alive": False}
    for width, height in ((20, 5), (40, 10), (80, 24), (200, 100)):
        lines = draw_frame(document, newest(run_dir), width=width, height=height)
        assert len(lines) <= height and max(len(line.plain) for line in lines) <= width
    text = [line.plain for line in draw_frame(document, newest(run_dir), width=80, height=24)]
    assert text[2].split()[:2] == ["40", "gone"], "the one that is not as it should be comes first"
    assert any("more; all ranks: step 27 to 27" in line for line in text)


def test_it_waits_for_a_job_that_is_not_started_yet(run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ./mindx-run, where the command has not been told another place."""
    monkeypatch.chdir(run_dir.parent)
    looks = []

    def start(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            EventLog(run_dir / "events.jsonl").emit("agent_end", outcome="finished", pid=os.getpid())
            run_dir.rename("mindx-run")

    monkeypatch.setattr("mindx_elastic.cli.watch.time.sleep", start)
    result = run("top")
    assert result.exit_code == 0 and "has ended" in result.stdout and len(looks) == 2
    assert result.stderr == "mindx-elastic: no agent has run in mindx-run yet; waiting for one, Ctrl-C ends this\n"


def page(**fields: Any) -> Status:
    return Status(pid=7, phase=WorkerPhase.TRAINING, entered_ns=1)._replace(**fields)


def test_without_a_directory_nothing_is_claimed() -> None:
    found = expect({0: page(step=9)}, DiskWatch())
    assert (found.step, found.lost_if_killed, found.lost_if_machine_lost) == (9, None, None)
    assert expect({}, DiskWatch()) == PossibleLoss() == expect({0: page()}, DiskWatch())


def test_rates_follow_the_steps() -> None:
    rates, now = Rates(), time.monotonic_ns()
    second = 1_000_000_000
    first = page(first_boundary_ns=now - 4 * second, boundary_ns=now, boundaries=21)
    assert rates.update({0: first}) == {0: pytest.approx(5)}
    faster = first._replace(boundary_ns=now + second, boundaries=41)
    assert rates.update({0: faster})[0] == pytest.approx(20), "since the look before"
    stuck = first._replace(pid=8, boundary_ns=now - 100 * second, first_boundary_ns=now - 102 * second)
    rates.update({0: stuck})
    assert rates.update({0: stuck})[0] == pytest.approx(0.01, rel=0.1), "a rank that waits has no rate of before"
    assert rates.update({0: page()}) == {}
