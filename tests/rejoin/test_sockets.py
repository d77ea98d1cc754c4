"""Which sockets connect ranks, and that cutting them lets a blocked thread go, and touches no other."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from mindx_elastic.agreement.gather import Answer
from mindx_elastic.rejoin.sockets import SocketsPart


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_only_a_connection_that_two_ranks_have_is_one_between_ranks() -> None:
    part = SocketsPart()
    part._found = {"ours": 11, "store": 12, "three": 13}
    said = [["ours", "store", "three"], ["ours", "three"], ["three", "other"]]
    merged = part.merge(said)
    assert merged.own is not None
    part.hear(Answer(merged.common, merged.own[0], lambda names: []))
    assert part.inodes == {11}


def part_of(*inodes: int) -> SocketsPart:
    part = SocketsPart()
    part.inodes = frozenset(inodes)
    return part


def test_a_thread_that_waits_is_free_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(near.recv(1)))
    thread.start()
    part = part_of(inode(near))
    assert part.cut() == 1
    thread.join(30)
    assert got == [b""]
    part.release()


def write_for_ever(one: socket.socket) -> None:
    while True:
        one.sendall(b"x" * 1000)


def test_no_write_fails_until_all_are_out(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    here, there = part_of(inode(near)), part_of(inode(far))
    here.cut()
    assert there.cut() == there.cut() == 1
    near.close()  # as gloo does when it has read the end
    for _ in range(3):  # a write to a socket that is closed fails from the second time on
        far.sendall(b"x" * 1000)
    here.release()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        write_for_ever(far)
    there.release()
    assert there.cut() == 0


def test_other_sockets_are_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    other, end = socket.socketpair()
    with other, end:
        part = part_of(inode(other))
        assert part.cut() == 1
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        part.release()
    assert part_of(0).cut() == 0


def test_a_number_that_is_used_again_is_not_cut(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    old, end = socket.socketpair()
    part, number = part_of(inode(old)), old.fileno()
    old.close()
    end.close()
    os.dup2(near.fileno(), number)
    try:
        assert part.cut() == 0
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    finally:
        os.close(number)
