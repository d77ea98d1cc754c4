"""What `status` says of a running job: pages, a folder in shared memory, checkpoints and a log as the real ones write
them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.ledger import FAILED, AttemptRecord, Ledger, as_attempt_event
from mindx_elastic.cli.possible_loss import expect
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
    first = AttemptRecord(attempt=0, world_size=2, resumed_step=-1, outcome=FAILED, cause="killed by \x1b[31mSIGKILL")
    first.cause_rank, first.steps_lost, first.first_step_s = 1, 0, 2.0
    log.emit("attempt", **as_attempt_event(first))
    ledger = Ledger(log)
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


def test_it_is_said_in_words(run: Run, run_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "ckpt" / "resnet-1_20.safetensors", step=20)
    text = run("status", run_dir).stdout
    assert "killed now: 2 steps (" in text and "snapshot of step 25" in text
    assert "machine lost now: 7 steps (" in text and "checkpoint of step 20, " in text
    assert "rank 1: killed by \\x1b[31mSIGKILL" in text and "2 failures (1 recovered in place), 0 steps lost" in text
    assert re.search(r"^1 +2 +4 +- +running; 1 recovered in place", text, re.MULTILINE), "attempt, ranks, from, to"
    assert "hang: rank 0 hangs" in text
    assert "\x1b" not in text


def page(**fields: Any) -> Status:
    return Status(pid=7, phase=WorkerPhase.TRAINING, entered_ns=1)._replace(**fields)


def test_without_a_directory_nothing_is_claimed() -> None:
    found = expect({0: page(step=9)})
    assert (found["step"], found["lost_if_killed"], found["lost_if_machine_lost"]) == (9, None, None)
    assert expect({})["step"] is None and expect({0: page()}) == expect({})
