"""The agents of three nodes whose first one is lost: whatever the order in which they look, they come to one board."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindx_elastic.agent import lost_nodes, open_places, recovery
from mindx_elastic.agent import nodes as nodes_module
from mindx_elastic.agent.lifeline import Gone
from mindx_elastic.agent.lost_nodes import WholeNodesRecovery
from mindx_elastic.agent.nodes import Surroundings
from mindx_elastic.agent.vacancies import Agent, Vacancy, claim, settle_loss
from mindx_elastic.core.status_page import NODES_REPLACED, Status, WorkerPhase
from mindx_elastic.rejoin.board import BOARD_FILE, Board
from mindx_elastic.rejoin.protocol import Phase, Report
from mindx_elastic.rejoin.succession import Claim
from tests.harness import wait_until

PLACE = Vacancy(
    name="none",
    node=0,
    num_nodes=3,
    ranks=0,
    first=0,
    address="h",
    port=7,
    lifeline=8,
    host=1,
    scope="s",
    generation=0,
    attempt=0,
)


class Nodes:
    """A `NodeWatch` over a store of this test."""

    def __init__(self, arbiter: Any, node: int) -> None:
        self.arbiter, self.node, self.num_nodes, self.first = arbiter, node, 3, 0
        self.line: Any = None
        self.offers: list[Any] = []
        self.expected: list[int] = []
        self.host: Any = SimpleNamespace(
            fd=0,
            records_of=lambda rank: {"records": []},
            expect=lambda node, token: self.expected.append(node),
            is_out=False,
        )
        self.note_lost = lambda lost: None
        self.note_first_gone = self.note_whole = self.keeper = self.remember = self.give_up_seeking = lambda: None
        self.offer, self.settle_in = self.offers.append, lambda generation: None

    def claim(self, generation: int, *, refusal: str = "") -> Claim:
        own = Claim(node=self.node, refusal=refusal, port=0 if refusal else 7, address="h", lifeline=8)
        found = claim(self.arbiter, "job", "s", generation, lambda: own)
        assert found is not None
        return found

    def settle_loss(self, generation: int, lost: Sequence[int]) -> Claim:
        return settle_loss(self.arbiter, "job", "s", generation, self.node, lost)

    def agent_of(self, node: int) -> Agent:
        return Agent(node, f"agent {node}", "h", 8, node, 1)

    def follow(self, found: Claim, ranks: Sequence[int]) -> None:
        self.first = found.node


class Node:
    """One rank, and its agent's recovery."""

    def __init__(self, folder: Path, stores: tuple[Any, Any], node: int, *, before: Any = None) -> None:
        """`before`: the first node's store; else it is that of its successor, too."""
        self.node, self.nodes, self.folder = node, Nodes(stores[0], node), folder / str(node)
        self.folder.mkdir()
        page = Status(pid=100 + node, phase=WorkerPhase.TRAINING, step=7, in_place=NODES_REPLACED)
        workers: Any = SimpleNamespace(processes={node: page}, live={node: page}, statuses=lambda: {node: page})
        watch: Any = SimpleNamespace(fd=0, newest=0, start=lambda: watch, stop=lambda: None, drain=lambda: None)

        def board(generation: int) -> Any:
            return Board(stores[1], key=None, scope=f"s/{generation}", writer=3 + node)

        def first_board(generation: int) -> Any:
            return Board(before or stores[1], key=None, scope=f"s/{generation}", writer=3 + node)

        facts: dict[str, Any] = {"timeout_s": 60.0, "most": 10, "note": lambda record: None, "world_size": 3}
        facts |= {"watch": watch, "nodes": self.nodes, "place": lambda: PLACE, "folder": self.folder}
        found: Any = Surroundings(board, watch, lambda: PLACE)  # type: ignore[arg-type]
        self.recovery = WholeNodesRecovery(
            workers, first_board, lambda *_, **__: None, connect_to=lambda address, port: found, **facts
        )
        self.watch, self.board = watch, board(1)

    def lose_first(self) -> str:
        return self.recovery.lose(Gone(0, "agent 0", "", (0,), is_silent=False))

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / BOARD_FILE).read_text())
        return found


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes 1 and 2."""
    for module in (lost_nodes, open_places):
        monkeypatch.setattr(module, "_LOOK_S", 0.0)
    stores = dist.HashStore(), dist.HashStore()
    return [Node(tmp_path, stores, node) for node in (1, 2)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_both_come_to_the_board_of_the_faster_one(two: list[Node], order: tuple[int, int]) -> None:
    host, other = (two[number] for number in order)
    assert host.lose_first() == "" and host.recovery.is_active
    assert host.told() == {"generation": 1}, "its worker comes out, and waits"
    for _ in range(3):
        host.recovery.look()
    assert host.told() == {"generation": 1} and not host.nodes.offers, "the other one has not come"
    assert other.lose_first() == ""
    for _ in range(3):
        for node in (other, host):
            assert node.recovery.look() is Phase.CUT
    for node in two:
        assert node.told() == {"generation": 1, "address": "h", "port": 7}
        assert node.nodes.first == host.node
    (place,) = host.nodes.offers
    assert (place.node, place.first, place.ranks, place.generation) == (0, 0, 1, 1)
    assert not other.nodes.offers
    host.board.write("1/taken/0", {"name": "agent 9", "token": "t"})
    host.recovery.look()
    assert host.nodes.offers[1:] == [None] and host.nodes.expected == [0]
    assert host.board.read(["1/out/0"])["1/out/0"]["dead"]


def test_the_time_may_be_over_between_two_looks_at_a_free_place(
    two: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the node that has not come, not the ranks that it would have."""
    host, other = two
    assert host.lose_first() == "" and other.lose_first() == ""
    for _ in range(3):
        for node in two:
            node.recovery.look()
    assert host.nodes.offers
    monkeypatch.setattr(open_places.OpenPlaces, "look", lambda self, now, board: None)  # it came in time
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0, time=time.time)
    monkeypatch.setattr(recovery, "time", later)
    assert host.recovery.look() is Phase.FALLBACK
    assert host.recovery.reason == "no other node has taken the place of node 0 within 60 s (--rejoin-timeout)"


class LostStore:
    """Of a first node that is gone. `store` is what it was before."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        if self.store is None:
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self.store, name)


@pytest.mark.parametrize("both_know", [True, False])
@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_recovery_for_a_rank_of_the_first_node_begins_again_on_the_next_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_know: bool, is_agreed: bool
) -> None:
    """Its agent has planned it a moment before it was lost."""
    for module in (lost_nodes, open_places):
        monkeypatch.setattr(module, "_LOOK_S", 0.0)
    before, stores = LostStore(), (dist.HashStore(), dist.HashStore())
    two = [Node(tmp_path, stores, node, before=before) for node in (1, 2)]
    first = Board(before, key=None, scope="s/1", writer=3)
    first.write("1/out/0", {"dead": True})
    first.write("1/plan", {"generation": 1, "rank": 0, "cause": "killed"})
    for node in two if both_know else two[:1]:
        node.nodes.line = SimpleNamespace(fd=0, drain=lambda: None, is_out=False)
        node.watch.newest = 1
        assert node.recovery.hear_others(is_stopping=False) == 0
    for rank in (1, 2) if is_agreed else ():
        facts: dict[str, Any] = {"run_id": "r", "attempt": 0, "step": 7, "clean": True, "groups": "g"}
        first.write(f"1/out/{rank}", Report(rank=rank, **facts).to_json())
    assert two[0].recovery.look() is (Phase.AGREED if is_agreed else Phase.CUT)
    before.store = None
    for _ in range(2):
        assert two[0].recovery.look() is not Phase.FALLBACK, "it may be the first node that is gone"
    for node in two:
        assert node.lose_first() == ""
    for _ in range(3):
        for node in two:
            assert node.recovery.look() is Phase.CUT
    for node in two:
        assert node.told() == {"generation": 1, "address": "h", "port": 7}
    offers = [place for node in two for place in node.nodes.offers]
    assert [(place.node, place.generation) for place in offers] == [(0, 1)]


def test_a_board_that_is_lost_alone_ends_the_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, stores = LostStore(), (dist.HashStore(), dist.HashStore())
    node = Node(tmp_path, stores, 1, before=before)
    node.nodes.line = SimpleNamespace(fd=0, drain=lambda: None, is_out=False)
    Board(before, key=None, scope="s/1", writer=3).write("1/plan", {"generation": 1, "rank": 0, "cause": "killed"})
    node.watch.newest = 1
    assert node.recovery.hear_others(is_stopping=False) == 0
    before.store = None
    assert node.recovery.look() is Phase.CUT
    monkeypatch.setattr(lost_nodes, "SILENCE_S", -lost_nodes._LATER_S)
    assert node.recovery.look() is Phase.FALLBACK
    assert node.recovery.reason == "the workers' store does not answer, and the first node is not lost"


def test_a_board_that_does_not_answer_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "_ASK_AGAIN_S", 0.0)
    before, stores = LostStore(), (dist.HashStore(), dist.HashStore())
    node = Node(tmp_path, stores, 1, before=before)
    node.nodes.line = SimpleNamespace(fd=0, drain=lambda: None, is_out=False)
    first, facts = Board(before, key=None, scope="s/1", writer=3), {"run_id": "r", "attempt": 0, "step": 7}
    first.write("1/plan", {"generation": 1, "rank": 0, "cause": "killed"})
    first.write("1/out/0", {"dead": True})
    node.watch.newest = 1
    assert node.recovery.hear_others(is_stopping=False) == 0
    assert node.recovery.look() is Phase.CUT
    store, before.store = before.store, None
    for _ in range(3):
        assert node.recovery.look() is Phase.CUT
        wait_until(lambda: not board_threads(), "an answer, which is none")
    before.store = store
    for rank in (1, 2):
        first.write(f"1/out/{rank}", Report(rank=rank, clean=True, groups="g", **facts).to_json())  # type: ignore[arg-type]
    wait_until(lambda: node.recovery.look() is Phase.AGREED, "the answer")


def board_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mindx-board-again"]


def test_who_does_not_come_is_lost_too_and_both_places_are_offered(
    two: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_nodes, "SILENCE_S", 0.0)
    host, late = two
    assert host.lose_first() == ""
    for _ in range(4):
        host.recovery.look()
    assert [place.node for place in host.nodes.offers] == [0]
    assert late.lose_first() == ""
    assert late.recovery.is_out and not late.recovery.is_active
    host.board.write("1/taken/0", {"name": "agent 9", "token": "t"})
    host.recovery.look()
    assert [place.node for place in host.nodes.offers] == [0, 2]
    host.board.write("1/taken/2", {"name": "agent 8", "token": "u"})
    host.recovery.look()
    assert host.nodes.offers[2:] == [None] and host.nodes.expected == [0, 2]


def test_who_comes_too_late_is_out(two: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun the recovery, and then stood still."""
    monkeypatch.setattr(lost_nodes, "SILENCE_S", 0.0)
    host, late = two
    assert host.lose_first() == "" and late.lose_first() == ""
    for _ in range(4):
        host.recovery.look()
    for _ in range(2):
        late.recovery.look()
    assert late.recovery.is_out, "the plan says so"
    assert late.told() == {"generation": 1}, "its worker stays where it is"
    assert host.recovery.phase is Phase.CUT


def test_a_rank_that_cannot_go_on_in_place_restarts_all(two: list[Node]) -> None:
    one, other = two
    one.recovery._workers.statuses = lambda: {  # type: ignore[method-assign]
        1: Status(pid=101, phase=WorkerPhase.TRAINING, in_place=NODES_REPLACED, finished=1)
    }
    assert "rank 1 has finished its training" in one.lose_first()
    assert "rank 1 has finished its training" in other.lose_first()
    assert not one.recovery.is_active and not other.recovery.is_active


def test_a_node_that_the_first_one_has_lost_is_out(two: list[Node]) -> None:
    one, other = two
    settle_loss(one.nodes.arbiter, "job", "s", 1, 0, [1])
    assert one.lose_first() == "" and one.recovery.is_out
    assert "while the loss of another node is recovered" in other.lose_first()
    assert not other.recovery.is_out


def test_a_first_node_that_was_succeeded_finds_itself_out(two: list[Node], tmp_path: Path) -> None:
    one, other = two
    first = Node(tmp_path, (one.nodes.arbiter, dist.HashStore()), 0)
    first.nodes.host.put_out = lambda gone: None
    assert one.lose_first() == ""
    assert first.recovery.lose(Gone(2, "agent 2", "t", (2,), is_silent=True)) == ""
    assert first.recovery.is_out and not first.nodes.offers
    assert not other.recovery.is_out


def test_a_rank_that_dies_while_the_nodes_meet_calls_it_off_for_all(two: list[Node]) -> None:
    host, other = two
    assert host.lose_first() == "" and other.lose_first() == ""
    host.recovery.look()
    other.recovery.look()
    end: Any = SimpleNamespace(rank=2)
    other.recovery.hear_end(end)
    for _ in range(2):
        assert other.recovery.look() is Phase.FALLBACK
        phase = host.recovery.look()
    assert phase is Phase.FALLBACK and "rank 2 has died while the nodes met anew" in host.recovery.reason
