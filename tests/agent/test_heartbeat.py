"""Agents hear each other over real connections.

Who is lost is decided in `failure_detector`, whose tests have the cases.
"""

from __future__ import annotations

import errno
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.agent import failure_detector, heartbeat
from mindx_elastic.agent.failure_detector import Lost
from mindx_elastic.agent.heartbeat import Heartbeat, HeartbeatServer
from mindx_elastic.core.frames import frame
from mindx_elastic.rejoin.small_records import Courier
from tests.harness import wait_until

KEY = b"a key of some length, for tests only"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatServer]:
    monkeypatch.setattr(failure_detector, "BACK_S", 0.2)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.1)
    made = HeartbeatServer("scope", KEY)
    yield made
    made.close()


def beat_to(server: HeartbeatServer, node: int = 1, key: bytes = KEY, *, waits: bool = True) -> Heartbeat:
    """`waits`: for its greeting."""
    made = Heartbeat(("127.0.0.1", server.port), "scope", key, node=node, ranks=range(2, 4))
    assert made.start()
    if waits:
        wait_until(lambda: node in server.connected, "the greeting")
    return made


def test_a_connection_that_ends_without_a_goodbye_is_a_lost_node_and_one_with_it_is_none(
    server: HeartbeatServer,
) -> None:
    beat_to(server, node=2).close()
    with closing(socket.create_connection(("127.0.0.1", server.port))) as one:  # of a process that is killed
        one.sendall(Heartbeat(one.getpeername(), "scope", KEY, node=1, ranks=range(2, 4))._hello)
        wait_until(lambda: 1 in server.connected, "the greeting")
    wait_until(lambda: bool(server.lost()), "the loss")
    (lost,) = server.lost()
    assert (lost.node, lost.ranks, lost.is_silent) == (1, (2, 3), False)
    assert not server.connected


def test_a_connection_that_was_reset_comes_back(server: HeartbeatServer) -> None:
    one = beat_to(server)
    (first,) = server._talks
    first.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: first not in server._talks and server.connected == [1], "a new connection")
    assert not server.lost()
    one.close()


def test_an_agent_that_stood_still_reads_all_that_has_come_before_it_judges(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections have ended; two are back, which its thread has not read when the main thread asks who is lost."""
    ahead, stands, goes_on, found = [0.0], threading.Event(), threading.Event(), list[Lost]()
    monkeypatch.setattr(failure_detector, "BACK_S", 1.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    agents = [beat_to(server, node) for node in (1, 2)]

    def end(connection: socket.socket) -> None:
        HeartbeatServer._end(server, connection)
        stands.set()
        goes_on.wait(60)

    def lost() -> list[Lost]:
        found.extend(HeartbeatServer.lost(server))
        return found

    monkeypatch.setattr(server, "_end", end)
    monkeypatch.setattr(server, "lost", lost)
    before = list(server._talks)
    for connection in before:
        connection.shutdown(socket.SHUT_RDWR)
    assert stands.wait(60)
    wait_until(lambda: all(each._first._num_connections == 2 for each in agents), "their new connections")
    ahead[0] = 1.5
    assert not server.lost()
    goes_on.set()
    wait_until(lambda: not set(before) & set(server._talks) and len(server.connected) == 2, "what they have sent")
    assert not found
    for each in agents:
        each.close()


def test_the_others_see_that_the_first_nodes_agent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "BACK_S", 0.2)
    for says_bye in (True, False):
        server = HeartbeatServer("scope", KEY)
        one = beat_to(server)
        assert one.lost() is None and one.is_connected
        if not says_bye:  # its process is killed
            for talk in server._talks.values():
                talk.agent = None
        server.close()
        wait_until(lambda one=one: not one.is_connected, "the end")
        if not says_bye:
            wait_until(lambda one=one: one.lost() is not None, "the loss")
        assert says_bye == (one.lost() is None)
        one.close()


def test_a_first_node_that_stands_still_is_silent_until_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "SILENCE_S", 0.5)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        one = Heartbeat(mute.getsockname(), "scope", KEY, node=1, ranks=[2])
        assert one.start()
        connection, _ = mute.accept()
        with closing(connection):
            wait_until(lambda: (lost := one.lost()) is not None and lost.is_silent, "silence")
            connection.sendall(frame(b"."))
            wait_until(lambda: one.lost() is None, "a word")
            one.close()


def test_strangers_are_no_nodes(server: HeartbeatServer) -> None:
    line = beat_to(server, key=b"another key, which is long enough too", waits=False)
    with closing(socket.create_connection(("127.0.0.1", server.port))) as stranger:
        stranger.sendall(frame(b'{"node":1,"name":"me","first":2,"count":2}'))
        stranger.settimeout(20)
        assert stranger.recv(10) == b""
    assert not server._agents.nodes
    line.close()


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Limits that are set, in place of those of this process; a soft one of 20 at first."""
    limits = [(20, 40)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    return limits


def test_ranks_leave_descriptors_for_the_agents(descriptors: list[tuple[int, int]]) -> None:
    server = HeartbeatServer("scope", KEY)
    assert descriptors == [(20, 40), (40, 40)]
    couriers = [Courier(("127.0.0.1", server.port), "scope", KEY, rank) for rank in range(25)]
    wait_until(lambda: server._num_refused == 5, "all hellos")
    assert server._num_ranks == 20
    line = beat_to(server)
    for courier in couriers:
        courier.close()
    wait_until(lambda: server._num_ranks == 0, "their ends")
    line.close()
    server.close()


def test_a_word_that_is_sent_in_part_ends_the_connection() -> None:
    one, other = socket.socketpair()
    with one, other:
        nearly_full: Any = SimpleNamespace(send=lambda message: one.send(message[:5]), shutdown=one.shutdown)
        heartbeat._say(nearly_full, b"bye")
        assert other.recv(100) == frame(b"bye")[:5] and other.recv(100) == b""
        assert one.recv(100) == b"", "and the server sees so, too"


def test_connections_that_cannot_be_accepted_do_not_keep_the_thread_busy() -> None:
    def accept() -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    server: Any = HeartbeatServer.__new__(HeartbeatServer)
    server._server, server._stopping = SimpleNamespace(accept=accept), threading.Event()
    began = time.monotonic()
    assert [server._accept() for _ in range(3)] == [None] * 3
    assert time.monotonic() - began >= 0.5
