"""Agents hear each other over real connections, and tell each other who is out; the small records of ranks.

Who is lost is decided in `failure_detector`, whose tests have the cases.
"""

from __future__ import annotations

import errno
import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindx_elastic.agent import failure_detector, heartbeat
from mindx_elastic.agent.failure_detector import Lost
from mindx_elastic.agent.heartbeat import Heartbeat, HeartbeatServer
from mindx_elastic.core.frames import Frames, frame
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, BoundaryRing, read_ring
from mindx_elastic.rejoin.small_records import MOST_BYTES, MOST_MESSAGE_BYTES, Courier, Kept, put_into_ring
from tests.harness import wait_until

KEY = b"a key of some length, for tests only"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatServer]:
    monkeypatch.setattr(failure_detector, "BACK_S", 0.2)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.1)
    made = HeartbeatServer("scope", KEY)
    yield made
    made.close()


def beat_to(
    server: HeartbeatServer, node: int = 1, token: str = "t1", key: bytes = KEY, *, waits: bool = True
) -> Heartbeat:
    """`waits`: for its greeting."""
    made = Heartbeat(("127.0.0.1", server.port), "scope", key, node=node, token=token, ranks=range(2, 4))
    assert made.start()
    if waits:
        wait_until(lambda: node in server.connected, "the greeting")
    return made


def test_a_connection_that_ends_without_a_goodbye_is_a_lost_node_and_one_with_it_is_none(
    server: HeartbeatServer,
) -> None:
    one, other = beat_to(server), beat_to(server, node=2, token="t2")
    other.close()
    one.close(says_bye=False)
    wait_until(lambda: bool(server.lost()), "the loss")
    (lost,) = server.lost()
    assert (lost.node, lost.ranks, lost.is_silent) == (1, (2, 3), False)
    assert not server.connected
    server.put_out(lost)
    assert not server.lost()


def test_a_connection_that_was_reset_comes_back(server: HeartbeatServer) -> None:
    one = beat_to(server)
    (first,) = server._talks
    first.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: first not in server._talks and server.connected == [1], "a new connection")
    assert not server.lost() and not one.is_out
    one.close()


def test_an_agent_that_stood_still_reads_all_that_has_come_before_it_judges(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections have ended; two are back, which its thread has not read when the main thread asks who is lost."""
    ahead, stands, goes_on, found = [0.0], threading.Event(), threading.Event(), list[Lost]()
    monkeypatch.setattr(failure_detector, "BACK_S", 1.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    agents = [beat_to(server, node, f"t{node}") for node in (1, 2)]

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
        server.close(says_bye=says_bye)
        wait_until(lambda one=one: not one.is_connected, "the end")
        if not says_bye:
            wait_until(lambda one=one: one.lost() is not None, "the loss")
        assert says_bye == (one.lost() is None)
        one.close()


def test_a_first_node_that_stands_still_is_silent_until_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "SILENCE_S", 0.5)
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        one = Heartbeat(mute.getsockname(), "scope", KEY, node=1, token="t1", ranks=[2])
        assert one.start()
        connection, _ = mute.accept()
        with closing(connection):
            wait_until(lambda: (lost := one.lost()) is not None and lost.is_silent, "silence")
            connection.sendall(frame(b"."))
            wait_until(lambda: one.lost() is None, "a word")
            one.close()


def test_a_node_that_was_put_out_is_told_so_at_once_and_when_it_comes_back(server: HeartbeatServer) -> None:
    stands = beat_to(server, node=2, token="t2")
    one = beat_to(server)
    one.close(says_bye=False)
    wait_until(lambda: bool(server.lost()), "the loss")
    (lost,) = server.lost()
    server.put_out(lost)
    back = beat_to(server, waits=False)  # it ends as soon as it has heard
    wait_until(lambda: back.is_out, "the word")
    back.close()
    server.expect(1, "t9")
    new = beat_to(server, token="t9")
    assert not new.is_out and not server.lost() and not stands.is_out
    new.close()
    stands.close()


def test_a_node_that_was_cut_off_for_long_hears_that_it_is_out(
    server: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_AGAIN_S", 0.002)
    monkeypatch.setattr(heartbeat, "_LATER_S", 0.002)
    tries, connect = [], socket.create_connection

    def is_cut(*arguments: Any) -> socket.socket:
        tries.append(arguments)
        if 1 < len(tries) < 300:
            raise OSError("no route to host")
        return connect(*arguments)

    monkeypatch.setattr(socket, "create_connection", is_cut)
    line = beat_to(server)
    with server._lock:
        server._agents.put_out(1, "t1")
    (connection,) = server._talks
    connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: line.is_out, "the word")
    assert len(tries) == 300
    line.close()


def test_after_a_reset_of_a_connection_that_has_lasted_the_tries_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "_AGAIN_S", 60.0)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(20)
        line = Heartbeat(server.getsockname(), "scope", KEY, node=1, token="t1", ranks=[2])
        assert line.start()
        for _ in range(3):
            connection, _ = server.accept()
            heard = b""
            while heard.count(frame(b".")) < 4:  # it lasts for longer than the time between two
                heard += connection.recv(4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        line.close()


def test_strangers_are_no_nodes(server: HeartbeatServer) -> None:
    line = beat_to(server, key=b"another key, which is long enough too", waits=False)
    with closing(socket.create_connection(("127.0.0.1", server.port))) as stranger:
        stranger.sendall(frame(b'{"node":1,"token":"x","name":"me","first":2,"count":2}'))
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
        heartbeat._say(nearly_full, b"out")
        assert other.recv(100) == frame(b"out")[:5] and other.recv(100) == b""
        assert one.recv(100) == b"", "and the server sees so, too"


def test_connections_that_cannot_be_accepted_do_not_keep_the_thread_busy() -> None:
    def accept() -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    server: Any = HeartbeatServer.__new__(HeartbeatServer)
    server._server, server._stopping = SimpleNamespace(accept=accept), threading.Event()
    began = time.monotonic()
    assert [server._accept() for _ in range(3)] == [None] * 3
    assert time.monotonic() - began >= 0.5


# --- small records ---


def send(courier: Courier, step: int, *, forecast: bool = False, pinned: bool = False, run: str = "run") -> None:
    kind = {"forecast": forecast, "trusted": True, "pinned": pinned}
    courier.send(run, 2, step, b"state of %d" % step, **kind)


def test_the_newest_records_of_a_rank_that_is_gone_go_into_the_new_ones_ring(
    server: HeartbeatServer, tmp_path: Path
) -> None:
    courier = Courier(("127.0.0.1", server.port), "scope", KEY, 3)
    for step in range(1, 9):
        send(courier, step, forecast=True)
        send(courier, step)
    send(courier, 6, pinned=True)
    courier.close()
    wait_until(lambda: len((server.records_of(3) or {"records": []})["records"]) == 7, "the records")
    note = json.loads(json.dumps(server.records_of(3)))
    assert put_into_ring(note, "run", tmp_path) == 7
    found = {(record.step, record.forecast, record.pinned): record for record in read_ring(tmp_path / BOUNDARIES_FILE)}
    boundaries, pinned, foreseen = [(step, False, False) for step in (5, 6, 7, 8)], (6, False, True), (7, 8)
    assert set(found) == {*boundaries, pinned, *((step, True, False) for step in foreseen)}
    assert found[8, False, False].content == b"state of 8" and found[8, False, False].attempt == 2
    assert put_into_ring(note, "run", tmp_path) == 0, "the ring has them already"
    assert put_into_ring(note, "another run", tmp_path) == 0


def test_a_ring_that_is_newer_is_left_alone(tmp_path: Path) -> None:
    ring = BoundaryRing(tmp_path / BOUNDARIES_FILE, "run", 1000)
    ring.write(2, 9, b"its own")
    ring.close()
    kept = Kept()
    one, other = socket.socketpair()
    courier = Courier.__new__(Courier)
    courier._left, courier._socket = b"", one
    send(courier, 8)
    assert all(map(kept.take, Frames(MOST_MESSAGE_BYTES).feed(other.recv(1 << 16))))
    assert put_into_ring(kept.to_json(), "run", tmp_path) == 0
    assert [record.step for record in read_ring(tmp_path / BOUNDARIES_FILE)] == [9]
    one.close()
    other.close()


def test_a_connection_that_nobody_reads_holds_up_nothing() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    courier = Courier.__new__(Courier)
    courier._left, courier._socket = b"", one
    large = bytes(MOST_BYTES // 2)
    for step in range(200):
        courier.send("run", 0, step, large, forecast=False, trusted=True, pinned=False)
    kept, frames, steps = Kept(), Frames(MOST_MESSAGE_BYTES), set()
    other.setblocking(False)
    while True:  # what has come is whole
        try:
            assert all(map(kept.take, frames.feed(other.recv(1 << 20))))
        except BlockingIOError:
            break
        steps |= {record.step for kind in kept._kinds.values() for record in kind}
    assert 0 in steps and len(steps) < 200 and steps == set(range(len(steps)))
    one.close()
    other.close()


@pytest.mark.parametrize("content", [b"", b"x" * 200, bytes(200), b"\xff" * 200])
def test_nonsense_is_no_record(content: bytes) -> None:
    assert not Kept().take(content)
