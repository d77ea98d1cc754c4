"""Connections to the store of a rendezvous that broke."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from mindx_elastic.agent import reconnect as module
from mindx_elastic.agent.fresh_store import FreshStoreRendezvous
from mindx_elastic.agent.one_node import OneNodeRendezvous
from mindx_elastic.agent.reconnect import reconnect
from tests.resets import can_reset, reset_connections
from tests.system.test_agent import free_port

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
    del old
    gc.collect()  # ends the server
    assert not reconnect(handler)


def test_a_handler_without_a_connection() -> None:
    assert not reconnect(OneNodeRendezvous("job", None))
