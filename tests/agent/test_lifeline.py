"""Agents hear each other over real connections: who is gone, silent, or put out; and the small records of ranks."""

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

from mindx_elastic.agent import lifeline
from mindx_elastic.agent.lifeline import Gone, Lifeline, LifelineHost
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, BoundaryRing, read_ring
from mindx_elastic.rejoin.small_records import MOST_BYTES, Courier, Kept, put_into_ring

KEY = b"a key of some length, for tests only"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[LifelineHost]:
    monkeypatch.setattr(lifeline, "_BACK_S", 0.2)
    monkeypatch.setattr(lifeline, "SILENCE_S", 2.0)
    monkeypatch.setattr(lifeline, "_BEAT_S", 0.1)
    made = LifelineHost("scope", KEY)
    yield made
    made.close()


def line_to(host: LifelineHost, node: int = 1, token: str = "t1", key: bytes | None = KEY) -> Lifeline:
    made = Lifeline(("127.0.0.1", host.port), "scope", key, node=node, token=token, ranks=range(2, 4))
    assert made.start()
    return made


def until(condition: Any, what: str, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return found


def test_a_connection_that_ends_without_a_goodbye_is_a_lost_node(host: LifelineHost) -> None:
    one = line_to(host)
    until(lambda: host._current, "the hello")
    one.close(says_bye=False)
    (gone,) = until(host.gone, "the loss")
    assert (gone.node, gone.ranks, gone.is_silent) == (1, (2, 3), False)
    host.put_out(gone)
    assert not host.gone()


def test_a_goodbye_is_no_loss(host: LifelineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_BACK_S", 0.0)
    one = line_to(host)
    until(lambda: host._current, "the hello")
    one.close()
    until(lambda: host._peers[1, "t1"].connection is None, "the end")
    assert not host.gone()


def test_a_connection_that_was_reset_comes_back(host: LifelineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    one = line_to(host)
    first = until(lambda: host._peers.get((1, "t1")), "the hello").connection
    first.shutdown(socket.SHUT_RDWR)
    until(lambda: host._peers[1, "t1"].connection not in (None, first), "a new connection")
    monkeypatch.setattr(lifeline, "_BACK_S", 0.0)
    assert not host.gone() and not one.is_out
    one.close()


def test_silence_is_told_apart_and_ends_with_a_word(host: LifelineHost) -> None:
    with closing(socket.create_connection(("127.0.0.1", host.port))) as mute:
        one = Lifeline(("127.0.0.1", 1), "scope", KEY, node=1, token="t1", ranks=[2])
        mute.sendall(one._hello)
        until(lambda: host._current, "the hello")
        assert not host.gone(), "it has just spoken"
        (gone,) = until(host.gone, "silence")
        assert gone.is_silent
        mute.sendall(b".\n")
        until(lambda: not host.gone(), "a word")


def test_a_standstill_of_the_first_node_itself_is_nobodys_silence(
    host: LifelineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after SIGSTOP and SIGCONT: the words that have come meanwhile are unread."""
    lines = [line_to(host), line_to(host, node=2, token="t2")]
    until(lambda: len(host._current) == 2, "the hellos")
    first = host._peers[1, "t1"].connection
    assert first is not None
    with host._lock:  # the second one's connection has ended, and it has had no time to come back
        host._peers[2, "t2"].connection, host._peers[2, "t2"].ended = None, time.monotonic()
        now = time.monotonic
        monkeypatch.setattr(lifeline, "time", SimpleNamespace(monotonic=lambda: now() + 60, sleep=time.sleep))
    assert not host.gone(), "before anything was read"
    until(lambda: host._looked > now() + 50, "the first look")
    assert [each.node for each in host.gone()] in ([], [2])
    until(lambda: [each.node for each in host.gone()] == [2], "the one that does not come back")
    for line in lines:
        line.close()


def test_the_others_see_that_the_first_nodes_agent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_BACK_S", 0.2)
    host = LifelineHost("scope", KEY)
    one = line_to(host)
    until(lambda: host._current, "the hello")
    assert one.gone() is None
    host.close(says_bye=False)
    is_silent, _ = until(one.gone, "the loss")
    assert not is_silent
    one.drain()
    one.close()


def test_the_first_nodes_agent_leaves_with_a_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_BACK_S", 0.0)
    host = LifelineHost("scope", KEY)
    one = line_to(host)
    until(lambda: host._current, "the hello")
    host.close()
    until(lambda: one._ended is not None, "the end")
    looked = one._looked
    until(lambda: one._looked > looked, "a look")
    assert one.gone() is None
    one.close()


def test_the_silence_of_the_first_nodes_agent_ends_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "SILENCE_S", 0.5)
    monkeypatch.setattr(lifeline, "_BEAT_S", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = int(server.getsockname()[1])
        one = Lifeline(("127.0.0.1", port), "scope", KEY, node=1, token="t1", ranks=[2])
        assert one.start()
        connection, _ = server.accept()
        with closing(connection):
            assert until(one.gone, "silence")[0]
            connection.sendall(b".\n")
            until(lambda: one.gone() is None, "a word")
            one.close()


def test_a_standstill_of_the_other_side_is_nobodys_silence(host: LifelineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    one = line_to(host)
    until(lambda: host._current, "the hello")
    now = time.monotonic
    monkeypatch.setattr(lifeline, "time", SimpleNamespace(monotonic=lambda: now() + 60, sleep=time.sleep))
    until(lambda: one._looked > now() + 50, "the first look")
    assert one.gone() is None
    one.close()


def test_a_node_that_was_put_out_is_told_so_when_it_comes_back(host: LifelineHost) -> None:
    one = line_to(host)
    until(lambda: host._current, "the hello")
    one.close(says_bye=False)
    (gone,) = until(host.gone, "the loss")
    host.put_out(gone)
    back = line_to(host)
    until(lambda: back.is_out, "the word")
    back.close()
    new = line_to(host, token="t2")
    until(lambda: (1, "t2") in host._peers, "the new one's hello")
    host.expect(1, "t2")
    assert not new.is_out and not host.gone()
    new.close(says_bye=False)
    assert until(host.gone, "the new one's loss")[0].token == "t2"


def test_a_node_that_was_cut_off_for_long_hears_that_it_is_out(
    host: LifelineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "_AGAIN_S", 0.002)
    monkeypatch.setattr(lifeline, "_LATER_S", 0.002)
    tries, connect = [], socket.create_connection

    def is_cut(*arguments: Any) -> socket.socket:
        tries.append(arguments)
        if 1 < len(tries) < 300:
            raise OSError("no route to host")
        return connect(*arguments)

    monkeypatch.setattr(socket, "create_connection", is_cut)
    line = line_to(host)
    peer = until(lambda: host._peers.get((1, "t1")), "the hello")
    with host._lock:
        peer.is_out = True
    peer.connection.shutdown(socket.SHUT_RDWR)
    until(lambda: line.is_out, "the word")
    assert len(tries) == 300
    line.close()


def test_after_a_reset_of_a_connection_that_has_lasted_the_tries_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_BEAT_S", 0.05)
    monkeypatch.setattr(lifeline, "_AGAIN_S", 60.0)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(20)
        line = Lifeline(server.getsockname(), "scope", KEY, node=1, token="t1", ranks=[2])
        assert line.start()
        for _ in range(3):
            connection, _ = server.accept()
            heard = b""
            while heard.count(b".\n") < 4:  # it lasts for longer than the time between two
                heard += connection.recv(4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        line.close()


def test_an_agent_that_has_taken_a_place_and_never_speaks_is_lost(
    host: LifelineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "_EXPECTED_S", 0.1)
    host.expect(1, "t9")
    assert isinstance(until(host.gone, "the loss")[0], Gone)


def test_strangers_are_no_nodes(host: LifelineHost) -> None:
    line = line_to(host, key=b"another key, which is long enough too")
    with closing(socket.create_connection(("127.0.0.1", host.port))) as stranger:
        stranger.sendall(b'{"node":1,"token":"x","name":"me","first":2,"count":2}\n')
        stranger.settimeout(20)
        assert stranger.recv(10) == b""
    assert not host._current and not host._peers
    line.close()


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Limits that are set, in place of those of this process; a soft one of 20 at first."""
    limits = [(20, 40)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    return limits


def test_ranks_leave_descriptors_for_the_agents(descriptors: list[tuple[int, int]]) -> None:
    host = LifelineHost("scope", KEY)
    assert descriptors == [(20, 40), (40, 40)]
    couriers = [Courier(("127.0.0.1", host.port), "scope", KEY, rank) for rank in range(25)]
    until(lambda: host._num_refused == 5, "all hellos")
    assert host._num_ranks == 20
    line = line_to(host)
    until(lambda: host._current, "the agent")
    for courier in couriers:
        courier.close()
    until(lambda: host._num_ranks == 0, "their ends")
    line.close()
    host.close()


def test_connections_that_cannot_be_accepted_do_not_keep_the_thread_busy() -> None:
    def accept() -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    host: Any = LifelineHost.__new__(LifelineHost)
    host._server, host._stopping = SimpleNamespace(accept=accept), threading.Event()
    began = time.monotonic()
    assert [host._accept() for _ in range(3)] == [None] * 3
    assert time.monotonic() - began >= 0.5


# --- small records ---


def send(courier: Courier, step: int, *, forecast: bool = False, pinned: bool = False, run: str = "run") -> None:
    kind = {"forecast": forecast, "trusted": True, "pinned": pinned}
    courier.send(run, 2, step, b"state of %d" % step, **kind)


def test_the_newest_records_of_a_rank_that_is_gone_go_into_the_new_ones_ring(
    host: LifelineHost, tmp_path: Path
) -> None:
    courier = Courier(("127.0.0.1", host.port), "scope", KEY, 3)
    for step in range(1, 9):
        send(courier, step, forecast=True)
        send(courier, step)
    send(courier, 6, pinned=True)
    courier.close()
    until(lambda: len((host.records_of(3) or {"records": []})["records"]) == 9, "the records")
    note = json.loads(json.dumps(host.records_of(3)))
    assert put_into_ring(note, "run", tmp_path) == 9
    found = {(record.step, record.forecast, record.pinned): record for record in read_ring(tmp_path / BOUNDARIES_FILE)}
    boundaries, pinned, foreseen = [(step, False, False) for step in (5, 6, 7, 8)], (6, False, True), (5, 6, 7, 8)
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
    assert kept.take(other.recv(1 << 16)) == (b"", True)
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
    kept, content, steps = Kept(), b"", set()
    other.setblocking(False)
    while True:  # what has come is whole
        try:
            content, makes_sense = kept.take(content + other.recv(1 << 20))
        except BlockingIOError:
            break
        assert makes_sense
        steps |= {record.step for kind in kept._kinds.values() for record in kind}
    assert 0 in steps and len(steps) < 200 and steps == set(range(len(steps)))
    one.close()
    other.close()


@pytest.mark.parametrize("content", [b"x" * 200, bytes(200), b"mxsr" + b"\xff" * 200])
def test_nonsense_is_no_record(content: bytes) -> None:
    assert Kept().take(content) == (b"", False)
