from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agent.ledger import FAILED, FINISHED, AttemptRecord, Ledger
from mindx_elastic.agent.ledger_file import load, load_runs
from mindx_elastic.core.events import EventLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(path: Path, event: str, *, time: float = 1_700_000_000.0, **content: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"time": time, "event": event, **content}) + "\n")


def run_once(path: Path) -> list[AttemptRecord]:
    log = EventLog(path)
    log.emit("agent_start", pid=os.getpid(), agent_dir="/dev/shm/x")
    ledger = Ledger(log)
    ledger.add(AttemptRecord(attempt=0, world_size=2, node=0, started=1.5, resumed_step=-1))
    ledger.update(0, outcome=FAILED, cause="killed by SIGKILL", cause_rank=1, step_reached=4, detect_s=0.1)
    ledger.add(AttemptRecord(attempt=1, world_size=2, node=0, started=3.5, resumed_step=4, resumed_path="a/4"))
    ledger.update(0, saved_step=4, steps_lost=0, save_s=0.25, restart_s=0.75, first_step_s=1.25)
    ledger.update(1, outcome=FINISHED, step_reached=9)
    ledger.close("finished")
    log.emit("agent_end", outcome="0")
    return ledger.records


def test_a_round_trip(path: Path) -> None:
    records = run_once(path)
    assert load(path) == records
    (run,) = load_runs(path)
    assert (run.pid, run.agent_dir, run.outcome) == (os.getpid(), "/dev/shm/x", "0")
    assert run.summary is not None and run.summary["failures"] == 1 and run.ended is not None


def test_between_lines_of_others_and_torn_ones(path: Path) -> None:
    append(path, "resume", rank=0, step=3)
    with path.open("ab") as file:
        file.write(b'\xff\x00garbage\n[1, 2]\n"attempt"\n{"event": ["attempt"]}\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"event": "attempt"}\n{"event": "attempt", "attempt": true}\n{"time": 12, "event": "att')
    records = run_once(path)  # its first line follows the torn one
    assert load(path) == records
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    assert load(path) == records


def test_values_of_wrong_types_are_unknown(path: Path) -> None:
    wrong: dict[str, Any] = {
        "world_size": "4",
        "node": 1.5,
        "started": "now",
        "detect_s": float("nan"),
        "resumed_path": 3,
    }
    append(path, "attempt", attempt=0, step=True, reason=["x"], outcome={}, steps_lost=2, **wrong)
    assert load(path) == [AttemptRecord(attempt=0, steps_lost=2)]


def test_a_killed_agent(path: Path) -> None:
    append(path, "agent_start", pid=7, agent_dir="/dev/shm/y")
    append(path, "attempt_start", attempt=0, world_size=2, time=5.0)
    append(path, "attempt_end", pid=7, attempt=0, outcome="failed", reason="killed by SIGKILL", step=3)
    append(path, "attempt_start", attempt=1, world_size=2, time=9.0)
    (run,) = load_runs(path)
    assert run.ended is None and run.summary is None
    assert [(each.attempt, each.outcome, each.started) for each in run.records] == [(0, "failed", 5.0), (1, None, 9.0)]


def test_several_runs_in_one_file_with_the_same_pid(path: Path) -> None:
    for first in (3, 4):
        append(path, "agent_start", pid=1, host="a", agent_dir=f"d{first}")
        append(path, "attempt_start", pid=1, host="a", attempt=0)
        append(path, "attempt_end", pid=1, host="a", attempt=0, outcome="failed", step=first)
    runs = load_runs(path)
    assert [run.records[0].step_reached for run in runs] == [3, 4]
    assert load(path)[0].step_reached == 4


def test_two_agents_beside_each_other(path: Path) -> None:
    for host in "ab":
        append(path, "agent_start", pid=1, host=host)
    for host in "ab":
        append(path, "attempt", pid=1, host=host, attempt=0, step=ord(host))
    assert [run.records[0].step_reached for run in load_runs(path)] == [ord("a"), ord("b")]


def test_without_the_start_of_the_agent(path: Path) -> None:
    for step in (3, 4):
        append(path, "attempt_start", pid=1, attempt=0)
        append(path, "attempt", pid=1, attempt=0, step=step)
        append(path, "summary", pid=1)
    assert [run.records[0].step_reached for run in load_runs(path)] == [3, 4]


def test_the_end_of_the_agent_may_come_before_the_summary(path: Path) -> None:
    append(path, "agent_start", pid=1)
    append(path, "agent_end", pid=1)
    append(path, "attempt", pid=1, attempt=0)
    append(path, "summary", pid=1, outcome="failed")
    (run,) = load_runs(path)
    assert len(run.records) == 1 and run.summary is not None and run.outcome == "failed"


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "no")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        load(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    assert load(tmp_path / "empty") == []


@given(st.data())
def test_whatever_is_recorded_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    ledger = Ledger(EventLog(path))
    number, real = st.none() | st.integers(-1, 2**40), st.none() | st.floats(0, 1e9)
    text = st.none() | st.text(min_size=1)
    for attempt in range(data.draw(st.integers(1, 4))):
        ledger.add(AttemptRecord(attempt=attempt))
        for name, values in (("step_reached", number), ("steps_lost", number), ("cause", text), ("save_s", real)):
            ledger.update(attempt, **{name: data.draw(values)})
        ledger.update(attempt, outcome=data.draw(st.sampled_from([FAILED, FINISHED])))
    ledger.close()
    assert [asdict(record) for record in load(path)] == [asdict(record) for record in ledger.records]
