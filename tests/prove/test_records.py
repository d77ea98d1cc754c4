"""Reading the witnesses of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindx_elastic.prove.records import parse_life, read_lives

EVENTS: list[dict[str, Any]] = [
    {"event": "enter", "rank": 1, "directory": "d", "entered": {"weights|w": "0"}},
    {"event": "step", "number": 1, "cut": False, "begin": {"option|lr": "0.1"}, "end": {"weights|w": "1"}},
    {"event": "tail", "behind": {"option|lr": "0.2"}},
    {"event": "now", "outcome": "finished", "notes": ["a note"]},
]
LINES = [json.dumps(event) + "\n" for event in EVENTS]


def test_a_life_is_put_together_from_its_lines() -> None:
    life = parse_life(LINES)
    assert life is not None and (life.rank, life.entered) == (1, {"weights|w": "0"})
    (step,) = life.steps
    assert (step.begin, step.end, step.behind) == ({"option|lr": "0.1"}, {"weights|w": "1"}, {"option|lr": "0.2"})
    assert step.place == (0, 1) and not step.cut
    assert (life.outcome, life.notes) == ("finished", ["a note"])


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_1.0000.jsonl").write_text(LINES[0] + LINES[1][:40])
    (tmp_path / "rank_0.0000.jsonl").write_text("")
    (tmp_path / "control.json").write_text("{}")
    (life,) = read_lives(tmp_path)
    assert (life.rank, life.steps, life.outcome) == (1, [], "")
