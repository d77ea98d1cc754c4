from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from mindx_elastic.prove.causes import Explained
from mindx_elastic.prove.proof import Proof, Row, Verdict
from mindx_elastic.prove.records import parse_life, read_lives
from mindx_elastic.prove.report import to_json, to_junit


def proof_with(*verdicts: Verdict) -> Proof:
    rows = [Row(name=f"run {n}", verdict=verdict, resumed=n, compared=3) for n, verdict in enumerate(verdicts)]
    return Proof(steps=9, has_ended=True, num_ranks=2, rows=rows)


FOUND = Explained(what="lr <differs>", cause="a scheduler", remedy="Name it", also="weights", variables="n: 2, and 0")
EQUAL = Verdict(outcome="equal")
DIFFERS = Verdict(outcome="differs", explained=FOUND, rank=1, step=4)


def test_the_exit_code_is_that_of_the_first_verdict_that_is_not_equal() -> None:
    assert proof_with(EQUAL, EQUAL).exit_code == 0
    assert proof_with(EQUAL, DIFFERS, Verdict(outcome="refused")).exit_code == 1
    assert proof_with(Verdict(outcome="not deterministic")).exit_code == 3
    assert proof_with(Verdict(outcome="refused")).exit_code == 4
    assert proof_with(Verdict(outcome="fails")).exit_code == 4


def test_json() -> None:
    document = to_json(proof_with(EQUAL, DIFFERS), command=["train.py"], seconds=1.25, repeat=["x", "9"])
    assert (document["schema"], document["outcome"], document["exit_code"], document["ranks"]) == (1, "differs", 1, 2)
    assert document["repeat"] == ["x", "9"]
    good, bad = document["runs"]
    assert good["first_difference"] is None
    assert bad["first_difference"] == {
        "rank": 1,
        "step": 4,
        "what": "lr <differs>",
        "cause": "a scheduler",
        "remedy": "Name it",
        "also": "weights",
        "variables": "n: 2, and 0",
    }


def test_junit() -> None:
    failed = Verdict(outcome="fails", explained=FOUND, lines=["Traceback \x1b[1m", "KeyError"])
    suite = ElementTree.fromstring(to_junit(proof_with(EQUAL, DIFFERS, failed), command=["t.py"], seconds=2))
    assert suite.attrib["tests"] == "3" and suite.attrib["failures"] == "1" and suite.attrib["errors"] == "1"
    cases = suite.findall("testcase")
    assert [len(case) for case in cases] == [0, 1, 1]
    failure, error = cases[1].find("failure"), cases[2].find("error")
    assert failure is not None and failure.attrib["message"] == "lr <differs>"
    assert "what to write: Name it" in (failure.text or "")
    assert "variables of the program that the resumed run did not get back: n: 2, and 0" in (failure.text or "")
    assert error is not None and "\\x1b[1m" in (error.text or "")


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
        "begin": {"torch": "a"},
        "fetched": [{"loader": 0, "batch": "b", "streams": {"torch": "a"}}],
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
    assert (step.batches, step.inputs, step.scalars) == (("b",), {"model": ("x",)}, {"scalar|loss": "1.0"})
    assert (life.outcome, life.notes) == ("finished", ("a note",))


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_1.0000.jsonl").write_text(LINES[0] + LINES[1][:40])
    (tmp_path / "rank_0.0000.jsonl").write_text("")
    (tmp_path / "control.json").write_text("{}")
    (life,) = read_lives(tmp_path)
    assert (life.rank, life.steps, life.outcome) == (1, [], "")
