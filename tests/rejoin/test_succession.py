"""Who succeeds a lost first node: agents that see it at different times, or not at all, in any order."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindx_elastic.rejoin.succession import Claim, Meaning, Standing, assemble, keepers, meaning


class Cell:
    """The note in the store of the rendezvous."""

    def __init__(self) -> None:
        self.claim: Claim | None = None

    def put(self, own: Claim) -> Claim:
        self.claim = self.claim or own
        return self.claim

    def settle(self, node: int, lost: tuple[int, ...]) -> Claim:
        """As `agent.vacancies.settle_loss`."""
        before = self.claim or Claim(node=node)
        if before.node == node and not before.refusal:
            self.claim = Claim(node=node, port=before.port, lost=lost)
        return self.claim or before


nodes = st.integers(2, 5)


@given(nodes, st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["claim", "refuse", "lose"])), max_size=12))
def test_at_most_one_node_hosts_and_who_is_out_hosts_nothing(num: int, deeds: list[tuple[int, str]]) -> None:
    """Node 0 is the first one, and may live on: it loses others while these lose it."""
    cell = Cell()
    read: dict[int, Meaning] = {}
    lost: tuple[int, ...] = ()
    is_out = set()
    for number, deed in deeds:
        node = number % num
        if node == 0 and deed == "lose":
            lost = tuple(sorted({*lost, 1 + len(lost) % (num - 1)}))
            if cell.settle(0, lost).node != 0:
                is_out.add(0)
        elif node > 0 and deed in ("claim", "refuse"):
            own = Claim(node=node, refusal="it cannot") if deed == "refuse" else Claim(node=node, port=5)
            read[node] = meaning(cell.put(own), node=node, first=0)
    hosts = {node for node, what in read.items() if what is Meaning.HOSTS}
    out = {node for node, what in read.items() if what is Meaning.OUT}
    assert len(hosts) <= 1
    assert not out or not hosts, "the first node lives, and nobody has succeeded it"
    if hosts:
        assert all(what in (Meaning.HOSTS, Meaning.FOLLOWS) for what in read.values())
        assert cell.settle(0, (1,)).node in hosts, "the first node finds itself out, whenever it looks"
    if 0 in is_out:
        assert cell.claim is not None and (cell.claim.refusal or cell.claim.node != 0)


@given(nodes, st.data())
def test_the_new_host_loses_the_nodes_that_have_not_come(num: int, data: Any) -> None:
    host = data.draw(st.integers(1, num - 1))
    others = [node for node in range(1, num) if node != host]
    come = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    generations = {node: data.draw(st.sampled_from([3, 3, 3, 2])) for node in come}
    is_late = data.draw(st.booleans())
    said = {node: Standing(generation) for node, generation in generations.items()}
    found = assemble(num, 3, said, first=0, node=host, is_late=is_late)
    if set(generations.values()) - {3}:
        assert found.refusal and not found.is_complete
        return
    assert not found.refusal
    assert found.is_complete == (is_late or set(come) == set(others))
    if found.is_complete:
        assert 0 in found.lost and host not in found.lost
        assert sorted([*found.lost, host, *come]) == list(range(num)), "each node is lost, or takes part"


def test_a_first_node_that_comes_to_the_next_one_is_not_believed() -> None:
    assert assemble(3, 1, {0: Standing(1)}, first=0, node=1, is_late=False).refusal


def test_a_loss_of_another_node_under_way_ends_in_a_restart() -> None:
    """And the node that it is about is out."""
    claim = Claim(node=0, lost=(2,))
    assert [meaning(claim, node=node, first=0) for node in (1, 2)] == [Meaning.RESTART, Meaning.OUT]
    assert meaning(Claim(node=1, port=5, lost=(0, 2)), node=1, first=0) is Meaning.HOSTS


@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_some_node_keeps_the_records_of_each_rank_after_the_loss_of_the_first_and_another(num: int) -> None:
    for first in range(num):
        assert first in keepers(first, num)
        for node in range(num):
            mine = keepers(first, num, node)
            assert node not in mine and len(mine) == min(2, num - 1) and set(mine) <= set(keepers(first, num))
        for other, node in combinations(range(num), 2):
            if num > 2 and first in (other, node):
                for lost in (other, node):
                    assert set(keepers(first, num, lost)) - {other, node}


@given(
    st.builds(
        Claim,
        node=st.integers(0, 9),
        refusal=st.text(max_size=9),
        address=st.text(max_size=9),
        port=st.integers(0, 65535),
        lifeline=st.integers(0, 65535),
        lost=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    )
)
def test_a_claim_is_read_as_it_was_written(claim: Claim) -> None:
    assert Claim.from_json(claim.to_json()) == claim


@pytest.mark.parametrize("wrong", [{"node": -1}, {"port": 1 << 16}, {"lifeline": -1}, {"lost": 3}, {"node": "x"}])
def test_a_claim_that_makes_no_sense_is_none(wrong: dict[str, Any]) -> None:
    content = {**json.loads(Claim(node=1, port=2).to_json()), **wrong}
    with pytest.raises((ValueError, TypeError)):
        Claim.from_json(json.dumps(content))
