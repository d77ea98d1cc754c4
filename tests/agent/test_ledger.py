"""The account of a job's attempts: kept, printed, written to a file and read back."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.agent.endings import Ending
from mindx_elastic.agent.history import (
    FAILED,
    FINISHED,
    STOPPED,
    AttemptRecord,
    add_up,
    as_attempt_event,
    load_runs,
    render,
    totals_line,
)
from mindx_elastic.agent.ledger import Ledger, print_block
from mindx_elastic.core.events import EventLog
from mindx_elastic.core.status_page import Status, WorkerPhase
from mindx_elastic.rejoin.record import RecoveryRecord
from tests.harness import events


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


def test_what_others_have_said_is_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_block("first line\nsecond \x1b[2J\rline")
    assert capsys.readouterr().err == "first line\nsecond \\x1b[2J\\rline\n"


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
    first, second = failed(0), AttemptRecord(attempt=1, started=3.5, resumed_step=4, resumed_path="a/4")
    log.emit("attempt_end", **as_attempt_event(replace(first, first_step_s=None)))
    second.outcome = FINISHED
    for record in (first, second):
        log.emit("attempt", **as_attempt_event(record))
    log.emit("agent_end", outcome="0")
    return [first, second]


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


def test_several_runs_in_one_file_with_the_same_pid_the_last_of_which_was_killed(path: Path) -> None:
    for first in (3, 4):
        append(path, "agent_start", pid=1, host="a", agent_dir=f"d{first}")
        append(path, "attempt_start", pid=1, host="a", attempt=0, time=5.0)
        append(path, "attempt_end", pid=1, host="a", attempt=0, outcome="failed", step=first)
    append(path, "attempt_start", attempt=1, world_size=2, time=9.0)
    runs = load_runs(path)
    assert [run.records[0].step_reached for run in runs] == [3, 4] and runs[-1].ended is None
    assert [(each.attempt, each.outcome, each.started) for each in load(path)] == [(0, "failed", 5.0), (1, None, 9.0)]


@given(st.data())
def test_whatever_is_recorded_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    log = EventLog(tmp_path_factory.mktemp("run") / "events.jsonl")
    number, real = st.none() | st.integers(-1, 2**40), st.none() | st.floats(0, 1e9)
    drawn = {"step_reached": number, "steps_lost": number, "cause": st.none() | st.text(min_size=1), "save_s": real}
    records = []
    for attempt in range(data.draw(st.integers(1, 4))):
        records.append(AttemptRecord(attempt=attempt, outcome=data.draw(st.sampled_from([FAILED, FINISHED]))))
        for name, values in drawn.items():
            setattr(records[-1], name, data.draw(values))
        log.emit("attempt", **as_attempt_event(records[-1]))
    assert load(log.path) == records


# --- recoveries in place ---


def in_place(generation: int, **changes: Any) -> RecoveryRecord:
    facts: dict[str, Any] = {"outcome": "in place", "cause": "killed by SIGKILL", "ranks": (1,), "step": 3}
    return RecoveryRecord(**{"generation": generation, "duration_s": 0.5, "steps_lost": 0, **facts, **changes})


def test_recoveries_are_part_of_the_account(account: Ledger, tmp_path: Path) -> None:
    account.note_recovery(in_place(1))
    account.note_recovery(in_place(2, steps_lost=2, duration_s=0.25))
    account.note_recovery(in_place(3, outcome="restart", reason="why", duration_s=7.0, step=None))
    assert account.is_eventful
    fail_first(account, time.monotonic())
    (record,) = account.records
    assert (record.in_place, record.in_place_s, record.in_place_steps_lost) == (2, 0.75, 2)
    record.steps_lost, record.first_step_s = 1, 2.0
    line = "3 failures (2 recovered in place), 3 steps lost, 2.8 s not training"
    assert totals_line(add_up(account.records)) == line
    assert (account.close().in_place, account.close().failures) == (2, 3)
    (run,) = load_runs(tmp_path / "events.jsonl")
    assert [replace(each, time=None) for each in run.recoveries] == [
        replace(each, time=None) for each in account.recoveries
    ]
    assert [each.attempt for each in run.recoveries] == [0, 0, 0]
    assert run.records == account.records, "counted once, not again with the attempt's end"


# --- what the agent sees, as records ---


_NS = 1_000_000_000


def page(**fields: Any) -> Status:
    return Status(**{"pid": 1, "phase": WorkerPhase.TRAINING, "entered_ns": 1, **fields})


def attempt(statuses: dict[int, Status], *, failed_at: float | None, noticed_at: float | None) -> Any:
    workers = SimpleNamespace(last_statuses=lambda: statuses, processes=dict.fromkeys(range(2)))
    return SimpleNamespace(workers=workers, failed_at=failed_at, noticed_at=noticed_at)


KILLED = Ending(outcome="failed", code=137, cause="killed by SIGKILL", rank=1)


@pytest.fixture
def account(tmp_path: Path) -> Ledger:
    found = Ledger(EventLog(tmp_path / "events.jsonl"))
    found.start_attempt(0, world_size=2, num_workers=2, node=0, restarts=0)
    return found


def fail_first(account: Ledger, now: float) -> None:
    dead = page(step=8, resumed_step=-1, boundaries=8, first_boundary_ns=5)
    saved_ns = int((now + 0.5) * _NS)
    survivor = page(step=7, resumed_step=-1, boundaries=7, saved_step=7, saved_ns=saved_ns, alarm_ns=int(now * _NS))
    account.end_attempt(attempt({1: dead, 0: survivor}, failed_at=now + 0.1, noticed_at=now + 0.2), KILLED)


def test_a_failure_and_its_recovery(account: Ledger, tmp_path: Path) -> None:
    now = time.monotonic()
    fail_first(account, now)
    (first,) = account.records
    assert (first.outcome, first.cause, first.cause_rank) == ("failed", "killed by SIGKILL", 1)
    assert (first.step_reached, first.saved_step, first.resumed_step) == (7, 7, -1)
    assert first.detect_s == pytest.approx(0.2, abs=1e-6), "the survivor had heard of it before the agent"
    assert first.save_s == pytest.approx(0.5, abs=1e-6)
    assert first.steps_lost is None, "not known before the next start"
    account.start_attempt(1, world_size=2, num_workers=2, node=0, restarts=1)
    account.look({0: page(resumed_step=7)})
    assert first.steps_lost is None, "one rank has not said yet"
    account.look({0: page(resumed_step=7), 1: page(resumed_step=7, entered_ns=0)})
    assert first.steps_lost is None
    account.look({0: page(resumed_step=7, resumed_path="/x"), 1: page(resumed_step=7)})
    assert first.steps_lost == 0
    assert account.records[1].resumed_path == "/x"
    first_ns = int((now + 3.0) * _NS)
    account.look({0: page(first_boundary_ns=first_ns), 1: page(first_boundary_ns=first_ns - 5)})
    assert first.first_step_s == pytest.approx(3.0, abs=1e-6)
    assert first.restart_s is not None and first.restart_s >= 0
    assert account.is_eventful
    (line,) = events(tmp_path, "attempt")
    assert (line["attempt"], line["steps_lost"], line["reason"]) == (0, 0, "killed by SIGKILL")
    assert events(tmp_path, "attempt_start")[0]["pid"]


@pytest.mark.parametrize(("resumed", "lost"), [(4, 3), (-1, 7), (None, 0)])
def test_steps_that_are_lost(account: Ledger, resumed: int | None, lost: int) -> None:
    """Without another start: what nobody has saved."""
    fail_first(account, time.monotonic())
    if resumed is None:
        account.close()
    else:
        account.start_attempt(1, world_size=2, num_workers=2, node=0, restarts=1)
        account.look({0: page(resumed_step=resumed), 1: page(resumed_step=resumed)})
    assert account.records[0].steps_lost == lost


@pytest.mark.parametrize(("outcome", "saved"), [("finished", 30), ("stopped", 17)])
def test_a_finished_run_has_its_last_step_on_disk(account: Ledger, outcome: Any, saved: int) -> None:
    """In any other end the ranks' own newest files need not be of one step."""
    pages = {0: page(step=30, saved_step=17, durable_step=30), 1: page(step=30, saved_step=17)}
    account.end_attempt(attempt(pages, failed_at=None, noticed_at=None), Ending(outcome=outcome, code=0))
    assert account.records[0].saved_step == saved
