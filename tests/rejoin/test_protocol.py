"""The rules of a recovery in place: whatever dies, reports, refuses or stays silent, in any order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.rejoin.protocol import Coordinator, Fallback, Phase, Report, decide

RANKS = 5


def report(rank: int, step: int = 7, **more: Any) -> Report:
    facts: dict[str, Any] = {"run_id": "run", "attempt": 3, "clean": True, "groups": "g"}
    return Report(rank=rank, step=step, **{**facts, **more})


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, Report | None]:
    """What each rank of a world has come to: steps that differ by at most one, torn updates, refusals."""
    size, step = draw(st.integers(2, RANKS)), draw(st.integers(0, 3))
    found: dict[int, Report | None] = {}
    for rank in range(size):
        found[rank] = None
        if draw(st.integers(0, 3)):
            found[rank] = report(
                rank,
                step + draw(st.integers(0, 1)),
                clean=draw(st.integers(0, 3)) > 0,
                groups=draw(st.sampled_from("gggggh")),
                attempt=draw(st.sampled_from([3, 3, 3, 3, 4])),
                problem=draw(st.sampled_from(["", "", "", "", "no"])),
                lacked=draw(st.sampled_from([[], [], ["ema"]])),
            )
    return found


@given(worlds())
def test_all_go_on_from_the_most_advanced_boundary_that_some_rank_is_whole_at(
    reports: dict[int, Report | None],
) -> None:
    alive = [each for each in reports.values() if each is not None]
    verdict = decide(reports, world_size=len(reports))
    if verdict.refusal:
        assert verdict == type(verdict)(refusal=verdict.refusal)
        return
    assert verdict.dead == tuple(rank for rank, each in reports.items() if each is None)
    assert verdict.dead
    donor = reports[verdict.donor]
    assert donor is not None
    assert donor.clean
    assert not donor.lacked
    assert donor.step == verdict.step >= 1
    assert all(each.step <= verdict.step for each in alive), "no survivor's step may be lost"
    for each in alive:
        holds_it = each.clean and each.step == verdict.step
        assert (each.rank in verdict.behind) == (not holds_it)
    assert set(verdict.needy) == {*verdict.dead, *verdict.behind}
    assert verdict.donor not in verdict.needy
    assert len({(each.run_id, each.attempt, each.groups, each.problem) for each in alive}) == 1


@given(worlds())
def test_there_is_a_verdict_whenever_a_whole_rank_is_furthest(reports: dict[int, Report | None]) -> None:
    """A refusal costs a restart, so it must have its reason."""
    alive = [each for each in reports.values() if each is not None]
    clean = [each.step for each in alive if each.clean]
    expected = (
        0 < len(alive) < len(reports)
        and bool(clean)
        and max(clean) == max(each.step for each in alive) >= 1
        and len({(each.attempt, each.groups) for each in alive}) == 1
        and not any(each.problem for each in alive)
        and not all(each.lacked for each in alive if each.clean and each.step == max(clean))
    )
    assert (not decide(reports, world_size=len(reports)).refusal) == expected


@given(worlds())
def test_a_report_is_the_same_after_it_has_been_written_and_read(reports: dict[int, Report | None]) -> None:
    for rank, each in reports.items():
        if each is not None:
            assert Report.from_json(rank, json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize(
    "change",
    [{"step": -1}, {"attempt": 1 << 64}, {"step": "seven"}, {"orders": 3}, {"orders": {"m": ["x"]}}, {"step": None}],
)
def test_what_is_no_report_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Report.from_json(1, {**report(1).to_json(), **change})


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ({0: report(0), 1: report(1)}, "none is dead"),
        ({0: None, 1: None}, "no rank is left"),
        ({0: report(0, problem="the ranks hold different parts"), 1: None}, "rank 0: the ranks hold different parts"),
        ({0: report(0), 1: report(1, attempt=4), 2: None}, "different attempts"),
        ({0: report(0), 1: report(1, groups="h"), 2: None}, "different process groups"),
        ({0: report(0, clean=False), 1: None}, "rank 0 was cut off in an update: none has"),
        ({0: report(0, clean=False), 1: None, 2: report(2, clean=False)}, "ranks 0, 2 were all cut off in an update"),
        ({0: report(0, 7), 1: report(1, 8, clean=False), 2: None}, "furthest was cut off"),
        ({0: report(0, 0), 1: None}, "too early"),
        ({0: None, 1: report(1, lacked=["ema"])}, "no living rank has all modules of step 7: ema not on every rank"),
    ],
)
def test_a_refusal_says_why(reports: dict[int, Report | None], words: str) -> None:
    assert words in decide(reports, world_size=len(reports)).refusal


EVENTS = st.tuples(
    st.sampled_from(
        ["die", "die", "report", "report", "report", "report", "torn", "problem", "state", "ready", "ready", "refuse"]
    ),
    st.integers(0, RANKS - 1),
)


def play(machine: Coordinator, name: str, rank: int) -> None:
    if name == "die":
        machine.note_death(rank)
    elif name in ("report", "torn", "problem"):
        machine.note_report(report(rank, clean=name != "torn", problem="no" if name == "problem" else ""))
    elif name == "state":
        machine.note_state()
    elif name == "ready":
        machine.note_ready(rank)
    else:
        machine.note_refusal("time is up")


@given(st.integers(2, RANKS), st.data())
def test_whatever_happens_a_recovery_succeeds_with_all_or_falls_back_with_a_reason(
    size: int, data: st.DataObject
) -> None:
    machine = Coordinator(size)
    dead = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size))
    machine.begin(dead)
    is_over = False
    for name, rank in data.draw(st.lists(EVENTS, max_size=40)):
        if rank >= size:
            continue
        before = (machine.phase, machine.verdict, machine.has_state, machine.reason, machine.fallback)
        play(machine, name, rank)
        if is_over:
            assert (machine.phase, machine.verdict, machine.has_state, machine.reason, machine.fallback) == before
        if before[1] is not None:
            assert machine.verdict == before[1], "a verdict is final"
        is_over = machine.phase in (Phase.RUN, Phase.FALLBACK)
        if machine.phase is Phase.RUN:
            assert machine.has_state
            assert machine.ready == set(range(size))
            assert machine.verdict is not None
            assert not machine.verdict.refusal
        elif machine.phase is Phase.FALLBACK:
            assert machine.reason
            assert machine.fallback is (Fallback.KILL if machine.has_state else Fallback.SAVE)
        else:
            assert machine.missing, "what it waits for can be named"
        if machine.phase is Phase.AGREED:
            assert machine.verdict is not None
            assert not machine.verdict.refusal


@given(st.integers(2, RANKS), st.data())
def test_it_succeeds_where_nothing_more_happens(size: int, data: st.DataObject) -> None:
    """Deaths before a rank's own report only make more places to fill; some rank has to be left."""
    machine = Coordinator(size)
    for generation in range(1, data.draw(st.integers(1, 3)) + 1):
        order = data.draw(st.permutations(range(size)))
        number = data.draw(st.integers(1, size - 1))
        first, later, alive = order[:1], order[1:number], order[number:]
        machine.begin(first)
        assert machine.generation == generation
        for rank in data.draw(st.permutations([*later, *alive])):
            play(machine, "die" if rank in later else "report", rank)
        assert machine.phase is Phase.AGREED, machine.reason
        assert machine.verdict is not None
        assert set(machine.verdict.dead) == {*first, *later}
        for name, rank in data.draw(st.permutations([("state", 0), *(("ready", each) for each in range(size))])):
            assert machine.missing
            play(machine, name, rank)
        assert not machine.missing
        machine.note_refusal("too late")
        assert not machine.reason
