"""Which sockets connect ranks, and that cutting them lets a blocked thread go, and touches no other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.rejoin.sockets import SocketsPart, _connections, cut


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_a_connection_has_the_same_name_at_both_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    found = _connections()
    names = {name for name, number in found.items() if number in map(inode, pair)}
    assert len(names) == 1


def test_only_a_connection_that_two_ranks_have_is_one_between_ranks() -> None:
    part = SocketsPart(3)
    part._found = {"ours": 11, "store": 12, "three": 13}
    said = [["ours", "store", "three"], ["ours", "three"], ["three", "other"]]
    merged = part.merge(said)
    part.hear(Answer(merged.common, merged.own[0], None))
    assert part.inodes == {11}


def test_with_too_many_ranks_nothing_is_told() -> None:
    assert SocketsPart(1000).say() == []


def test_a_thread_that_waits_is_free_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(near.recv(1)))
    thread.start()
    assert cut(frozenset([inode(near)])) == 1
    thread.join(30)
    assert got == [b""]
    assert far.recv(1) == b""


def test_other_sockets_are_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    other, end = socket.socketpair()
    with other, end:
        assert cut(frozenset([inode(other)])) == 1
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    assert cut(frozenset([0])) == 0


def test_a_number_that_is_used_again_is_not_cut(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    old, end = socket.socketpair()
    known, number = frozenset([inode(old)]), old.fileno()
    old.close()
    end.close()
    os.dup2(near.fileno(), number)
    try:
        assert cut(known) == 0
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    finally:
        os.close(number)
