"""What a program sets on its data set goes on in a resumed run: switches, levels, strengths of an augmentation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler, default_collate

from mindx_elastic import Guard
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.guard.loops.data_settings import DataSettings
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from tests.guard.program import BATCHES, Loop, Program, check
from tests.guard.test_loaders import of, plain

pytestmark = pytest.mark.usefixtures("clean")


class Strong:
    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(4) > self.p)


class Pictures(Dataset[Any]):
    """Every attribute counts, but `calls`, which belongs to the data set itself."""

    def __init__(self) -> None:
        self.x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(1))
        self.mosaic, self.level, self.calls, self.bias = True, 0.0, 0, 0.0
        self.strong = Strong(0.1)
        self.others: Any = [self.strong]
        self.shifts: list[float] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.calls += 1
        x = self.x[index] + 0.1 * self.level * torch.randn(4) + self.bias + sum(self.shifts)
        if self.mosaic:
            x = x + self.x[int(torch.randint(len(self.x), ()))]
        for other in self.others:
            x = other(x)
        return x, index

    def settings(self) -> tuple[Any, ...]:
        return self.mosaic, self.level, self.bias, self.strong.p, len(self.others), list(self.shifts)


class Collate:
    """Sizes that change, as in detectors: set by the program."""

    def __init__(self) -> None:
        self.size = 4

    def __call__(self, samples: list[Any]) -> Any:
        x, index = default_collate(samples)
        return x * self.size, index


def loader_of(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, 4, collate_fn=Collate(), **options)


def once(p: Program) -> None:
    """At the head of an epoch, in mid-epoch and behind an epoch: whole values, and in place."""
    data = p.loader.dataset
    for epoch in p.guard.epochs(4):
        if epoch == 2:
            data.mosaic, data.strong.p, p.loader.collate_fn.size = False, 0.6, 2
        for batch in p.loader:
            if p.guard.step == 7:
                data.bias = 0.3
            p.log.append(data.settings())
            p.train(batch)
        if epoch == 1:
            data.shifts.append(0.5)
        if epoch == 3:
            data.others = []


def each_time(p: Program) -> None:
    data = p.loader.dataset
    for _ in p.guard.epochs(4):
        data.level += 1
        for batch in p.loader:
            data.bias += 0.1
            p.log.append(data.settings())
            p.train(batch)
        data.level += 1


@pytest.mark.parametrize(
    ("loop", "stops", "workers"),
    [(once, (5, 10, 13, 16), 0), (each_time, (5, 10, 13), 0), (once, (13, 17), 1)],  # workers have a copy of the data
)
def test_it_goes_on(
    loop: Loop, stops: tuple[int, ...], workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(loop, tmp_path, stops, make=of(lambda: loader_of(Pictures(), shuffle=True, num_workers=workers)))
    assert "bit for bit" not in caplog.text and "is not kept" not in caplog.text


class Counting(Sampler[int]):
    """Counts its passes and what it has given by itself; at the `end` of a pass, or at its begin."""

    def __init__(self, data: Pictures, *, end: bool) -> None:
        self.data, self.end, self.passes, self.given = data, end, 0, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.passes + 100 * self.given)
        self.passes += not self.end
        for index in torch.randperm(len(self.data), generator=draw).tolist():
            self.given += 1
            yield index
        self.passes += self.end


@pytest.mark.parametrize("end", [False, True])
def test_a_sampler_that_counts_by_itself(end: bool, tmp_path: Path) -> None:
    """Behind the last batch of an epoch the lines behind it have not run: there the resumed run tells of it."""

    def make() -> DataLoader[Any]:
        data = Pictures()
        return loader_of(data, sampler=Counting(data, end=end))

    check(plain, tmp_path, (3, 13) if end else (10, 13), make=of(make))


# --- by itself ---


def settings_of(data: Any) -> DataSettings:
    return DataSettings(loader_of(data), 2)


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.sets(_LEAVES, max_size=2)
    ),
    max_leaves=5,
)


@given(first=_VALUES, values=st.lists(_VALUES, max_size=3))
def test_plain_values_come_back_in_another_process_and_at_an_earlier_boundary(first: Any, values: list[Any]) -> None:
    """Set, or changed in place; a list or dict stays the program's own."""
    data: Any = Pictures()
    data.held = [copy.deepcopy(first)]
    settings = settings_of(data)
    settings.at_begin(1)
    states = [(settings.state(), [first])]
    for value in values:
        data.held[0] = copy.deepcopy(value)
        states.append((settings.state(), [value]))
    for state, expected in reversed(states):
        other: Any = Pictures()
        other.held = held = [copy.deepcopy(first)]
        settings_of(other).load(state, 1)
        settings.load(state, 1)  # a rank that lives on in a recovery in place
        for found in (data.held, held):
            assert same_tree(found, expected), (found, expected)
        assert other.held is held and (state is None) is same_tree([first], expected)


def test_nothing_is_saved_of_what_is_not_set() -> None:
    data = Pictures()
    settings = settings_of(data)
    settings.at_begin(1)
    settings.at_opened()
    settings.begin_making()
    data[0]
    settings.end_making()
    assert data.calls == 1 and settings.state() is None


def test_the_head_of_another_number_of_ranks_is_right() -> None:
    """Each rank's share is set at the head; a switch that nobody sets again is put back."""
    data = Pictures()
    settings = settings_of(data)
    settings.at_begin(1)
    data.level, data.mosaic = 7.0, False
    state: Any = settings.state()
    for other in (FollowedLoader.as_of_another_rank({"settings": state})["settings"], {**state, "num_ranks": 4}):
        data = Pictures()
        settings = settings_of(data)
        settings.load(other, 1)
        assert (data.level, data.mosaic) == (7.0, False)
        data.level = 3.0
        settings.at_begin(1)
        settings.at_opened()
        assert (data.level, data.mosaic) == (3.0, False)
    data = Pictures()
    settings = settings_of(data)
    settings.load(state, 1)
    data.level = 3.0
    settings.at_begin(1)
    assert data.level == 7.0  # what the head has done again is undone


def test_what_is_no_longer_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    settings_of(Pictures()).load({"num_ranks": 2, "now": {"dataset.gone": {"x": 1}, "dataset": {"level": 2.0}}}, 1)
    assert "the training had set dataset.gone.x, and there is no such object now" in caplog.text


def test_a_damaged_state_is_left_alone() -> None:
    states: list[Any] = [3, [], {"now": 3}, {"now": {"dataset": 3}}]
    states += [{"now": {"dataset": {"level": torch.zeros(1)}}}, {"now": {3: {"level": 1}, "dataset": {4: 1}}}]
    for state in states:
        settings_of(Pictures()).load(state, 1)


def test_indices_that_are_a_range_or_grow_in_mid_epoch() -> None:
    sampler = SubsetRandomSampler(range(100))
    settings = DataSettings(DataLoader(range(999), sampler=sampler), 1)  # type: ignore[arg-type]
    settings.reset()
    assert sampler.indices == range(100)
    sampler.indices = range(1, 101)
    state: Any = settings.state()
    assert state["now"]["sampler"]["indices"] == list(range(1, 101))
    settings.load(state, 1)
    assert list(sampler.indices) == list(range(1, 101))
    sampler.indices = [*range(100)]
    settings.state()
    sampler.indices.append(7)
    state = settings.state()
    assert state["now"]["sampler"]["indices"] == [*range(100), 7]


def test_a_second_entry_tells_what_it_puts_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the program sets between two blocks counts where the second one starts over; else the boundary does."""
    data = Pictures()
    loader, net = DataLoader(data, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    guard = Guard(model=net, optimizer=optimizer, loader=loader, directory=tmp_path, final_save=False)
    with guard:
        pass
    data.level = 1.0
    for epochs, level in ((1, 1.0), (2, 2.0)):
        with guard:
            assert data.level == level
            for _ in guard.epochs(epochs):
                data.level = 2.0
                for x, _ in loader:
                    net(x).sum().backward()
                    optimizer.step()
                    guard.step_end()
            guard.save()
        data.level, data.mosaic = 3.0, epochs == 1
    assert "dataset.level: put back as at the last boundary" in caplog.text and "mosaic" not in caplog.text
