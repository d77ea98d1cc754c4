"""Reading the witnesses of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindx_elastic.prove.records import parse_life, read_lives

EVENTS: list[dict[str, Any]] = [
    {
        "event": "enter",
        "series": 0,
        "directory": "d",
        "prefix": "p",
        "resumed": None,
        "epoch": 0,
        "world_size": 1,
        "end": {"changed": {"weights|w": "0", "flag|t": "True"}, "gone": []},
    },
    {
        "event": "step",
        "series": 0,
        "step": 1,
        "epoch": 1,
        "step_in_epoch": 1,
        "num_batches": 5,
        "cut": False,
        "forward": {"streams": {"torch": "a"}, "sample": {"changed": {"option|lr": "0.1"}, "gone": []}},
        "inputs": {"model": ["x"]},
        "scalars": {"loss": "1.0"},
        "streams": {"torch": "c"},
        "end": {"changed": {"weights|w": "1"}, "gone": ["flag|t"]},
    },
    {"event": "leave", "series": 0, "outcome": "finished", "notes": ["a note"]},
]
LINES = [json.dumps(event) + "\n" for event in EVENTS]


def test_witnesses_are_put_together_from_what_has_changed() -> None:
    life = parse_life(0, LINES)
    assert life is not None
    (step,) = life.steps
    assert life.entered == {"weights|w": "0", "flag|t": "True"}
    assert step.given == {"weights|w": "0", "flag|t": "True", "option|lr": "0.1"}
    assert step.end == {"weights|w": "1", "option|lr": "0.1"}
    assert step.place == (0, 1) and not step.cut
    assert (step.inputs, step.scalars) == ({"model": ("x",)}, {"scalar|loss": "1.0"})
    assert (life.outcome, life.notes) == ("finished", ("a note",))


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_1.0000.jsonl").write_text(LINES[0] + LINES[1][:40])
    (tmp_path / "rank_0.0000.jsonl").write_text("")
    (tmp_path / "control.json").write_text("{}")
    (life,) = read_lives(tmp_path)
    assert (life.rank, life.steps, life.outcome) == (1, [], "")
