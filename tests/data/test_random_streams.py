from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from mindx_elastic.data import random_streams
from mindx_elastic.data.generators import may_read_streams
from mindx_elastic.data.random_streams import (
    SeededDataset,
    StreamUse,
    as_collated,
    capture_streams,
    restore_streams,
)
from tests.data.datasets import Batched, Noisy, draw, noisy_collate


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(Subset(d, range(9)), range(9))])
def test_a_batched_getter_is_used_and_seeded_once(wrap: Callable[[Any], Dataset[Any]]) -> None:
    batch = SeededDataset(wrap(Batched(9)), default_collate).__getitems__([(11, 1), (12, 2)])
    assert torch.equal(batch[0, 1:], batch[1, 1:])
    assert torch.equal(batch[:1], SeededDataset(wrap(Batched(9)), default_collate).__getitems__([(11, 1)]))


def test_the_samples_of_a_subset_are_seeded_one_by_one() -> None:
    keys = [(11, 1), (12, 2)]
    whole, part = (SeededDataset(data, default_collate) for data in (Noisy(9), Subset(Noisy(9), range(9))))
    assert torch.equal(part.__getitems__(keys), whole.__getitems__(keys))


class OwnTensors(torch.Tensor):
    pass


def own_collate(batch: Any) -> Any:
    return default_collate(batch)


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return (self.tensors[0][index] + torch.rand(1),)


TENSORS = TensorDataset(torch.arange(20.0), torch.arange(20))


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "seeds"),
    [
        (TENSORS, default_collate, False),
        (Subset(Subset(TENSORS, range(9)), (3, 1, 2, 0)), default_collate, False),
        (TENSORS, own_collate, True),
        (Subset(Augmented(torch.arange(20.0)), [3, 1, 2, 0]), default_collate, True),
        (Noisy(4), as_collated, True),
        (TensorDataset(torch.arange(20.0).as_subclass(OwnTensors)), default_collate, True),
    ],
)
def test_only_what_cannot_draw_is_not_seeded(dataset: Any, collate_fn: Any, seeds: bool) -> None:
    keys = [(11, 2), (12, 0), (13, 3)]
    seeded = SeededDataset(dataset, collate_fn)
    assert seeded._draws is seeds
    plain = SeededDataset(dataset, collate_fn)
    plain._draws = True
    before = capture_streams()
    got, one = seeded.__getitems__(keys), seeded[keys[0]]
    assert_same_streams(before)
    assert repr((got, one)) == repr((plain.__getitems__(keys), plain[keys[0]]))
    assert pickle.loads(pickle.dumps(SeededDataset(TENSORS, collate_fn)))._draws is (collate_fn is not default_collate)


def assert_same_streams(before: dict[str, Any]) -> None:
    expected = draw()
    restore_streams(before)
    assert draw() == expected


class Quiet(Noisy):
    """Draws only for the samples in `noisy`."""

    def __init__(self, size: int, noisy: Collection[int] = ()) -> None:
        super().__init__(size)
        self.noisy, self.loaded = noisy, 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded += 1
        noise = draw() if index in self.noisy else [0.0, 0.0, 0.0]
        return torch.tensor([index, *noise], dtype=torch.float64)


class QuietBatches(Quiet):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class InitialSeed(Quiet):
    """Reads a stream's seed, which moves nothing."""

    def __getitem__(self, index: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(self._seed() + index)
        return torch.cat([super().__getitem__(index), torch.rand(1, generator=own, dtype=torch.float64)])

    def _seed(self) -> int:
        return torch.initial_seed()


class DrawsAndFails(Quiet):
    """Whether it fails is drawn, so a seed may make it go well."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 and torch.rand(()) < 0.5:
            raise KeyError(index)
        return super().__getitem__(index)


class Greedy(Quiet):
    """Draws one number for each sample and many for those in `noisy`, and of some leaves a normal deviate behind."""

    def __getitem__(self, index: int) -> torch.Tensor:
        count = 700 if index in self.noisy else 1
        numbers = [sum(random.random() for _ in range(count)), float(np.random.rand(count).sum())]
        if index % 2:
            numbers[0] += random.gauss(0, 1)
            numbers[1] += np.random.randn()
        if index in self.noisy and np.random.rand() < 0.5:
            raise KeyError(index)
        return super().__getitem__(index) + sum(numbers)


class SeedsItself(Quiet):
    def __getitem__(self, index: int) -> torch.Tensor:
        random.seed(index)
        np.random.seed(index)
        return super().__getitem__(index) + random.random() + np.random.rand()


def deviates_collate(batch: list[torch.Tensor]) -> torch.Tensor:
    """Would take the normal deviates that a sample has left behind."""
    return torch.stack(batch) + random.gauss(0, 1) + np.random.randn()


def batches_of(dataset: SeededDataset) -> list[Any]:
    """Of 4 batches of 3, with draws of the training in between."""
    found = []
    for first in range(0, 12, 3):
        try:
            found.append(dataset.__getitems__([(index * 7919 << 20, index) for index in range(first, first + 3)]))
        except KeyError as error:
            found.append(repr(error))
        draw()
    return found


@pytest.mark.parametrize("noisy", [(), (0,), (3, 4, 5), (11,)])
@pytest.mark.parametrize("kind", [Quiet, QuietBatches, InitialSeed, DrawsAndFails, Greedy, SeedsItself])
def test_a_sample_is_the_same_whether_its_data_set_was_taken_for_quiet(
    kind: type[Quiet], noisy: Collection[int]
) -> None:
    for collate_fn in (default_collate, noisy_collate, deviates_collate):
        expected = batches_of(SeededDataset(kind(12, noisy), collate_fn))
        use = StreamUse()
        torch.manual_seed(3)
        before = capture_streams()
        dataset = SeededDataset(kind(12, noisy), collate_fn, use)
        assert repr(batches_of(dataset)) == repr(expected)
        restore_streams(before)
        again = SeededDataset(kind(12, noisy), collate_fn, use)
        assert repr(batches_of(again)) == repr(expected), "another epoch"
        draws = noisy or kind not in (Quiet, QuietBatches) or collate_fn is not default_collate
        assert bool(use.drawn) is (bool(draws) and kind is not InitialSeed), "or the test is empty"


def test_a_batch_that_has_drawn_is_loaded_again_once() -> None:
    use, inner = StreamUse(), Quiet(12, noisy=(4, 7, 10))
    dataset = SeededDataset(inner, default_collate, use)
    for first in range(0, 12, 3):
        before = capture_streams()
        dataset.__getitems__([(index, index) for index in range(first, first + 3)])
        assert_same_streams(before)
    assert len(use.drawn) == 3
    assert inner.loaded == 12 + 3


STREAMS: list[Callable[[], float]] = [
    random.random,
    np.random.random_sample,
    lambda: torch.rand((), dtype=torch.float64).item(),
]
GOLDEN = {
    1: [0.4140646543380324, 0.8262472634824459, 0.06105327471962363],
    4: [0.5625837457494345, 0.31822388429348003, 0.279380429906404],
    8: [0.12390669453263892, 0.7988894045719084, 0.37863579443953077],
    11: [0.7103303109714868, 0.8233686730573588, 0.788548373828826],
}
"""What samples draw from Python's, numpy's and torch's stream: where it changes, the version that files have
is another one."""


class Drawing(Dataset[Any]):
    def __init__(self, *streams: int) -> None:
        self.streams = streams

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([STREAMS[each]() for each in self.streams], dtype=torch.float64)


@pytest.mark.parametrize("streams", [(0,), (1,), (2,), (0, 1, 2)])
def test_only_the_streams_that_are_drawn_from_are_seeded(
    streams: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is drawn is what earlier versions have drawn."""
    begun: set[int] = set()
    seed = random_streams.seed_streams

    def noted(of_sample: int, drawn: Iterable[int] = (0, 1, 2)) -> None:
        begun.update(drawn)
        seed(of_sample, drawn)

    monkeypatch.setattr(random_streams, "seed_streams", noted)
    dataset = SeededDataset(Drawing(*streams), default_collate, StreamUse())
    for number, first in enumerate(range(0, 12, 3)):
        begun.clear()
        before = capture_streams()
        batch = dataset.__getitems__([(index * 7919 << 20, index) for index in range(first, first + 3)])
        assert_same_streams(before)
        assert begun == ({0, 1, 2} if number == 0 else set(streams))
        for index, sample in zip(range(first, first + 3), batch.tolist(), strict=True):
            if index in GOLDEN:
                assert sample == [GOLDEN[index][each] for each in streams]


@pytest.mark.parametrize("use", [None, StreamUse()])
def test_streams_are_put_back_when_loading_is_broken_off(use: StreamUse | None) -> None:
    """By what is no error of the data set's: Ctrl-C, in the middle of a sample."""

    class Interrupted(Drawing):
        def __getitem__(self, index: int) -> torch.Tensor:
            drawn = super().__getitem__(index)
            if index == 7:
                raise KeyboardInterrupt
            return drawn

    dataset = SeededDataset(Interrupted(2), default_collate, use)
    for first in (0, 3):
        dataset.__getitems__([(index, index) for index in range(first, first + 3)])
    before = capture_streams()
    with pytest.raises(KeyboardInterrupt):
        dataset.__getitems__([(index, index) for index in range(6, 9)])
    assert_same_streams(before)


def test_readers_are_found_behind_functions_and_classes() -> None:
    def inner() -> int:
        return torch.initial_seed()

    class Transform:
        def __call__(self, x: Any) -> Any:
            return self.helper(x)

        @staticmethod
        def helper(x: Any) -> Any:
            return {"x": x, "then": lambda: [torch.random.get_rng_state() for _ in range(2)]}

    for reader in (
        inner,
        functools.partial(lambda f: f(), inner),
        Transform().__call__,
        {"all": [Quiet(3), Transform()]},
    ):
        assert may_read_streams([reader])
    assert not may_read_streams([default_collate, Quiet(3), TENSORS])
