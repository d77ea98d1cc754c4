from __future__ import annotations

from xml.etree import ElementTree

from mindx_elastic.prove.baseline import Proof, Row, Verdict
from mindx_elastic.prove.causes import Explained
from mindx_elastic.prove.report import to_json, to_junit


def proof_with(*verdicts: Verdict) -> Proof:
    rows = [Row(name=f"run {n}", verdict=verdict, resumed=n, compared=3) for n, verdict in enumerate(verdicts)]
    return Proof(steps=9, has_ended=True, num_ranks=2, rows=rows)


FOUND = Explained(what="lr <differs>", cause="a scheduler", remedy="Name it", variables="n: 2, now 0")
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
        "variables": "n: 2, now 0",
    }


def test_junit() -> None:
    failed = Verdict(outcome="fails", explained=FOUND, lines=["Traceback \x1b[1m", "KeyError"])
    suite = ElementTree.fromstring(to_junit(proof_with(EQUAL, DIFFERS, failed), command=["t.py"], seconds=2))
    assert suite.attrib["tests"] == "3" and suite.attrib["failures"] == "1" and suite.attrib["errors"] == "1"
    cases = suite.findall("testcase")
    assert [len(case) for case in cases] == [0, 1, 1]
    failure, error = cases[1].find("failure"), cases[2].find("error")
    assert failure is not None and failure.attrib["message"] == "lr <differs>; not got back: n: 2, now 0"
    assert (failure.text or "").splitlines() == [
        "lr <differs>; not got back: n: 2, now 0",
        "usual cause: a scheduler. Name it",
    ]
    assert error is not None and "\\x1b[1m" in (error.text or "")
