"""The account of a job's attempts: kept, printed, written to a file and read back."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agent.ledger import (
    FAILED,
    FINISHED,
    NEW_NODE,
    STOPPED,
    AttemptRecord,
    Ledger,
    add_up,
    load_runs,
    render,
    totals_line,
)
from mindx_elastic.core.events import EventLog


def failed(attempt: int, **changes: Any) -> AttemptRecord:
    facts: dict[str, Any] = {
        "world_size": 4,
        "node": 0,
        "started": 1_700_000_000.5,
        "cause": "killed by SIGKILL",
        "cause_rank": 2,
        "step_reached": 17,
        "resumed_step": -1,
        "saved_step": 17,
        "steps_lost": 0,
        "detect_s": 0.112,
        "save_s": 0.4,
        "restart_s": 1.31,
        "first_step_s": 2.05,
        "outcome": FAILED,
    }
    return AttemptRecord(attempt=attempt, **{**facts, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(EventLog(path, run_id="run-a"))


def emitted(path: Path) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["event"], line["attempt"]) for line in lines]


def test_an_attempt_is_recorded_when_the_first_step_after_it_is_known(ledger: Ledger, path: Path) -> None:
    ledger.add(AttemptRecord(attempt=0, world_size=2))
    assert emitted(path) == []
    ledger.update(0, outcome=FAILED, cause="exit code 1: ValueError: x", cause_rank=1, step_reached=5, detect_s=0.1)
    ledger.update(0, save_s=0.3, saved_step=5, steps_lost=0)
    ledger.add(AttemptRecord(attempt=1, world_size=2, resumed_step=5))
    ledger.update(0, restart_s=1.0)
    assert emitted(path) == [("attempt_end", 0)]
    ledger.update(0, first_step_s=1.8)
    assert emitted(path) == [("attempt_end", 0), ("attempt", 0)]
    line = json.loads(path.read_text().splitlines()[1])
    assert (line["step"], line["reason"], line["outcome"]) == (5, "exit code 1: ValueError: x", "failed")
    assert (line["first_step_s"], line["cause_rank"], line["run_id"]) == (1.8, 1, "run-a")
    assert line["pid"] and line["host"] and "step_reached" not in line
    ledger.update(1, outcome=FINISHED, step_reached=20)
    ledger.close("finished")
    ledger.close("finished")
    assert emitted(path)[2:] == [("attempt_end", 1), ("attempt", 1), ("summary", 0)]
    summary = json.loads(path.read_text().splitlines()[-1])
    assert (summary["failures"], summary["steps_lost"], summary["not_training_s"]) == (1, 0, 1.8)
    assert (summary["reason"], summary["outcome"]) == ("1 failure, 0 steps lost, 1.8 s not training", "finished")


def test_an_attempt_that_never_came_to_a_step(ledger: Ledger, path: Path) -> None:
    for attempt in range(3):
        ledger.add(AttemptRecord(attempt=attempt))
        ledger.update(attempt, outcome=FAILED)
    assert [entry for entry in emitted(path) if entry[0] == "attempt"] == [("attempt", 0), ("attempt", 1)]
    ledger.close()
    assert emitted(path)[-2:] == [("attempt", 2), ("summary", 0)]


def test_an_attempt_that_runs_when_the_agent_ends_is_recorded_too(ledger: Ledger, path: Path) -> None:
    ledger.add(AttemptRecord(attempt=0, world_size=1))
    ledger.close()
    assert emitted(path) == [("attempt", 0), ("summary", 0)]


def test_wrong_use(ledger: Ledger) -> None:
    ledger.add(AttemptRecord(attempt=0))
    with pytest.raises(ValueError, match="attempt 0 is in the ledger already"):
        ledger.add(AttemptRecord(attempt=0))
    with pytest.raises(TypeError, match="an attempt has no caus"):
        ledger.update(0, caus="x")
    with pytest.raises(KeyError):
        ledger.update(3, cause="x")


def test_totals() -> None:
    records = [failed(0), failed(1, steps_lost=3, first_step_s=None), AttemptRecord(attempt=2, outcome=NEW_NODE)]
    assert totals_line(add_up(records)) == "2 failures, 3 steps lost, 3.4 s not training"
    assert totals_line(add_up([])) == "0 failures, 0 steps lost, 0.00 s not training"
    line = totals_line(add_up([failed(0, steps_lost=None), failed(1, steps_lost=1)]))
    assert line.startswith("2 failures, 1 step lost (not known yet for 1 failure), ")


def test_the_screen() -> None:
    records = [
        failed(0),
        failed(
            1, cause="exit code 1: RuntimeError: " + "a long tale of woe " * 20, resumed_step=17, step_reached=412345
        ),
        AttemptRecord(attempt=2, world_size=3, resumed_step=412345, outcome=STOPPED, cause="SIGTERM"),
        AttemptRecord(attempt=3, world_size=4, resumed_step=412345),
    ]
    lines = render(records).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].split() == ["from", "to", "saved", "steps", "detect", "save", "restart", "1st", "step"]
    rows = [line for line in lines if line[:1].isdigit() and not line.startswith("2 failures")]
    assert rows[0].split() == [*("0", "4", "fresh", "17", "rank", "2:", "killed", "by"), *rows[0].split()[8:]]
    assert rows[0].split()[-6:] == ["17", "0", "0.11", "0.40", "1.3", "2.0"]
    assert "stopped: SIGTERM" in rows[2] and "running" in rows[3]
    assert "..." in render(records) and lines[-1] == "2 failures, 0 steps lost, 4.1 s not training"


@pytest.mark.parametrize("width", [60, 80, 99])
def test_a_narrow_terminal_gets_lines(width: int) -> None:
    text = render([failed(0, step_reached=412345, saved_step=412345, resumed_step=400000)], width=width)
    assert "rank 2: killed by" in " ".join(text.split())
    if width < 90:
        assert " ".join(text.split()).startswith("attempt 0: rank 2: killed by SIGKILL; ranks 4; from step 400000; to")
        assert "restart 1.3 s" in " ".join(text.split())


def test_control_characters_are_shown_not_obeyed() -> None:
    text = render([failed(0, cause="exit code 1: \x1b[31m[red]\nboom")])
    assert "\x1b" not in text and "\\x1b[31m[red]" in text.replace("\n", "")


def test_no_attempt_yet(ledger: Ledger) -> None:
    assert ledger.render().startswith("no attempt yet\n")


def load(path: Path) -> list[AttemptRecord]:
    """The attempts of the newest agent."""
    runs = load_runs(path)
    return runs[-1].records if runs else []


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
