from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindx_elastic.agent.ledger import (
    FAILED,
    FINISHED,
    NEW_NODE,
    STOPPED,
    AttemptRecord,
    Ledger,
    add_up,
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
