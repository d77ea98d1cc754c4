"""How nodes meet, who is there, and what their agents tell each other."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from mindx_elastic.agent import rendezvous as module
from mindx_elastic.agent.rendezvous import (
    FreshStoreRendezvous,
    HostLostError,
    MeetingStore,
    Membership,
    OneNodeRendezvous,
    reconnect,
    require_host,
    watch_meetings,
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
        backend=backend,
        endpoint=f"127.0.0.1:{port}",
        run_id="job",
        **{"min_nodes": 1, "max_nodes": 1, **more},
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


class CachedHandler(Handler):
    """As torch's dynamic rendezvous: it reads the store once a second, and answers from that."""

    known, read_at = 0, -1.0

    def num_nodes_waiting(self) -> int:
        self.asked += 1
        if time.monotonic() >= self.read_at + 1.0:
            self.known, self.read_at = self.waiting, time.monotonic()
        return self.known


def test_a_node_that_has_joined_since_the_rendezvous_was_read_is_heard_of() -> None:
    """Another agent may have read it later, and have stopped all ranks for the newcomer."""
    handler = CachedHandler()
    membership = start(handler, interval_s=30)
    wait_until(lambda: handler.asked == 1, "first question")
    handler.waiting = 1
    assert membership.ask() == 1
    membership.stop()


def test_a_fresh_answer_is_waited_for_and_not_asked_for_without_a_pause() -> None:
    """Thousands of questions a second kept one core busy."""
    handler = CachedHandler()
    membership = start(handler, interval_s=30)
    assert membership.ask() == 0
    assert handler.asked < 20
    membership.stop()


def test_a_standby_node_that_waits_where_no_place_is_free_is_not_met(handler: Handler) -> None:
    """All agents met again for it, without end: the group was full each time, and one was left that waited."""
    handler.settings = SimpleNamespace(max_nodes=2)  # type: ignore[attr-defined]
    handler.waiting = 1
    membership = start(handler)
    wait_until(lambda: handler.asked > 2, "questions")
    assert membership.num_waiting == 0
    handler.participants = ["a"]
    wait_until(lambda: membership.num_waiting == 1, "the place of the other one is free")
    membership.stop()


def test_over_a_new_connection_a_standby_node_is_not_met_either(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mend(broken: Any) -> bool:
        broken.error = None
        return True

    monkeypatch.setattr(module, "reconnect", mend)
    handler.settings = SimpleNamespace(max_nodes=2)  # type: ignore[attr-defined]
    handler.waiting, handler.error = 1, RendezvousConnectionError("reset")
    membership = start(handler, interval_s=3600)
    wait_until(lambda: bool(membership._asked_at), "the answer")
    assert (handler.asked, membership.num_waiting, membership.lost) == (2, 0, "")
    membership.stop()


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


# --- while the nodes meet ---


class Met:
    """A dynamic rendezvous whose nodes have met. `then`: what its state is at the second look, and from then on."""

    def __init__(self, then: tuple[int, dict[str, int]]) -> None:
        self._looks = [(3, {"a": 0, "b": 1}), then]
        self._state_holder = SimpleNamespace(state=SimpleNamespace(round=3, participants={"a": 0, "b": 1}))

    def num_nodes_waiting(self) -> int:
        meeting, participants = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        self._state_holder.state = SimpleNamespace(round=meeting, participants=participants)
        return 0


def test_a_read_waits_for_the_part_of_a_node_that_is_there() -> None:
    plain, found = dist.HashStore(), list[list[bytes]]()
    store = MeetingStore(Met((3, {"a": 0, "b": 1})), plain)  # type: ignore[arg-type]
    store.set("a", "1")
    assert store.get("a") == b"1"
    thread = threading.Thread(target=lambda: found.append(store.multi_get(["a", "b"])))
    thread.start()
    thread.join(0.3)
    assert not found
    plain.set("b", "2")
    thread.join(30)
    assert found == [[b"1", b"2"]]


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ((3, {"a": 0}), "node 1 gives no sign of life since the nodes have met"),
        ((4, {"a": 0, "c": 1}), "the others meet again since the nodes have met"),
    ],
)
def test_a_node_that_has_died_since_it_joined_is_missed(then: tuple[int, dict[str, int]], why: str) -> None:
    store = MeetingStore(Met(then), dist.HashStore())  # type: ignore[arg-type]
    with pytest.raises(dist.DistStoreError, match=why):
        store.get("part of node 1")


def test_a_node_whose_connection_breaks_while_the_nodes_meet_holds_up_no_other(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's own two nodes, the one that is to say where the workers meet fails at that moment, and comes again.
    The other one would wait for its word for a minute."""
    handlers = [open_handler("c10d", port, max_nodes=2, min_nodes=2, local_addr="127.0.0.1") for _ in range(2)]
    met: list[tuple[int, int]] = []
    missed: list[str] = []
    broken = [dist.DistNetworkError("Connection reset by peer")]
    real = RendezvousStoreInfo.build

    def build(rank: int, *more: Any, **named: Any) -> RendezvousStoreInfo:
        if rank == 0 and broken:
            raise broken.pop()
        return real(rank, *more, **named)

    def meet(handler: Any) -> None:
        watch_meetings(handler)
        for _ in range(3):
            try:
                info = handler.next_rendezvous()
                met.append((info.rank, info.world_size))
                return
            except dist.DistError as error:
                missed.append(str(error))

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the agent does
    monkeypatch.setattr(RendezvousStoreInfo, "build", staticmethod(build))
    threads = [threading.Thread(target=meet, args=(handler,), daemon=True) for handler in handlers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert sorted(met) == [(0, 2), (1, 2)]
        assert not [each for each in missed if "timeout" in each or "is not there" in each], missed
    finally:
        for handler in handlers:
            handler.shutdown()
