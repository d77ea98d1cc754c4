"""An agent's connections to the other nodes' agents: over meetings that come to nothing, and when the first is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from mindx_elastic.agent import failure_detector, heartbeat, node_watch
from mindx_elastic.agent.node_watch import NodeWatch
from mindx_elastic.agent.rendezvous import HostedStoreRendezvous
from tests.harness import wait_until


def meeting(node: int = 0, store: Any = None) -> HostedStoreRendezvous:
    """Of two nodes, of which the other one does nothing."""

    def meet() -> RendezvousInfo:
        return RendezvousInfo(dist.HashStore(), node, 2, RendezvousStoreInfo("127.0.0.1", 0))

    inner: Any = SimpleNamespace(next_rendezvous=meet, get_run_id=lambda: "job", _store=store or dist.HashStore())
    return HostedStoreRendezvous(inner)


def watch_of(handler: HostedStoreRendezvous) -> NodeWatch:
    return NodeWatch(handler, ranks=1)


def test_a_meeting_that_is_tried_again_leaves_no_host_behind() -> None:
    handler = meeting()
    watch = watch_of(handler)
    handler.next_rendezvous()
    first = handler.server
    handler.next_rendezvous()
    assert first is not None and handler.server is not None and handler.server is not first
    assert not first._thread.is_alive() and first._server.fileno() == -1
    watch.open(node=0, num_nodes=2, ranks=[0])
    watch.close()
    assert handler.server is None


def test_a_store_that_does_not_answer_holds_up_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "_ANSWER_S", 0.2)
    answers = threading.Event()
    store: Any = SimpleNamespace(compare_set=lambda *arguments: answers.wait())
    handler = meeting(store=store)
    watch = watch_of(handler)
    handler.next_rendezvous()
    assert watch.open(node=0, num_nodes=2, ranks=[0]), "else it waits for ever"
    answers.set()
    watch.close()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NodeWatch]]:
    """The agents of three nodes with two ranks each, which have met."""
    monkeypatch.setattr(failure_detector, "BACK_S", 0.2)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.1)
    root, round_ = dist.HashStore(), dist.HashStore()
    own: Any = SimpleNamespace(addr="127.0.0.1")
    watches = []
    for node in range(3):
        info = RendezvousInfo(round_, node, 3, RendezvousStoreInfo("127.0.0.1", 0))
        meet: Callable[[], RendezvousInfo] = lambda info=info: info  # type: ignore[misc]  # noqa: E731
        inner: Any = SimpleNamespace(next_rendezvous=meet, get_run_id=lambda: "job", _store=root, _this_node=own)
        handler = HostedStoreRendezvous(inner)
        watches.append(NodeWatch(handler, ranks=2))
        handler.next_rendezvous()

    def open_it(watch: NodeWatch) -> str:
        node = watches.index(watch)
        return watch.open(node=node, num_nodes=3, ranks=[2 * node, 2 * node + 1])

    told = at_once(watches, open_it)
    ports = [each.server.port for each in watches if each.server is not None]
    assert told == [" ".join(f"{node}=127.0.0.1:{port}" for node, port in enumerate(ports))] * 3
    yield watches
    for watch in watches:
        watch.close()


def at_once(watches: list[NodeWatch], work: Callable[[NodeWatch], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(watches)) as pool:
        return list(pool.map(work, watches))


def lose_first(watches: list[NodeWatch]) -> list[NodeWatch]:
    """Its process has ended. Returns the others, once they know."""
    assert watches[0].server is not None
    for talk in watches[0].server._talks.values():
        talk.agent = None  # it says no goodbye
    watches[0].server.close()
    watches[0].server = None
    others = watches[1:]
    wait_until(lambda: all(watch.lost_now() for watch in others), "the loss", 20.0)
    return others


def test_all_agents_see_the_loss_of_the_first_node_once(three: list[NodeWatch]) -> None:
    for watch in lose_first(three):
        (gone,) = watch.lost_now()
        assert (gone.node, gone.ranks, gone.is_silent) == (0, (0, 1), False)
        watch.note_lost({0: "lost"})
        assert not watch.lost_now()
