"""What the loss of a node means, in every state that a recovery can be in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.rejoin.lost_node import FIRST, Answer, answer, keepers, why_in_vain
from mindx_elastic.rejoin.protocol import Coordinator, Phase, Report

WORLD = 6
NODES = (range(2), range(2, 4), range(4, 6))


def report(rank: int, *, step: int = 7, clean: bool = True) -> Report:
    facts: dict[str, Any] = {"run_id": "run", "attempt": 0, "groups": "g"}
    return Report(rank=rank, step=step, clean=clean, **facts)


events = st.lists(
    st.tuples(st.sampled_from(["begin", "report", "behind", "dead", "state", "ready"]), st.integers(0, WORLD - 1)),
    max_size=14,
)


def machine_after(schedule: Sequence[tuple[str, int]]) -> Coordinator:
    machine = Coordinator(WORLD)
    for what, rank in schedule:
        if what == "begin" and machine.phase is Phase.RUN:
            machine.begin([rank])
        elif what in ("report", "behind"):
            machine.note_report(report(rank, step=7 if what == "report" else 6))
        elif what == "dead":
            machine.note_death(rank)
        elif what == "state":
            machine.note_state()
        elif what == "ready":
            machine.note_ready(rank)
    return machine


@given(events, st.sampled_from(NODES[1:]), st.booleans(), st.booleans())
def test_a_place_is_open_only_where_no_dead_rank_counts_as_alive(
    schedule: list[tuple[str, int]], node: range, has_joined: bool, is_open: bool
) -> None:
    machine = machine_after(schedule)
    before = machine.phase
    if before is Phase.RUN:
        return
    found = answer(machine, node, has_joined=has_joined, is_open=is_open)
    assert machine.phase is before, "it only answers"
    if before is Phase.FALLBACK:
        assert found is Answer.NOTHING
    elif found is Answer.OPEN:
        assert not has_joined and not machine.has_state
        assert not is_open or before is Phase.CUT, "two places at once: before anybody has counted the ranks"
        for rank in node:
            assert machine.reports.get(rank) is None
            # What the first node's agent does once somebody has come:
            machine.note_death(rank) if rank not in machine.reports else None
        assert machine.phase is not Phase.FALLBACK or machine.verdict is not None
        if machine.verdict is not None and not machine.verdict.refusal:
            assert set(node) <= set(machine.verdict.dead)
    else:
        assert found is Answer.CALL_OFF


@given(st.permutations(range(4)), st.integers(0, 3))
def test_a_lost_node_is_opened_whatever_the_order_of_the_others_reports(order: list[int], lost_after: int) -> None:
    """The ranks of nodes 0 and 1 report; node 2 is lost somewhere in between."""
    machine = Coordinator(WORLD)
    machine.begin([])
    for number, rank in enumerate(order):
        if number == lost_after:
            assert answer(machine, NODES[2], has_joined=False, is_open=False) is Answer.OPEN
        machine.note_report(report(rank))
    assert machine.phase.value == "cut", "it waits for another node"
    assert not why_in_vain(machine, NODES[2])
    for rank in NODES[2]:
        machine.note_death(rank)
    assert machine.phase is Phase.AGREED and machine.verdict is not None
    assert machine.verdict.dead == tuple(NODES[2]) and machine.verdict.donor in range(4)


def test_nobody_waits_for_a_node_that_could_not_help() -> None:
    machine = Coordinator(WORLD)
    machine.begin([])
    for rank in range(3):
        machine.note_report(report(rank, clean=False))
    assert not why_in_vain(machine, NODES[2]), "one has not reported"
    machine.note_report(report(3, clean=False))
    assert "cut off in an update" in why_in_vain(machine, NODES[2])


@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_some_node_keeps_the_records_of_each_rank_after_the_loss_of_the_first_and_another(num: int) -> None:
    assert FIRST in keepers(num)
    for node in range(num):
        mine = keepers(num, node)
        assert node not in mine and len(mine) == min(2, num - 1) and set(mine) <= set(keepers(num))
        if num > 2 and node != FIRST:
            assert all(set(keepers(num, lost)) - {FIRST, node} for lost in (FIRST, node))


def test_nobody_waits_for_the_place_of_a_node_whose_report_has_come_late() -> None:
    machine = Coordinator(WORLD)
    machine.begin([])
    assert answer(machine, NODES[2], has_joined=False, is_open=False) is Answer.OPEN
    machine.note_report(report(NODES[2][0]))
    assert "the others count on it" in why_in_vain(machine, NODES[2])
