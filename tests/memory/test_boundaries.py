"""The boundaries that a rank keeps in shared memory: the ring, and the log that writes it."""

from __future__ import annotations

import copy
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.capture.rng import capture_rng, pack_rng, restore_rng
from mindx_elastic.core.position import Position
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundaries import (
    BOUNDARIES_FILE,
    BoundaryLog,
    BoundaryRecord,
    BoundaryRing,
    OwnState,
    read_ring,
)
from mindx_elastic.memory.memory_files import own_states
from tests.persist.states import assert_same

RUN = "20260102T030405-abcdef01"


def write(ring: BoundaryRing, step: int, *, attempt: int = 0, forecast: bool = False, trusted: bool = True) -> None:
    content = f"state {step}".encode() + b" forecast" * forecast
    assert ring.write(attempt, step, content, forecast=forecast, trusted=trusted)


def facts(records: Sequence[BoundaryRecord]) -> list[tuple[int, int, bool]]:
    for record in records:
        assert record.content == f"state {record.step}".encode() + b" forecast" * record.forecast
    return [(record.attempt, record.step, record.forecast) for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "boundaries"


def test_a_boundary_that_is_written_twice_costs_one_older_one(path: Path) -> None:
    ring = BoundaryRing(path, RUN, 64)
    for step in range(1, 9):
        write(ring, step)
        write(ring, step)
        assert [*dict.fromkeys(record.step for record in read_ring(path))] == list(range(step, max(0, step - 3), -1))
    ring.close()


def test_a_larger_state_takes_the_older_boundaries_along(path: Path) -> None:
    ring = BoundaryRing(path, RUN, 64)
    for step in (1, 2, 3):
        write(ring, step)
    write(ring, 4, forecast=True, trusted=False)
    assert not ring.write(0, 4, b"x" * 65)
    expected = [(0, 4, True), (0, 3, False), (0, 2, False), (0, 1, False)]
    assert facts(read_ring(path)) == expected, "nothing was touched"
    ring.close()
    larger = BoundaryRing(path, RUN, 128)
    assert facts(read_ring(path)) == expected and not read_ring(path)[0].trusted
    assert larger.write(0, 4, b"x" * 128)
    assert [record.step for record in read_ring(path) if not record.forecast] == [4, 3, 2, 1]
    assert [other.name for other in path.parent.iterdir()] == [path.name]


# --- killed ---


class _Killed(BaseException):
    pass


def _die(*_: object) -> bytes:
    raise _Killed


@pytest.mark.parametrize("at", ["xxhash.xxh3_128_digest", "_HEAD"])
def test_a_write_that_was_cut_off_costs_the_oldest_record_only(
    path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Behind the content, or behind the digest."""
    ring = BoundaryRing(path, RUN, 64)
    for step in range(1, 5):
        write(ring, step)
    with monkeypatch.context() as patch:
        dying: Any = SimpleNamespace(pack_into=_die) if at == "_HEAD" else _die
        patch.setattr(f"mindx_elastic.memory.boundaries.{at}", dying)
        with pytest.raises(_Killed):
            write(ring, 5)
    assert facts(read_ring(path)) == [(0, step, False) for step in (4, 3, 2)]
    again = BoundaryRing(path, RUN, 64)
    write(again, 5)
    assert facts(read_ring(path))[:3] == [(0, step, False) for step in (5, 4, 3)]


@pytest.mark.parametrize("at", ["content", "length", "sequence", "digest"])
def test_a_changed_byte_makes_no_record(path: Path, at: str) -> None:
    ring = BoundaryRing(path, RUN, 64)
    write(ring, 1)
    write(ring, 2)
    ring.close()
    data = bytearray(path.read_bytes())
    place = 128 + (64 + 64)  # of step 2
    assert struct.unpack_from("<Qqq", data, place) == (4, 0, 2)
    data[place + {"content": 64, "length": 24, "sequence": 0, "digest": 40}[at]] ^= 1
    path.write_bytes(data)
    assert facts(read_ring(path)) == [(0, 1, False)]


@pytest.mark.parametrize("size", [0, 127, 500])
def test_a_cut_off_file_holds_nothing(path: Path, size: int) -> None:
    write(BoundaryRing(path, RUN, 64), 1)
    os.truncate(path, size)
    assert read_ring(path) == []
    write(BoundaryRing(path, RUN, 64), 2)
    assert 2 in [record.step for record in read_ring(path)]


# --- the boundary log: a replica's weights and a killed rank's own small state are the killed rank's stat ---


ATTEMPT = 2


class Network(nn.Module):
    """Everything that may differ from rank to rank where the weights do not."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.notes: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.notes.append(float(x.sum()))
        return self.layers(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> list[float]:
        return self.notes

    def set_extra_state(self, state: list[float]) -> None:
        self.notes = list(state)


class Counted:
    """Any object of the user's: what it has counted is the rank's own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class Rank:
    """One replica. Its random generators are put in place around each of its turns: all ranks live in this process."""

    def __init__(self, stack: ExitStack, folder: Path, number: int) -> None:
        torch.manual_seed(0)
        self.network = Network()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.counted = Counted()
        self.collector = Collector(
            {"model": self.network, "optimizer": self.optimizer, "lr": self.scheduler, "counted": self.counted}
        )
        self.arena = RankArena(folder, folder / "ckpt", number)
        stack.callback(self.arena.close)
        self.log = BoundaryLog(self.arena, self.collector, [self.network], self)
        stack.callback(self.log.close)
        self.log.begin(RUN, ATTEMPT)
        self.step, self.number = 0, number
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        self.rng = pack_rng(capture_rng())
        self.between: Callable[[], object] = lambda: None

    def forward(self) -> None:
        restore_rng(self.rng)
        x = torch.randn(8, 4) + random.random() + float(np.random.rand())
        self.counted.values["x"] = x[0].clone()
        self.network(x).pow(2).mean().backward()
        self.rng = pack_rng(capture_rng())

    def finish(self) -> None:
        """Update and boundary."""
        restore_rng(self.rng)
        self.between()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        self.collector.copy(Position(self.step, 1, self.step, 10 + self.number))
        self.log.at_boundary()
        self.rng = pack_rng(capture_rng())

    def state(self) -> Any:
        return copy_tree(self.collector.state())

    def own(self) -> dict[int, OwnState]:
        """What is in memory and may be used by itself, by step."""
        found = own_states(self.arena.folder / BOUNDARIES_FILE)
        assert all(moment[:2] == (RUN, ATTEMPT) for moment in found)
        return {moment[2]: own for moment, own in found.items() if own.trusted}


Ranks = list[Rank]


def reduce(ranks: Ranks) -> None:
    """As DDP does: equal gradients everywhere."""
    for parameters in zip(*(rank.network.parameters() for rank in ranks), strict=True):
        if not (gradients := [p.grad for p in parameters if p.grad is not None]):
            continue  # of a layer that is not used
        mean = torch.stack(gradients).mean(0)
        for parameter in parameters:
            parameter.grad = mean.clone()


def train(ranks: Ranks, steps: int) -> None:
    for _ in range(steps):
        for rank in ranks:
            rank.forward()
        reduce(ranks)
        for rank in ranks:
            rank.finish()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    before = pack_rng(capture_rng())
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield [Rank(stack, tmp_path, number) for number in range(2)]
    restore_rng(before)


# --- composing ---


def test_a_replicas_state_and_the_own_small_state_are_the_own_state(ranks: Ranks) -> None:
    kept = {}
    for step in range(1, 7):
        train(ranks, 1)
        kept[step] = [rank.state() for rank in ranks]
        with pytest.raises(AssertionError):
            assert_same(kept[step][0], kept[step][1])
    for mine, other in ((0, 1), (1, 0)):
        own = ranks[mine].own()
        assert sorted(own) == [3, 4, 5, 6] and not any(one.forecast for one in own.values())
        for step, one in own.items():
            composed = ranks[mine].collector.compose(copy_tree(kept[step][other]), one.unpack())
            assert_same(composed, kept[step][mine])


def test_the_boundary_that_a_job_has_resumed_from_is_kept_for_the_new_attempt(ranks: Ranks) -> None:
    """A rank that dies in its first step has passed no other, and the others go on from this one in place."""
    train(ranks, 2)
    for rank, has_resumed in zip(ranks, (True, False), strict=True):
        rank.log.begin(RUN, ATTEMPT + 1, has_resumed=has_resumed)
    found = [own_states(rank.arena.folder / BOUNDARIES_FILE) for rank in ranks]
    assert [(RUN, ATTEMPT + 1, 2) in each for each in found] == [True, False]
    own = found[0][RUN, ATTEMPT + 1, 2]
    assert own.trusted and not own.forecast
    assert_same(ranks[0].collector.compose(ranks[1].state(), own.unpack()), ranks[0].state())


def test_a_program_can_copy_its_model(ranks: Ranks) -> None:
    """As an average of the weights does, in the middle of a training."""
    train(ranks, 1)
    copied = copy.deepcopy(ranks[0].network)
    assert_same(copied.state_dict(), ranks[0].network.state_dict())


def test_a_forecast_is_what_the_rank_would_have_had(ranks: Ranks) -> None:
    """Killed after its forward; the others reach the boundary."""
    train(ranks, 3)
    for rank in ranks:
        rank.forward()
    forecast = ranks[1].own()[4]
    assert forecast.forecast
    reduce(ranks)
    for rank in ranks:
        rank.finish()
    composed = ranks[1].collector.compose(ranks[0].state(), forecast.unpack())
    expected = ranks[1].state()
    for name in ("model", "optimizer", "lr", "rng"):
        shared = dict(expected[name])
        if name == "model":  # what no forecast has: see `Collector.copy_ahead`
            shared["_extra_state"] = composed[name]["_extra_state"]
        assert_same(composed[name], shared)
    assert not ranks[1].own()[4].forecast, "reached, it goes before the forecast"


def test_another_programs_objects_are_left_to_the_load(ranks: Ranks) -> None:
    train(ranks, 1)
    state = ranks[0].state()
    del state["counted"], state["model"]
    composed = ranks[1].collector.compose(state, ranks[1].own()[1].unpack())
    assert "model" not in composed
    assert_same(composed["counted"], ranks[1].state()["counted"])  # no other rank has it: this rank's own


# --- trust ---


@pytest.mark.parametrize("surprise", [lambda: torch.rand(1), random.random, np.random.rand])
def test_a_program_that_goes_on_after_the_forward_is_never_trusted_again(
    ranks: Ranks, surprise: Callable[[], object]
) -> None:
    rank = ranks[0]
    train([rank], 3)
    rank.forward()
    assert rank.own()[4].forecast, "trusted so far"
    rank.between = surprise
    reduce([rank])
    rank.finish()
    rank.between = lambda: None
    for step in (5, 6, 7):
        rank.forward()
        assert step not in rank.own()
        reduce([rank])
        rank.finish()
        assert not rank.own()[step].forecast, "boundaries themselves are as good as ever"


# --- troubles ---


@pytest.mark.parametrize("trouble", ["value", "room", "error"])
def test_trouble_is_said_once_and_training_goes_on(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    rank = ranks[0]
    train([rank], 2)
    fired = []

    def fail(*args: object, **kwargs: object) -> Any:
        fired.append(args)
        if trouble == "room":
            raise OSError(28, "No space left on device")
        raise RuntimeError("a bug")

    if trouble == "value":
        rank.counted.values["what"] = lambda: None
        monkeypatch.setattr("mindx_elastic.capture.plain_component.copy_tree", lambda tree: tree)
    elif trouble == "room":
        monkeypatch.setattr("os.posix_fallocate", fail)
        rank.counted.values["long"] = torch.arange(50_000.0)
    else:
        monkeypatch.setattr(rank.collector, "copy_ahead", fail)
    train([rank], 3)
    assert len(fired) == (0 if trouble == "value" else 1)
    assert caplog.text.count("boundaries are no longer kept in memory") == 1
    assert max(rank.own()) == 2 or trouble != "error"
