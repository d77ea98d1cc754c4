"""Seconds from a fault on, out of events and witnesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindx_elastic.drill.phases import Phases, all_events, find_phases
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep

FIRED, OFFSET = 100.0, 5000.0


def event(seconds: float, name: str, outcome: str | None = None) -> dict[str, Any]:
    """`seconds` after the fault."""
    return {"time": FIRED + OFFSET + seconds, "event": name, "outcome": outcome}


def life(rank: int, seconds: float, *steps: float) -> ProcessRecord:
    made = [WitnessedStep(series=0, number=5 + index, clock=FIRED + each) for index, each in enumerate(steps)]
    return ProcessRecord(rank=rank, series=0, clock=FIRED + seconds, steps=made)


def test_each_phase_is_counted_from_the_fault() -> None:
    events = [
        *(event(-3.0, "alarm"), event(-2.0, "save", "saved")),
        *(event(0.5, "worker_end", "finished"), event(1.0, "alarm"), event(1.2, "alarm")),
        *(event(2.0, "save", "saved"), event(2.5, "durable"), event(3.0, "save", "failed: x")),
        *(event(4.0, "resume", "resumed"), event(4.5, "save", "saved"), event(99.0, "durable")),
    ]
    lives = [life(0, -9.0, -8.0, 0.1), life(1, -9.0, -8.0), life(0, 4.0, 6.0, 7.0), life(1, 4.0, 8.0, 9.0)]
    assert find_phases(events, lives, fired=FIRED, offset=OFFSET) == Phases(noticed_s=1.0, saved_s=2.5, step_s=8.0)


def test_a_job_that_did_not_go_on() -> None:
    assert find_phases([], [life(0, -9.0, -8.0)], fired=FIRED, offset=OFFSET) == Phases()
    one_is_missing = [life(0, 4.0, 6.0), life(1, 4.0)]
    assert find_phases([], one_is_missing, fired=FIRED, offset=OFFSET).step_s is None


def test_a_rank_that_was_started_twice_counts_with_its_first_step() -> None:
    lives = [life(0, 1.0), life(0, 4.0, 6.0), life(0, 7.0, 9.0)]
    assert find_phases([], lives, fired=FIRED, offset=OFFSET).step_s == 6.0


def test_events_are_found_below_the_folders_and_in_order(tmp_path: Path) -> None:
    lines = {"a": [event(2, "alarm"), event(4, "durable")], "b/c": [event(3, "save", "saved")]}
    for name, events in lines.items():
        (tmp_path / name).mkdir(parents=True)
        text = "".join(json.dumps(each) + "\n" for each in events)
        (tmp_path / name / "events.jsonl").write_text(text + '{"time": 3, "ev')
    assert [each["event"] for each in all_events([tmp_path])] == ["alarm", "save", "durable"]
