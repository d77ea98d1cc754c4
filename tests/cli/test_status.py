from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.ledger import FAILED, FINISHED, AttemptRecord, Ledger, as_attempt_event
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import StatusPage, WorkerPhase, page_path
from mindx_elastic.rejoin.record import SPARE, RecoveryRecord, Replacement
from tests.cli.conftest import Run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def start_agent(run_dir: Path, pid: int, **content: Any) -> EventLog:
    log = EventLog(run_dir / "events.jsonl", run_id="run-a")
    log.emit("agent_start", pid=pid, host=socket.gethostname(), **content)
    return log


def record_job(run_dir: Path, *, finished: bool = True) -> None:
    log = start_agent(run_dir, os.getpid())
    first = AttemptRecord(attempt=0, world_size=2, resumed_step=-1, outcome=FAILED, cause="killed by SIGKILL")
    first.cause_rank, first.step_reached, first.saved_step, first.steps_lost = 1, 4, 4, 0
    first.detect_s, first.save_s, first.restart_s, first.first_step_s = 0.1, 0.2, 1.0, 2.5
    log.emit("attempt", **as_attempt_event(first))
    if finished:
        second = AttemptRecord(attempt=1, world_size=2, resumed_step=4, outcome=FINISHED, step_reached=9)
        log.emit("attempt", **as_attempt_event(second))
        log.emit("agent_end", outcome="finished", pid=os.getpid())


def test_json(run: Run, run_dir: Path) -> None:
    record_job(run_dir)
    result = run("status", run_dir, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["recoveries"] == []
    assert (document["schema"], document["run_dir"], document["older_runs"]) == (1, str(run_dir), 0)
    assert document["agent"].pop("age_s") >= 0 and document["agent"].pop("started") <= document["agent"].pop("ended")
    assert document["agent"] == {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "running": False,
        "outcome": "finished",
        "reason": None,
        "command": None,
        "agent_dir": None,
    }
    totals = {"attempts": 2, "failures": 1, "steps_lost": 0, "unknown_losses": 0, "not_training_s": 2.5}
    assert document["totals"] == totals and document["workers"] == []
    first, second = document["attempts"]
    assert (first["cause"], first["cause_rank"], first["first_step_s"]) == ("killed by SIGKILL", 1, 2.5)
    assert (second["outcome"], second["step_reached"], second["pause_s"]) == ("finished", 9, None)


def record_recoveries(run_dir: Path) -> None:
    log = start_agent(run_dir, os.getpid())
    ledger = Ledger(log)
    ledger.start_attempt(0, world_size=2, num_workers=2, node=0, restarts=0)
    stand_in = Replacement(rank=1, pid=4711, by=SPARE)
    stages = {"detect": 0.001, "out": 0.002, "ready": 0.07, "first_step": 0.12}
    done = RecoveryRecord(
        generation=1, outcome="in place", cause="killed by SIGKILL", ranks=(1,), stood_in=(stand_in,), donor=0, step=3
    )
    ledger.note_recovery(replace(done, steps_lost=0, stages=stages, duration_s=0.12))
    ledger.note_recovery(RecoveryRecord(generation=2, outcome="restart", cause="exit code 1", reason="why", ranks=(0,)))


def test_recoveries_in_place(run: Run, run_dir: Path) -> None:
    record_recoveries(run_dir)
    document = json.loads(run("status", run_dir, "--json").stdout)
    first, second = document["recoveries"]
    assert (first["attempt"], first["generation"], first["outcome"], first["ranks"]) == (0, 1, "in place", [1])
    assert first["stood_in"] == [{"rank": 1, "pid": 4711, "by": "spare"}]
    assert (first["donor"], first["step"], first["steps_lost"]) == (0, 3, 0)
    assert first["stages"] == {"detect": 0.001, "out": 0.002, "ready": 0.07, "first_step": 0.12}
    assert (second["outcome"], second["reason"], second["cause"]) == ("restart", "why", "exit code 1")
    totals = {"attempts": 1, "failures": 1, "steps_lost": 0, "unknown_losses": 0, "not_training_s": 0.12, "in_place": 1}
    assert document["totals"] == totals
    assert document["attempts"][0]["in_place_s"] == 0.12
    lines = run("status", run_dir).stdout.splitlines()
    assert any("running; 1 recovered in place" in line for line in lines)
    at = lines.index("recoveries in place (attempt.number)")
    assert lines[at + 1] == "0.1  rank 1: killed by SIGKILL; a spare stands in; on from step 3; 120 ms"
    assert lines[at + 2] == "0.2  rank 0: exit code 1; not in place: why"
    assert lines[-1] == "1 failure (recovered in place), 0 steps lost, 0.12 s not training"


def test_a_running_agent_and_its_workers(run: Run, run_dir: Path, tmp_path: Path, dead_pid: int) -> None:
    agent_dir = tmp_path / "agent"
    agent_dir.mkdir()
    pages = [StatusPage(page_path(agent_dir, rank)) for rank in (0, 10, 9)]
    try:
        pages[0].set(phase=WorkerPhase.TRAINING)
        pages[0].pass_boundary(16)
        pages[1].set(phase=WorkerPhase.BETWEEN)
        pages[2].set(pid=dead_pid)
        (agent_dir / "rank_x.page").write_text("no page")
        start_agent(run_dir, os.getpid(), agent_dir=str(agent_dir)).emit("attempt_start", attempt=0, world_size=3)
        document = json.loads(run("status", run_dir, "--json").stdout)
        lines = run("status", run_dir).stdout.splitlines()
    finally:
        for page in pages:
            page.close()
    assert document["agent"]["running"] is True
    assert [worker["rank"] for worker in document["workers"]] == [0, 9, 10]
    first = document["workers"][0]
    assert (first["pid"], first["alive"], first["phase"], first["step"]) == (os.getpid(), True, "training", 16)
    assert 0 <= first["since_boundary_s"] < 600
    assert lines[0].startswith(f"agent {os.getpid()} on {socket.gethostname()} runs, begun ")
    assert any(line.split()[-1:] == ["running"] or " running " in line for line in lines[6:])
    rows = [line.split() for line in lines[3:6]]
    assert [row[:3] for row in rows] == [["0", "training", "16"], ["9", "gone", "-"], ["10", "between", "-"]]
    assert [row[-1] for row in rows] == [str(os.getpid()), str(dead_pid), str(os.getpid())]


def test_a_killed_agent(run: Run, run_dir: Path, dead_pid: int) -> None:
    start_agent(run_dir, dead_pid).emit("attempt_start", attempt=0, pid=dead_pid)
    lines = run("status", run_dir).stdout.splitlines()
    assert "is gone without recording its end: it was killed" in lines[0] and "no end recorded" in "".join(lines[1:])


def test_an_agent_that_ends_while_its_log_is_read(run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = start_agent(run_dir, os.getpid())

    def end_now(_: object) -> bool:
        log.emit("agent_end", outcome="finished", pid=os.getpid())
        return False

    monkeypatch.setattr("mindx_elastic.cli.status_report.is_running", end_now)
    assert run("status", run_dir).stdout.splitlines()[0].endswith(": finished")


def test_an_agent_of_another_machine(run: Run, run_dir: Path) -> None:
    log = EventLog(run_dir / "events.jsonl")
    log.emit("agent_start", pid=1, host="another-machine", agent_dir=str(run_dir))
    assert json.loads(run("status", run_dir, "--json").stdout)["agent"]["running"] is None
    assert "can be seen on that machine only" in run("status", run_dir).stdout


def test_nothing_there_is_3(run: Run, run_dir: Path) -> None:
    (run_dir / "events.jsonl").write_text('{"time": 1, "event": "resume", "rank": 0}\n')
    result = run("status", run_dir)
    assert result.exit_code == 3 and result.stdout == f"no agent has run in {run_dir}\n"
    document = json.loads(run("status", run_dir, "--json").stdout)
    assert document["agent"] is None and document["attempts"] == []


def test_wrong_usage_is_2(run: Run, run_dir: Path) -> None:
    assert "does not exist" in run("status", run_dir / "no").stderr
    (run_dir / "events.jsonl").mkdir()
    result = run("status", run_dir)
    assert result.exit_code == 2 and "cannot be read" in result.stderr
