"""``mindx-elastic status``: events, pages, a folder in shared memory and checkpoints as the real ones write them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.history import FAILED, FINISHED, AttemptRecord, as_attempt_event
from mindx_elastic.agent.ledger import Ledger
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import StatusPage, WorkerPhase, page_path
from mindx_elastic.memory.arena import SlotRecord, SlotState
from mindx_elastic.rejoin.record import SPARE, RecoveryRecord, Replacement
from tests.checkpoint_files import write
from tests.cli.conftest import Run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def document_of(run: Run, run_dir: Path) -> Any:
    result = run("status", run_dir, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def start_agent(run_dir: Path, pid: int, **content: Any) -> EventLog:
    log = EventLog(run_dir / "events.jsonl", run_id="run-a")
    log.emit("agent_start", pid=pid, host=socket.gethostname(), **content)
    return log


def killed() -> AttemptRecord:
    """The first attempt, after which the second one has begun."""
    first = AttemptRecord(attempt=0, world_size=2, resumed_step=-1, outcome=FAILED, cause="killed by \x1b[31mSIGKILL")
    first.cause_rank, first.step_reached, first.saved_step, first.steps_lost = 1, 4, 4, 0
    first.detect_s, first.save_s, first.restart_s, first.first_step_s = 0.1, 0.2, 1.0, 2.5
    return first


def test_a_job_that_has_finished(run: Run, run_dir: Path) -> None:
    log = start_agent(run_dir, os.getpid())
    second = AttemptRecord(attempt=1, world_size=2, resumed_step=4, outcome=FINISHED, step_reached=9)
    for record in (killed(), second):
        log.emit("attempt", **as_attempt_event(record))
    log.emit("agent_end", outcome="finished", pid=os.getpid())
    document = document_of(run, run_dir)
    assert (document["schema"], document["run_dir"], document["older_runs"]) == (1, str(run_dir), 0)
    assert document["agent"].pop("age_s") >= 0 and document["agent"].pop("started") <= document["agent"].pop("ended")
    agent = {"pid": os.getpid(), "host": socket.gethostname(), "running": False, "outcome": "finished"}
    assert document["agent"] == {**agent, "reason": None, "command": None, "agent_dir": None}
    totals = {"attempts": 2, "failures": 1, "steps_lost": 0, "unknown_losses": 0, "not_training_s": 2.5}
    assert document["totals"] == totals and document["workers"] == document["recoveries"] == []
    one, two = document["attempts"]
    assert (one["cause"], one["cause_rank"], one["first_step_s"]) == (killed().cause, 1, 2.5)
    assert (two["outcome"], two["step_reached"], two["pause_s"]) == ("finished", 9, None)


def test_recoveries_in_place(run: Run, run_dir: Path) -> None:
    ledger = Ledger(start_agent(run_dir, os.getpid()))
    ledger.start_attempt(0, world_size=2, num_workers=2, node=0, restarts=0)
    stand_in = Replacement(rank=1, pid=4711, by=SPARE)
    done = RecoveryRecord(
        generation=1, outcome="in place", cause="killed by SIGKILL", ranks=(1,), stood_in=(stand_in,), donor=0, step=3
    )
    ledger.note_recovery(replace(done, steps_lost=0, duration_s=0.12))
    ledger.note_recovery(RecoveryRecord(generation=2, outcome="restart", cause="exit code 1", reason="why", ranks=(0,)))
    document = document_of(run, run_dir)
    first, second = document["recoveries"]
    assert (first["attempt"], first["generation"], first["outcome"], first["ranks"]) == (0, 1, "in place", [1])
    assert first["stood_in"] == [{"rank": 1, "pid": 4711, "by": "spare"}]
    assert (first["donor"], first["step"], first["steps_lost"]) == (0, 3, 0)
    assert (second["outcome"], second["reason"], second["cause"]) == ("restart", "why", "exit code 1")
    totals = {"attempts": 1, "failures": 1, "steps_lost": 0, "unknown_losses": 0, "not_training_s": 0.12, "in_place": 1}
    assert document["totals"] == totals and document["attempts"][0]["in_place_s"] == 0.12
    lines = run("status", run_dir).stdout.splitlines()
    assert any("running; 1 recovered in place" in line for line in lines)
    at = lines.index("recoveries in place (attempt.number)")
    assert lines[at + 1] == "0.1  rank 1: killed by SIGKILL; a spare stands in; on from step 3; 120 ms"
    assert lines[at + 2] == "0.2  rank 0: exit code 1; not in place: why"
    assert lines[-1] == "1 failure (recovered in place), 0 steps lost, 0.12 s not training"


# --- a job that runs ---


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
def pages(run_dir: Path, tmp_path: Path, arena: Path, dead_pid: int) -> Iterator[list[StatusPage]]:
    """Of an agent (this process) that runs, with a failed attempt behind it: of ranks 0 and 10, which are at step 27,
    and of rank 9, which is dead."""
    agent_dir = tmp_path / "agent"
    agent_dir.mkdir()
    log = start_agent(run_dir, os.getpid(), agent_dir=str(agent_dir))
    log.emit("attempt", **as_attempt_event(killed()))
    Ledger(log).start_attempt(1, world_size=3, num_workers=3, node=0, restarts=1)
    log.emit("hang", reason="rank 0 hangs", ranks=[0])
    found = [StatusPage(page_path(agent_dir, rank)) for rank in (0, 10, 9)]
    (agent_dir / "rank_x.page").write_text("no page")
    for page in found[:2]:
        page.set(phase=WorkerPhase.TRAINING, resumed_step=4)
        page.set_text("directory", str(tmp_path / "ckpt"))
        page.set_text("arena", str(arena))
        for step in (26, 27):
            page.pass_boundary(step)
    found[1].set(phase=WorkerPhase.BETWEEN)
    found[2].set(pid=dead_pid)
    yield found
    for page in found:
        page.close()


def test_its_workers_and_what_would_be_lost(
    run: Run, run_dir: Path, tmp_path: Path, pages: list[StatusPage], dead_pid: int
) -> None:
    document = document_of(run, run_dir)
    assert document["agent"]["running"] is True
    first, _, second = document["workers"]
    assert [each["rank"] for each in document["workers"]] == [0, 9, 10]
    assert (first["pid"], first["alive"], first["phase"], first["step"]) == (os.getpid(), True, "training", 27)
    assert 0 <= first["since_boundary_s"] < 600 and first["steps_per_s"] > 0 and second["steps_per_s"] > 0
    outlook = document["outlook"]
    assert (outlook["step"], outlook["memory_step"], outlook["disk"]) == (27, 25, None)
    assert (outlook["lost_if_killed"], outlook["lost_if_machine_lost"]) == (2, 27)
    assert document["alarms"][0]["reason"] == "rank 0 hangs"
    write(tmp_path / "ckpt" / "resnet-1_20.safetensors", step=20)
    text = run("status", run_dir).stdout
    lines = text.splitlines()
    assert lines[0].startswith(f"agent {os.getpid()} on {socket.gethostname()} runs, begun ")
    rows = [line.split() for line in lines[3:6]]
    assert [row[:3] for row in rows] == [["0", "training", "27"], ["9", "gone", "-"], ["10", "between", "27"]]
    assert [row[-1] for row in rows] == [str(os.getpid()), str(dead_pid), str(os.getpid())]
    assert "killed now: 2 steps (" in text and "snapshot of step 25" in text
    assert "machine lost now: 7 steps (" in text and "checkpoint of step 20, " in text
    assert "rank 1: killed by \\x1b[31mSIGKILL" in text and "1 failure, 0 steps lost" in text and "\x1b" not in text
    assert re.search(r"^1 +3 +4 +- +running", text, re.MULTILINE), "attempt, ranks, from, to"
    assert "hang: rank 0 hangs" in text
    log = EventLog(run_dir / "events.jsonl", attempt=1)
    log.emit("rejoin", outcome="in place", generation=1, cause="killed", ranks=[10], step=26)
    text = run("status", run_dir).stdout
    assert re.search(r"^1 +3 +- +- +running; 1 rec", text, re.MULTILINE), "the pages say where all went on in place"
    write(tmp_path / "ckpt" / "resnet-1_26.safetensors", step=26)
    outlook = document_of(run, run_dir)["outlook"]
    assert (outlook["disk"]["step"], outlook["disk"]["name"]) == (26, "resnet-1_26.safetensors")
    assert (outlook["lost_if_killed"], outlook["lost_if_machine_lost"]) == (1, 1)
    for page in pages[:2]:
        page.set_text("directory", "")
    outlook = document_of(run, run_dir)["outlook"]
    assert (outlook["step"], outlook["lost_if_killed"], outlook["lost_if_machine_lost"]) == (27, None, None)


# --- an agent of which little is known ---


def test_a_killed_agent(run: Run, run_dir: Path, dead_pid: int) -> None:
    start_agent(run_dir, dead_pid).emit("attempt_start", attempt=0, pid=dead_pid)
    lines = run("status", run_dir).stdout.splitlines()
    assert "is gone without recording its end: it was killed" in lines[0] and "no end recorded" in "".join(lines[1:])
    said = run("logs", run_dir, "--rank", 1).stdout
    assert said == f"nothing is kept in {run_dir}: rank 1 has not failed, or nothing was written to stderr\n"


def test_an_agent_that_ends_while_its_log_is_read(run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = start_agent(run_dir, os.getpid())

    def end_now(_: object) -> bool:
        log.emit("agent_end", outcome="finished", pid=os.getpid())
        return False

    monkeypatch.setattr("mindx_elastic.cli.status.is_running", end_now)
    assert run("status", run_dir).stdout.splitlines()[0].endswith(": finished")


def test_an_agent_of_another_machine(run: Run, run_dir: Path) -> None:
    log = EventLog(run_dir / "events.jsonl")
    log.emit("agent_start", pid=1, host="another-machine", agent_dir=str(run_dir))
    assert document_of(run, run_dir)["agent"]["running"] is None
    assert "can be seen on that machine only" in run("status", run_dir).stdout


def test_nothing_there_is_3_and_wrong_usage_2(run: Run, run_dir: Path) -> None:
    (run_dir / "events.jsonl").write_text('{"time": 1, "event": "resume", "rank": 0}\n')
    result = run("status", run_dir)
    assert result.exit_code == 3 and result.stdout == f"no agent has run in {run_dir}\n"
    document = json.loads(run("status", run_dir, "--json").stdout)
    assert document["agent"] is None and document["attempts"] == []
    assert "does not exist" in run("status", run_dir / "no").stderr
    (run_dir / "events.jsonl").unlink()
    (run_dir / "events.jsonl").mkdir()
    result = run("status", run_dir)
    assert result.exit_code == 2 and "cannot be read" in result.stderr
