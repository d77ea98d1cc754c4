"""How nodes meet, who is there, and what their agents tell each other."""

from __future__ import annotations

import gc
import os
import select
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from mindx_elastic.agent import rendezvous as module
from mindx_elastic.agent.rendezvous import (
    FreshStoreRendezvous,
    HostLostError,
    Membership,
    OneNodeRendezvous,
    reconnect,
    require_host,
)
from tests.harness import free_port, wait_until
from tests.resets import can_reset, reset_connections


def test_each_round_is_a_fresh_store_and_a_free_port() -> None:
    handler = OneNodeRendezvous("job", "127.0.0.1")
    rounds = [handler.next_rendezvous() for _ in range(2)]
    for info in rounds:
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
        assert 0 < info.bootstrap_store_info.master_port < 65536
    rounds[0].store.set("key", "old")
    assert not rounds[1].store.check(["key"])


# --- connections to the store of a rendezvous that broke ---


pytestmark = pytest.mark.skipif(not can_reset(), reason="needs pidfd_getfd")


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store on this machine that is not the handler's own."""
    found = free_port()
    store = dist.TCPStore(
        "127.0.0.1", found, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20), use_libuv=True
    )
    yield found
    del store
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_broken", [])
    monkeypatch.setattr(module, "_CONNECT_S", 2.0)


def open_handler(backend: str, port: int, **more: Any) -> Any:
    parameters = RendezvousParameters(
        backend=backend, endpoint=f"127.0.0.1:{port}", run_id="job", min_nodes=1, max_nodes=1, **more
    )
    return rendezvous_registry.get_rendezvous_handler(parameters)


@pytest.mark.parametrize("is_host", [False, True])
def test_a_dynamic_rendezvous_goes_on(port: int, is_host: bool) -> None:
    handler = open_handler("c10d", free_port() if is_host else port, is_host=is_host, last_call_timeout=1)
    try:
        handler.next_rendezvous().store.set("key", "known before")
        assert reconnect(handler), "nothing is broken"
        assert module._broken == []
        assert reset_connections(os.getpid()) > 0
        with pytest.raises(RendezvousConnectionError):
            handler._state_holder._backend.get_state()
        assert reconnect(handler)
        assert handler.num_nodes_waiting() == 0
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        info.store.set("key", "value")
    finally:
        handler.shutdown()


def test_a_static_rendezvous_goes_on() -> None:
    handler = FreshStoreRendezvous(open_handler("static", free_port(), rank=0))
    handler.next_rendezvous()
    assert reset_connections(os.getpid()) > 0
    with pytest.raises(dist.DistNetworkError):
        handler.next_rendezvous()
    assert reconnect(handler)
    handler.next_rendezvous().store.set("key", "value")


def test_a_host_that_is_gone_stays_gone() -> None:
    handler = open_handler("c10d", free_port(), is_host=True)
    old = handler._store
    handler._store = handler._state_holder._backend._store = dist.TCPStore(
        old.host, old.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    where = f"127.0.0.1:{old.port}"
    require_host(handler)
    del old
    gc.collect()  # ends the server
    assert not reconnect(handler)
    with pytest.raises(HostLostError, match=f"the rendezvous at {where} is gone .*start the same command on all nodes"):
        require_host(handler)


# --- asking the rendezvous who is there ---


class Handler:
    """Answers as told."""

    def __init__(self) -> None:
        self.waiting = 0
        self.error: Exception | None = None
        self.participants = ["a", "b"]
        self.asked = 0

    @property
    def _state_holder(self) -> Any:
        return SimpleNamespace(state=SimpleNamespace(participants=self.participants))

    def num_nodes_waiting(self) -> int:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.waiting


@pytest.fixture
def handler() -> Handler:
    return Handler()


def start(handler: Handler, interval_s: float = 0.01) -> Membership:
    return Membership(handler, num_nodes=2, interval_s=interval_s).start()  # type: ignore[arg-type]


def test_a_node_that_waits_wakes_the_main_thread(handler: Handler) -> None:
    membership = start(handler)
    wait_until(lambda: handler.asked > 1, "questions")
    assert (membership.num_waiting, membership.lost) == (0, "")
    handler.waiting = 1
    assert select.select([membership.wakeup.fd], [], [], 20)[0]
    wait_until(lambda: membership.num_waiting == 1, "answer")
    membership.stop()


def test_a_node_that_gives_no_sign_is_lost(handler: Handler) -> None:
    membership = start(handler)
    handler.participants = ["a"]
    wait_until(lambda: bool(membership.lost), "loss")
    assert membership.lost == "only 1 of 2 nodes give a sign of life"
    membership.stop()


def test_a_node_that_only_meets_anew_is_not_lost(handler: Handler) -> None:
    handler.participants, handler.waiting = ["a"], 1
    membership = start(handler)
    wait_until(lambda: membership.num_waiting == 1, "answer")
    assert not membership.lost
    membership.stop()


def test_a_store_that_is_gone(handler: Handler) -> None:
    handler.error = RuntimeError("connection reset")
    membership = start(handler)
    assert select.select([membership.wakeup.fd], [], [], 20)[0]
    wait_until(lambda: bool(membership.lost), "loss")
    assert "RuntimeError" in membership.lost
    assert membership.ask() == 0, "at once"
    membership.stop()


def test_ask_gets_a_fresh_answer(handler: Handler) -> None:
    membership = start(handler, interval_s=60)
    wait_until(lambda: handler.asked == 1, "first question")
    handler.waiting = 3
    assert membership.ask() == 3
    membership.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mindx-membership"]


# --- right after a meeting ---


class Met:
    """A dynamic rendezvous whose nodes have met. `looks`: what its state is at each look, the last one from then on."""

    def __init__(self, *looks: tuple[int, dict[str, int]]) -> None:
        self._looks = list(looks)
        self._state_holder = SimpleNamespace(state=None)

    def num_nodes_waiting(self) -> int:
        meeting, participants = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        self._state_holder.state = SimpleNamespace(round=meeting, participants=participants)
        return 0


def test_nodes_that_have_met_wait_until_all_have_come_out() -> None:
    store, both = dist.HashStore(), {"a": 0, "b": 1}
    done: list[int] = []

    def come(rank: int) -> None:
        module.await_nodes(Met((3, both)), store, rank, 2)  # type: ignore[arg-type]
        done.append(rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    threads[0].start()
    threads[0].join(0.3)
    assert not done
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert sorted(done) == [0, 1]


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ((3, {"a": 0}), "node 1 gives no sign of life since the nodes have met"),
        ((4, {"a": 0, "c": 1}), "the others meet again since the nodes have met"),
    ],
)
def test_a_node_that_has_died_since_it_joined_is_missed(then: tuple[int, dict[str, int]], why: str) -> None:
    met = Met((3, {"a": 0, "b": 1}), (3, {"a": 0, "b": 1}), then)
    with pytest.raises(dist.DistStoreError, match=why):
        module.await_nodes(met, dist.HashStore(), 0, 2)  # type: ignore[arg-type]
