"""The boundary log: a replica's weights and a killed rank's own small state are the killed rank's state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.capture.rng import capture_rng, pack_rng, restore_rng
from mindx_elastic.core.position import Position
from mindx_elastic.memory import boundary_log
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.boundary_log import BOUNDARIES_FILE, BoundaryLog
from mindx_elastic.memory.memory_files import OwnState, own_states
from tests.persist.states import assert_same

RUN, ATTEMPT = "run-a", 2


class Network(nn.Module):
    """Everything that may differ from rank to rank where the weights do not."""

    seen: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.notes: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.scratch += 1
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
        self.log = BoundaryLog(self.arena, self.collector, [self.network], lambda: self.step + 1)
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
        """What lies in memory, by step."""
        found = own_states(self.arena.folder / BOUNDARIES_FILE)
        assert all(moment[:2] == (RUN, ATTEMPT) for moment in found)
        return {moment[2]: own for moment, own in found.items()}


Ranks = list[Rank]


def reduce(ranks: Ranks) -> None:
    """As DDP does: equal gradients everywhere."""
    for parameters in zip(*(rank.network.parameters() for rank in ranks), strict=True):
        mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
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
    assert "counted" not in composed and "model" not in composed


# --- trust ---


def test_a_forecast_is_trusted_from_the_second_step_on(ranks: Ranks) -> None:
    ranks[0].forward()
    assert ranks[0].own() == {}
    reduce(ranks[:1])
    ranks[0].finish()
    ranks[0].forward()
    assert ranks[0].own()[2].forecast


def draw_torch(rank: Rank) -> None:
    torch.rand(1)


def draw_python(rank: Rank) -> None:
    random.random()


def draw_numpy(rank: Rank) -> None:
    np.random.rand()


def change_buffer(rank: Rank) -> None:
    rank.network.seen += 5


@pytest.mark.parametrize("surprise", [draw_torch, draw_python, draw_numpy, change_buffer])
def test_a_program_that_goes_on_after_the_forward_is_never_trusted_again(
    ranks: Ranks, surprise: Callable[[Rank], None]
) -> None:
    rank = ranks[0]
    train([rank], 3)
    rank.forward()
    assert rank.own()[4].forecast, "trusted so far"
    rank.between = lambda: surprise(rank)
    reduce([rank])
    rank.finish()
    rank.between = lambda: None
    for step in (5, 6, 7):
        rank.forward()
        assert step not in rank.own()
        reduce([rank])
        rank.finish()
        assert not rank.own()[step].forecast, "boundaries themselves are as good as ever"


def test_a_wrong_forecast_in_the_first_step(ranks: Ranks) -> None:
    rank = ranks[0]
    rank.between = lambda: draw_torch(rank)
    train([rank], 1)
    rank.between = lambda: None
    train([rank], 3)
    rank.forward()
    assert 5 not in rank.own()


def test_several_forwards_before_one_boundary(ranks: Ranks) -> None:
    rank = ranks[0]
    train([rank], 2)
    for _ in range(3):
        rank.forward()
    assert rank.own()[3].forecast
    rank.finish()
    rank.forward()
    assert rank.own()[4].forecast, "the last forward counts"


def test_a_replaced_buffer_gives_no_forecast_and_a_good_boundary(ranks: Ranks) -> None:
    rank = ranks[0]
    train([rank], 2)
    rank.network.seen = torch.tensor(77)
    rank.forward()
    assert 3 not in rank.own()
    rank.finish()
    composed = rank.collector.compose(rank.state(), rank.own()[3].unpack())
    assert composed["model"]["seen"] == 78
    assert_same(composed, rank.state())


# --- troubles ---


def test_a_state_that_grows_beyond_its_place(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_log, "_LEAST", 64)
    rank = ranks[0]
    train([rank], 4)
    size = (rank.arena.folder / BOUNDARIES_FILE).stat().st_size
    rank.counted.values["long"] = torch.arange(50_000.0)
    train([rank], 1)
    assert (rank.arena.folder / BOUNDARIES_FILE).stat().st_size > size
    assert sorted(rank.own()) == [2, 3, 4, 5], "the ones before are taken along"
    assert rank.own()[5].unpack()["plain"]["counted"]["long"].numel() == 50_000


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
        monkeypatch.setattr("mindx_elastic.capture.components.copy_tree", lambda tree: tree)
    elif trouble == "room":
        monkeypatch.setattr("os.posix_fallocate", fail)
        rank.counted.values["long"] = torch.arange(50_000.0)
    else:
        monkeypatch.setattr(rank.collector, "copy_ahead", fail)
    train([rank], 3)
    assert len(fired) == (0 if trouble == "value" else 1)
    assert caplog.text.count("boundaries are no longer kept in memory") == 1
    assert max(rank.own()) == 2 or trouble != "error"


def test_the_hooks_are_gone_after_the_end(ranks: Ranks) -> None:
    rank = ranks[0]
    assert len(rank.network._forward_hooks) == 1
    rank.log.close()
    assert len(rank.network._forward_hooks) == 0
