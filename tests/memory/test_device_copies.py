"""What a device adds to the boundary ring: it counts once the device has come to it, and not before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.capture import buffer_block
from mindx_elastic.capture.collector import Collector
from mindx_elastic.core.position import Position
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundaries import BoundaryLog, BoundaryRing, read_ring, seal_ring
from mindx_elastic.memory.device_copies import ROOM_HEAD, Addition
from mindx_elastic.memory.memory_files import own_states, small_records

RUN = "a-run"
ROOM = ROOM_HEAD + 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "boundaries"


class Device:
    """Does what it is told when `go` is called, as a GPU that is behind the program."""

    def __init__(self) -> None:
        self.stamp = 1 << 30
        self.doubt = 0
        self._queue: list[Callable[[], None]] = []

    def adds(self, value: int, *, stands_in: bool = False) -> Addition:
        self.stamp += 1
        stamp, doubt = self.stamp, self.doubt

        def put(room: torch.Tensor) -> int:
            def write() -> None:
                room[ROOM_HEAD:] = value
                room[:16].view(torch.int64).copy_(torch.tensor([stamp, doubt]))

            self._queue.append(write)
            return stamp

        return Addition(64, torch.device("cpu"), put, stands_in)

    def go(self, count: int = 100) -> None:
        for write in self._queue[:count]:
            write()
        del self._queue[:count]


def landed(path: Path) -> dict[tuple[int, bool], bytes]:
    return {(record.step, record.forecast): record.device_bytes[:1] for record in read_ring(path)}


def test_only_what_the_device_has_done_counts(path: Path) -> None:
    ring, device = BoundaryRing(path, RUN, 64, ROOM), Device()
    for step in (1, 2, 3):
        assert ring.write(0, step, b"small", addition=device.adds(step))
    device.go(2)
    assert landed(path) == {(1, False): b"\1", (2, False): b"\2", (3, False): b""}
    assert all(len(record.device_bytes) in (0, 64) for record in read_ring(path))


def test_a_larger_ring_takes_over_what_has_landed(path: Path) -> None:
    ring, device = BoundaryRing(path, RUN, 64, ROOM), Device()
    ring.write(0, 1, b"small", addition=device.adds(7))
    device.go()
    ring.close()
    assert BoundaryRing(path, RUN, 64).last_stamp == device.stamp
    BoundaryRing(path, RUN, 128).write(0, 2, b"x" * 100)
    assert landed(path) == {(1, False): b"\7", (2, False): b""}


def test_a_forecast_stands_in_for_a_boundary_that_the_device_never_came_to(path: Path) -> None:
    ring, device = BoundaryRing(path, RUN, 64, ROOM), Device()
    ring.write(0, 1, b"foreseen", forecast=True, addition=device.adds(5))
    device.go()
    ring.write(0, 1, b"passed", addition=device.adds(6, stands_in=True))
    own = own_states(path)[RUN, 0, 1]
    assert (own.content, own.forecast, own.device_bytes[:1]) == (b"passed", False, b"\5")
    device.go()
    assert own_states(path)[RUN, 0, 1].device_bytes[:1] == b"\6"


@pytest.mark.parametrize("doubt", [-1, 0, 1])
@pytest.mark.parametrize("stands_in", [False, True])
def test_forecasts_that_may_be_wrong_do_not(path: Path, doubt: int, stands_in: bool) -> None:
    ring, device = BoundaryRing(path, RUN, 64, ROOM), Device()
    device.doubt = doubt
    ring.write(0, 1, b"foreseen", forecast=True, addition=device.adds(5))
    device.go()
    ring.write(0, 1, b"passed", addition=device.adds(6, stands_in=stands_in))
    assert small_records(path)[0].device_bytes[:1] == (b"\5" if doubt == 0 and stands_in else b"")
    device.go()
    assert small_records(path)[0].device_bytes[:1] == b"\6", "a boundary is what it is"


def test_a_copied_ring_shows_damage(path: Path) -> None:
    ring, device = BoundaryRing(path, RUN, 64, ROOM), Device()
    ring.write(0, 1, b"small", addition=device.adds(1))
    ring.write(0, 2, b"small", addition=device.adds(2))
    device.go()
    seal_ring(path)
    assert landed(path) == {(1, False): b"\1", (2, False): b"\2"}
    data = path.read_bytes()
    damaged = data.replace(b"\2" * 64, b"\2" * 63 + b"\3")
    assert damaged != data
    path.write_bytes(damaged)
    assert landed(path) == {(1, False): b"\1", (2, False): b""}


# --- the boundary log of a rank whose buffers are on a device ---


class Rank:
    """A replica. Its buffers are in host memory, and count as a device's."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.collector = Collector({"model": self.network})
        self._arena = RankArena(folder, folder / "ckpt", 0)
        stack.callback(self._arena.close)
        self.step, self.ring = 0, self._arena.folder / "boundaries"
        self.log = self._open()
        stack.callback(self.close)

    def close(self) -> None:
        self.log.close()

    def _open(self) -> BoundaryLog:
        modules = [self.network]
        log = BoundaryLog(self._arena, self.collector, modules, lambda: self.step + 1, keeps_device_buffers=True)
        log.begin(RUN, 0)
        return log

    def open_again(self) -> None:
        """As a new process does."""
        self.log.close()
        self.log = self._open()

    def forward(self) -> None:
        self.network(torch.randn(8, 4))

    def at_boundary(self) -> None:
        self.step += 1
        self.collector.copy(Position(step=self.step))
        self.log.at_boundary()

    def kept(self, step: int) -> dict[str, Any]:
        """The buffers of the newest record of the step."""
        own = own_states(self.ring)[RUN, 0, step].unpack()
        assert not json.loads(own["buffers"]["model"]["places"])
        return dict(own.get("on_device", {}).get("model", {}))

    @property
    def statistics(self) -> torch.Tensor:
        return self.network.get_buffer("1.running_mean").clone()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(buffer_block, "_is_dense", lambda tensor: False)
    monkeypatch.setattr(buffer_block, "is_on_device", lambda tensor: True)
    with ExitStack() as stack:
        yield Rank(stack, tmp_path)


def stand_in(rank: Rank) -> dict[str, Any]:
    """What counts if the device had never come to the last boundary."""
    data = bytearray(rank.ring.read_bytes())
    for record in read_ring(rank.ring):
        if record.step == rank.step and not record.forecast:
            start = data.index(record.device_bytes)
            data[start - ROOM_HEAD] ^= 1  # another stamp
    copy = rank.ring.with_name("copy")
    copy.write_bytes(data)
    return dict(own_states(copy)[RUN, 0, rank.step].unpack().get("on_device", {}).get("model", {}))


def _evaluate(rank: Rank) -> None:
    with torch.no_grad():
        rank.network(torch.arange(32.0).view(8, 4))


def _reset(rank: Rank) -> None:
    rank.network.get_buffer("1.running_mean").zero_()


def _register(rank: Rank) -> None:
    rank.network.register_buffer("more", torch.ones(3))


@pytest.mark.parametrize("change", [_evaluate, _reset, _register])
def test_not_where_the_buffers_have_changed_since(rank: Rank, change: Callable[[Rank], None]) -> None:
    for _ in range(3):
        rank.forward()
        rank.at_boundary()
    rank.forward()
    change(rank)
    rank.at_boundary()
    assert torch.equal(rank.kept(4)["1.running_mean"], rank.statistics)
    assert stand_in(rank) == {}


def test_not_for_what_has_changed_in_the_tail_of_an_epoch(rank: Rank) -> None:
    for _ in range(3):
        rank.forward()
        rank.at_boundary()
    _reset(rank)
    rank.collector.copy(rank.collector.position)
    rank.log.at_boundary(after_tail=True)
    assert torch.equal(rank.kept(3)["1.running_mean"], torch.zeros(6))
    assert stand_in(rank) == {}


def test_too_many_are_not_kept_which_is_said(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.network.register_buffer("table", torch.zeros(3 << 20))
    with caplog.at_level("INFO"):
        for step in (1, 2):
            rank.forward()
            rank.at_boundary()
            assert rank.kept(step) == {}
    assert "buffers on the device are not kept at each boundary (they have 12 MiB" in caplog.text
    assert len(caplog.records) == 1


def test_forecasts_that_do_not_come_true_end(rank: Rank) -> None:
    for _ in range(3):
        rank.forward()
        rank.at_boundary()
    rank.forward()
    assert rank.kept(4)
    with torch.no_grad():
        rank.network(torch.arange(32.0).view(8, 4))  # an evaluation that has left the network training
    rank.at_boundary()
    assert torch.equal(rank.kept(4)["1.running_mean"], rank.statistics), "the boundary has what there is"
    for step in range(5, 12):
        rank.forward()
        assert not rank.kept(step)
        rank.at_boundary()
        assert torch.equal(rank.kept(step)["1.running_mean"], rank.statistics)


def test_a_buffer_that_is_replaced_by_another_one_is_followed(rank: Rank) -> None:
    for _ in range(3):
        rank.forward()
        rank.at_boundary()
    rank.network.register_buffer("queue", torch.arange(40.0))
    rank.network[1].running_mean = torch.full((6,), 7.0)
    rank.forward()
    rank.at_boundary()
    kept = rank.kept(4)
    assert torch.equal(kept["queue"], torch.arange(40.0)), kept
    assert torch.equal(kept["1.running_mean"], rank.statistics)
