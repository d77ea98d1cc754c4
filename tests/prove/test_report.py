from __future__ import annotations

from dataclasses import replace

from mindx_elastic.prove.causes import Explained
from mindx_elastic.prove.proof import ProofReport, Row, to_json


def proof_with(*rows: Row) -> ProofReport:
    named = [replace(row, name=f"run {n}", resumed=n, compared=3) for n, row in enumerate(rows)]
    return ProofReport(steps=9, has_ended=True, num_ranks=2, rows=named)


FOUND = Explained(what="lr <differs>", cause="a scheduler", remedy="Name it", variables="n: 2, now 0")
EQUAL = Row(outcome="equal")
DIFFERS = Row(outcome="differs", explained=FOUND, rank=1, step=4)


def test_the_exit_code_is_that_of_the_first_verdict_that_is_not_equal() -> None:
    assert proof_with(EQUAL, EQUAL).exit_code == 0
    assert proof_with(EQUAL, DIFFERS, Row(outcome="refused")).exit_code == 1
    assert proof_with(Row(outcome="not deterministic")).exit_code == 3
    assert proof_with(Row(outcome="refused")).exit_code == 4
    assert proof_with(Row(outcome="fails")).exit_code == 4


def test_json() -> None:
    document = to_json(proof_with(EQUAL, DIFFERS), command=["train.py"], seconds=1.25)
    assert (document["schema"], document["outcome"], document["exit_code"], document["ranks"]) == (2, "differs", 1, 2)
    good, bad = document["runs"]
    assert good["first_difference"] is None
    assert bad["first_difference"] == {
        "rank": 1,
        "step": 4,
        "what": "lr <differs>",
        "cause": "a scheduler",
        "remedy": "Name it",
        "variables": "n: 2, now 0",
    }
