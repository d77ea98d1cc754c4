"""Which faults are drawn, and what a result says in all its forms."""

from __future__ import annotations

import itertools
import json
from typing import Any

from mindx_elastic.drill.drill import Drill, DrillResult, _said, cells, draw_faults, summary, trained_again
from mindx_elastic.drill.faults import KINDS, Fault
from mindx_elastic.prove.causes import Explained
from mindx_elastic.prove.proof import ProofReport, Row
from mindx_elastic.prove.records import ProcessRecord, WitnessedStep

PLACES = [(0, 1), (0, 2), (1, 1)]


def drawn(number: int, *, agent: bool, seed: int = 3) -> list[Fault]:
    return list(itertools.islice(draw_faults(PLACES, ranks=2, agent=agent, seed=seed), number))


def test_the_same_seed_draws_the_same_faults() -> None:
    assert drawn(20, agent=True) == drawn(20, agent=True)
    assert drawn(20, agent=True) != drawn(20, agent=True, seed=4)


def test_all_kinds_and_places_are_drawn_and_those_of_an_agent_only_where_there_is_one() -> None:
    for agent in (False, True):
        faults = drawn(800, agent=agent)
        kinds = {kind.name for kind in KINDS.values() if kind.by_chance and (agent or not kind.agent)}
        assert {fault.kind for fault in faults} == kinds
        assert {fault.at for fault in faults} == {"boundary", "forward", "update"}
        assert {(fault.guard, fault.step) for fault in faults} == set(PLACES)
        assert {fault.rank for fault in faults} == {0, 1}


def made(*outcomes: str) -> Drill:
    proof = ProofReport(steps=9, num_ranks=2, rows=[Row(name="uninterrupted", outcome="equal")])
    explained = Explained(what="weights differ", cause="a draw", remedy="none")
    results = [
        DrillResult(
            fault=Fault(kind="kill", rank=1, step=4),
            outcome=outcome,
            explained=None if outcome == "exact" else explained,
            codes=[-9, 0],
            reached=4,
            resumed=3 if outcome == "exact" else None,
            lost=1 if outcome == "exact" else 4,
            step=5,
            again_s=2.0,
        )
        for outcome in outcomes
    ]
    return Drill(proof, results)


def test_the_exit_code_is_of_the_worst() -> None:
    assert made("exact", "inexact as said").exit_code == 0
    for bad in ("not fired", "failed", "differs"):
        assert made("exact", bad).exit_code == 1
    assert made().exit_code == 1, "no fault has fired"
    failed = made("exact")
    failed.proof.rows[0] = Row(name="uninterrupted", outcome="not deterministic")
    assert failed.exit_code == 3


def test_one_result_in_all_forms() -> None:
    drill = made("exact", "differs", "not fired")
    name = "kill:rank=1,step=4,at=boundary"
    assert cells(drill.results[0]) == (name, "-9 0", "4", "3", "1", "2.00", "exact")
    assert cells(drill.results[1])[3:5] == ("fresh", "4") and cells(drill.results[1])[-1] == "differs at step 5"
    assert summary(drill) == "2 of 3 faults fired: 1 exact, 1 differs, 1 not fired; 9 steps done again"
    document = drill.document
    assert [each["outcome"] for each in document["faults"]] == ["exact", "differs", "not fired"]
    assert document["exit_code"] == 1 and document["faults"][1]["explained"]["what"] == "weights differ"
    assert json.loads(json.dumps(document))["faults"][0]["fault"] == name


def test_what_resumed_processes_have_said_against_an_exact_resume() -> None:
    def life(*notes: str, resumed: int | None = None) -> ProcessRecord:
        return ProcessRecord(rank=0, series=0, resumed=resumed, notes=notes)

    exact: dict[str, Any] = {"event": "resume", "exact": True, "unmanaged": []}
    inexact = {**exact, "exact": False}
    known = [life("a queue is not named")]
    assert _said([exact], [life("a queue is not named", resumed=3)], known) == "", "the uninterrupted run says it, too"
    assert _said([exact], [life("its numbers start over", resumed=3)], known) == "its numbers start over"
    assert _said([exact], [life("its numbers start over")], known) == "", "it has not resumed"
    assert _said([exact, inexact], [life(resumed=3)], known) == "its resume says so (exact: false)"


def test_a_job_trains_again_when_every_rank_has_passed_a_step() -> None:
    def life(rank: int, began: float, *steps: float) -> ProcessRecord:
        made = [WitnessedStep(series=0, number=5, clock=each) for each in steps]
        return ProcessRecord(rank=rank, series=0, clock=began, steps=made)

    before = [life(0, -9.0, -8.0, 0.1), life(1, -9.0, -8.0)]
    assert trained_again([*before, life(0, 4.0, 6.0, 7.0), life(1, 4.0, 8.0, 9.0)], 0.0) == 8.0
    assert trained_again([*before, life(0, 4.0), life(0, 7.0, 9.0), life(1, 4.0, 8.0)], 0.0) == 9.0, "its second start"
    assert trained_again(before, 0.0) is None
    assert trained_again([*before, life(0, 4.0, 6.0), life(1, 4.0)], 0.0) is None
