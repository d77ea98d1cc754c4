from __future__ import annotations

import json
from dataclasses import replace

from mindx_elastic.prove.causes import Explained
from mindx_elastic.prove.compare import VariableNotRestored
from mindx_elastic.prove.proof import ProofReport, Row


def proof_with(*rows: Row) -> ProofReport:
    named = [replace(row, name=f"run {n}", resumed=n, compared=3) for n, row in enumerate(rows)]
    return ProofReport(steps=9, has_ended=True, num_ranks=2, rows=named)


EQUAL = Row(outcome="equal")
DIFFERS = Row(outcome="differs", explained=Explained(what="lr <differs>", cause="a scheduler"), rank=1, step=4)


def test_the_exit_code_is_that_of_the_first_verdict_that_is_not_equal() -> None:
    assert proof_with(EQUAL, EQUAL).exit_code == 0
    assert proof_with(EQUAL, DIFFERS, Row(outcome="refused")).exit_code == 1
    assert proof_with(Row(outcome="not deterministic")).exit_code == 3
    assert proof_with(Row(outcome="refused")).exit_code == 4
    assert proof_with(Row(outcome="fails")).exit_code == 4


def test_json() -> None:
    differs = replace(DIFFERS, lost=[VariableNotRestored("n", "2", "0")])
    document = json.loads(json.dumps(proof_with(EQUAL, differs).document))
    assert (document["outcome"], document["exit_code"], document["ranks"]) == ("differs", 1, 2)
    good, bad = document["runs"]
    assert good["explained"] is None and (bad["rank"], bad["step"]) == (1, 4)
    assert bad["explained"] == {"what": "lr <differs>", "cause": "a scheduler", "remedy": "", "variables": ""}
    assert bad["lost"] == [{"name": "n", "first": "2", "second": "0"}]
