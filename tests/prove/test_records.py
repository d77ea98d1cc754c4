"""Reading the witnesses of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindx_elastic.prove.records import read_lives

EVENTS: list[dict[str, Any]] = [
    {"event": "enter", "rank": 1, "directory": "d", "entered": {"weights|w": "0"}},
    {"event": "step", "number": 1, "cut": False, "begin": {"option|lr": "0.1"}, "end": {"weights|w": "1"}},
    {"event": "tail", "behind": {"option|lr": "0.2"}},
    {"event": "now", "outcome": "finished", "notes": ["a note"]},
]
LINES = [json.dumps(event) + "\n" for event in EVENTS]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_1.0000.jsonl").write_text(LINES[0] + LINES[1][:40])
    (tmp_path / "rank_0.0000.jsonl").write_text("")
    (tmp_path / "control.json").write_text("{}")
    (life,) = read_lives(tmp_path)
    assert (life.rank, life.steps, life.outcome) == (1, [], "")
