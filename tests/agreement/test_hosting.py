"""The store that this package hosts: reachable as it should be, and by which kind of address."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from torch.distributed import TCPStore

from mindx_elastic.agreement.hosting import host_store
from tests.harness import no_descriptor_left


def takes(family: socket.AddressFamily, address: str, port: int) -> bool:
    with socket.socket(family) as own:
        return own.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_machine_with_an_ipv4_address_is_reached_by_that_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a socket for both the server would look up ``::ffff:127.0.0.1``, which only a name server could know."""
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: known)
    store = host_store(address)
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    other.set("a", "1")
    assert store.get("a") == b"1"
    assert takes(socket.AF_INET, "127.0.0.1", store.port)
    if socket.has_dualstack_ipv6():
        assert not takes(socket.AF_INET6, "::1", store.port)


def test_where_torch_takes_no_socket_of_ours_ours_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 with its default server."""

    def without(*args: Any, master_listen_fd: int | None = None, **more: Any) -> TCPStore:
        if master_listen_fd is not None:
            raise NotImplementedError
        return TCPStore(*args, **more)

    monkeypatch.setattr("torch.distributed.TCPStore", without)
    host_store("127.0.0.1")  # a process's first one opens a pipe for good
    with no_descriptor_left():
        store = host_store("127.0.0.1")
        assert takes(socket.AF_INET, "127.0.0.1", store.port)
        del store


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_machine_with_another_address_is_reached_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose name this machine itself does not know; torch says then what is wrong, if anything is."""

    def getaddrinfo(*_args: object, **_named: object) -> list[tuple[object, ...]]:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    store = host_store("localhost")
    assert takes(socket.AF_INET, "127.0.0.1", store.port)
    assert takes(socket.AF_INET6, "::1", store.port)
