"""Small records of ranks, which other nodes' agents keep, and what becomes of them when a node is lost."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mindx_elastic.core.frames import Frames
from mindx_elastic.memory.boundaries import BOUNDARIES_FILE, BoundaryRing, read_ring
from mindx_elastic.rejoin.small_records import (
    MOST_BYTES,
    MOST_MESSAGE_BYTES,
    Courier,
    Kept,
    keepers,
    put_into_ring,
)


@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_some_node_keeps_the_records_of_each_rank_after_the_loss_of_the_first_and_another(num: int) -> None:
    assert 0 in keepers(num)
    for node in range(num):
        mine = keepers(num, node)
        assert node not in mine and len(mine) == min(2, num - 1) and set(mine) <= set(keepers(num))
        if num > 2 and node != 0:
            assert all(set(keepers(num, lost)) - {0, node} for lost in (0, node))


def pipe() -> tuple[Courier, socket.socket]:
    """A courier, and the other end of its connection."""
    one, other = socket.socketpair()
    one.setblocking(False)
    courier = Courier.__new__(Courier)
    courier._left, courier._socket = b"", one
    return courier, other


def send(courier: Courier, step: int, *, forecast: bool = False, pinned: bool = False, run: str = "run") -> None:
    kind = {"forecast": forecast, "trusted": True, "pinned": pinned}
    courier.send(run, 2, step, b"state of %d" % step, **kind)


def test_the_newest_records_of_each_kind_go_into_a_ring(tmp_path: Path) -> None:
    courier, other = pipe()
    for step in range(1, 9):
        send(courier, step, forecast=True)
        send(courier, step)
    send(courier, 6, pinned=True)
    courier.close()
    kept, ring = Kept(), tmp_path / BOUNDARIES_FILE
    assert all(map(kept.take, Frames(MOST_MESSAGE_BYTES).feed(other.recv(1 << 20))))
    assert put_into_ring(kept.records, ring) == 7
    found = {(record.step, record.forecast, record.pinned): record for record in read_ring(ring)}
    boundaries, pinned, foreseen = [(step, False, False) for step in (5, 6, 7, 8)], (6, False, True), (7, 8)
    assert set(found) == {*boundaries, pinned, *((step, True, False) for step in foreseen)}
    assert found[8, False, False].content == b"state of 8" and found[8, False, False].attempt == 2
    assert put_into_ring(kept.records, ring) == 0, "the ring has them already"
    assert put_into_ring([], ring) == 0
    other.close()


def test_a_ring_that_is_newer_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / BOUNDARIES_FILE
    ring = BoundaryRing(path, "run", 1000)
    ring.write(2, 9, b"its own")
    ring.close()
    kept, (courier, other) = Kept(), pipe()
    send(courier, 8)
    assert all(map(kept.take, Frames(MOST_MESSAGE_BYTES).feed(other.recv(1 << 16))))
    assert put_into_ring(kept.records, path) == 0
    assert [record.step for record in read_ring(path)] == [9]
    courier.close()
    other.close()


def test_a_connection_that_nobody_reads_holds_up_nothing() -> None:
    courier, other = pipe()
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
        steps |= {record.step for record in kept.records}
    assert 0 in steps and len(steps) < 200 and steps == set(range(len(steps)))
    courier.close()
    other.close()


@pytest.mark.parametrize("content", [b"", b"x" * 200, bytes(200), b"\xff" * 200])
def test_nonsense_is_no_record(content: bytes) -> None:
    assert not Kept().take(content)
