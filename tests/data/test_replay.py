from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from mindx_elastic.data import ReplayLoader, ResumableLoader
from mindx_elastic.data.random_streams import capture_streams, restore_streams, seed_streams
from mindx_elastic.errors import MismatchError, UsageError
from mindx_elastic.persist.flatten import flatten, unflatten
from tests.data.datasets import Noisy, NoisyStream, noisy_collate, same

SIZE = 30


class Shuffler(Sampler[int]):
    """A user's sampler: shuffles with Python's global stream, and knows its epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(order[self.epoch % 5 :])

    def __len__(self) -> int:
        return SIZE - self.epoch % 5


class OwnGenerators(Sampler[list[int]]):
    """A user's batch sampler that draws from generators of its own, which go on from epoch to epoch."""

    def __init__(self) -> None:
        self.draws: list[Callable[[int], Any]] = [
            np.random.default_rng(3).integers,
            np.random.RandomState(4).randint,
            random.Random(5).randrange,
        ]
        self.torch = torch.Generator().manual_seed(6)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield [*(int(draw(SIZE)) for draw in self.draws), int(torch.randint(SIZE, (), generator=self.torch))]

    def __len__(self) -> int:
        return 8


class Counting(Sampler[int]):
    """A user's sampler with a state of its own."""

    def __init__(self) -> None:
        self.passes = {"count": 0}

    def __iter__(self) -> Iterator[int]:
        self.passes["count"] += 1
        return iter([(index * 7 + self.passes["count"]) % SIZE for index in range(SIZE)])

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return self.passes

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state


class Doubling(DataLoader[Any]):
    """A subclass that decides by itself what a batch is."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch * 2


def plain(kind: str, workers: int = 0, **options: Any) -> Any:
    data, options = Noisy(SIZE), {"collate_fn": noisy_collate, "num_workers": workers, **options}
    makers: dict[str, Callable[[], Any]] = {
        "python": lambda: DataLoader(data, 4, sampler=Shuffler(), **options),
        "generators": lambda: DataLoader(data, batch_sampler=OwnGenerators(), **options),
        "counting": lambda: DataLoader(data, 4, sampler=Counting(), drop_last=True, **options),
        "weighted": lambda: DataLoader(data, 4, sampler=WeightedRandomSampler(range(1, SIZE + 1), SIZE), **options),
        "shared generator": lambda: DataLoader(
            data, 4, shuffle=True, generator=torch.Generator().manual_seed(9), **options
        ),
        "unbatched": lambda: DataLoader(
            data, None, sampler=RandomSampler(range(SIZE), replacement=True), **options | {"collate_fn": torch.clone}
        ),
        "iterable": lambda: DataLoader(NoisyStream(SIZE), 4, **options),
        "subclass": lambda: Doubling(data, 4, shuffle=True, **options),
    }
    return makers[kind]()


REPLAYED = ["python", "generators", "counting", "weighted", "shared generator", "unbatched", "iterable", "subclass"]


def made(kind: str, workers: int = 0, **options: Any) -> Any:
    """A loader that resumes: ours, or one that replays another."""
    if kind == "resumable":
        return ResumableLoader(Noisy(SIZE), 4, True, collate_fn=noisy_collate, num_workers=workers, **options)
    return ReplayLoader(plain(kind, workers, **options))


def run(source: Any, epochs: int) -> list[list[torch.Tensor]]:
    return [list(source) for _ in range(epochs)]


@pytest.mark.parametrize("done", [5, None])
@pytest.mark.parametrize("kind", [*REPLAYED, "resumable"])
def test_a_resumed_run_goes_on_with_the_same_batches(kind: str, done: int | None) -> None:
    """Epoch 2 is broken off after `done` batches (None: at its end); a new process finishes it and does epoch 3."""
    seed_streams(7)
    whole = run(made(kind), 3)

    seed_streams(7)
    source = made(kind)
    first = list(source)
    iterator = iter(source)
    done = len(whole[1]) if done is None else done
    before = [next(iterator) for _ in range(done)]
    state, streams = unflatten(*flatten(source.state_dict())), capture_streams()
    assert same(first, whole[0])

    seed_streams(12345)  # another process: other streams, new objects
    resumed = made(kind)
    resumed.load_state_dict(state)
    resumed.on_iterator_ready = lambda: restore_streams(streams)
    rest = list(resumed)
    assert same(before + rest, whole[1])
    resumed.on_iterator_ready = None
    assert resumed.epoch == 3
    assert same(list(resumed), whole[2])


@pytest.mark.parametrize(("kind", "workers"), [("shared generator", 2), ("iterable", 2), ("subclass", 1)])
def test_resuming_with_workers(kind: str, workers: int) -> None:
    seed_streams(7)
    whole = list(ReplayLoader(plain(kind, workers)))
    seed_streams(7)
    source = ReplayLoader(plain(kind, workers))
    iterator = iter(source)
    before = [next(iterator) for _ in range(3)]
    state = source.state_dict()
    del iterator
    seed_streams(12345)
    resumed = ReplayLoader(plain(kind, workers))
    resumed.load_state_dict(state)
    assert same(before + list(resumed), whole)


class Unseeded(IterableDataset[torch.Tensor]):
    """As a shuffle that webdataset seeds by the process and the time."""

    def __init__(self, seed: object) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = [torch.tensor([float(row)]) for row in range(SIZE)]
        random.Random(str(self.seed)).shuffle(rows)
        return iter(rows)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_an_epoch_that_begins_again_with_other_samples_is_told(
    is_fixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = ReplayLoader(DataLoader(Unseeded("now"), 4))
    iterator = iter(source)
    next(iterator), next(iterator)
    state = unflatten(*flatten(source.state_dict()))
    resumed = ReplayLoader(DataLoader(Unseeded("now" if is_fixed else "later"), 4))
    resumed.load_state_dict(state)
    next(iter(resumed))
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in told] == ["not bit for bit the uninterrupted run"] * (not is_fixed)


@pytest.mark.parametrize("kind", ["shared generator", "iterable", "resumable"])
def test_persistent_workers(kind: str) -> None:
    make = partial(made, kind, 1, persistent_workers=True)

    source = make()
    whole = run(source, 3)
    source.shutdown()
    source = make()
    list(source)
    iterator = iter(source)
    before = [next(iterator) for _ in range(3)]
    state = source.state_dict()
    source.shutdown()
    resumed = make()
    resumed.load_state_dict(state)
    assert same(before + list(resumed), whole[1])
    assert same(list(resumed), whole[2])
    resumed.shutdown()


@pytest.mark.parametrize("kind", ["python", "resumable"])
def test_break_and_set_epoch_follow_the_same_rules(kind: str) -> None:
    source = made(kind)
    iterator = iter(source)
    first = next(iterator)
    del iterator
    state = source.state_dict()
    assert (state["epoch"], state["batch"], source.epoch) == (1, 1, 2)
    rests = []
    for _ in range(2):
        source.load_state_dict(state)
        assert (source.epoch, source.state_dict()) == (1, state)
        source.set_epoch(1)
        assert source.state_dict() == state, "it keeps a loaded position of that epoch"
        rests.append(list(source))
    assert same(*rests) and len(rests[0]) == 7 and source.epoch == 2
    assert kind == "python" or same([first, *rests[0]], list(made(kind)))
    source.load_state_dict(state)
    source.set_epoch(2)
    assert (source.state_dict()["epoch"], source.state_dict()["batch"]) == (2, 0)


def test_set_epoch_reaches_the_sampler_and_the_users_own_choice_comes_back() -> None:
    source = ReplayLoader(plain("python"))
    source.set_epoch(3)
    assert source.sampler.epoch == 3
    source.sampler.set_epoch(2)  # the user counts from 0
    iterator = iter(source)
    next(iterator)
    resumed = ReplayLoader(plain("python"))
    resumed.load_state_dict(source.state_dict())
    resumed.set_epoch(3)
    list(resumed)
    assert resumed.sampler.epoch == 2


def test_it_passes_on_what_it_does_not_have_and_refuses_what_cannot_be_begun_again() -> None:
    wrapped = plain("python")
    source = ReplayLoader(wrapped)
    assert (source.dataset, source.batch_size, len(source)) == (wrapped.dataset, 4, 8)
    with pytest.raises(AttributeError):
        _ = source.no_such_thing
    sources: list[Any] = [iter([1]), 7]
    for source in sources:
        with pytest.raises(UsageError):
            ReplayLoader(source)


def position_after(source: ReplayLoader, count: int) -> dict[str, Any]:
    iterator = iter(source)
    for _ in range(count):
        next(iterator)
    return source.state_dict()


def test_changes_are_named() -> None:
    state = position_after(ReplayLoader(plain("iterable", 1)), 2)
    with pytest.raises(MismatchError, match="num_workers was 1, is 0"):
        ReplayLoader(plain("iterable")).load_state_dict(state)
    with pytest.raises(MismatchError, match="seed was 0, is 5"):
        ReplayLoader(plain("iterable", 1), seed=5).load_state_dict(state)
    with pytest.raises(MismatchError, match="another kind"):
        ReplayLoader(plain("iterable", 1)).load_state_dict({**state, "kind": "resumable"})
    shorter = ReplayLoader([1, 2, 3])
    shorter.load_state_dict(position_after(ReplayLoader([1, 2, 3, 4]), 2))
    with pytest.raises(MismatchError, match="length was 4, is 3"):
        iter(shorter)


@pytest.mark.parametrize("wrapped", [plain("python"), NoisyStream(3)])
def test_data_that_has_become_shorter_is_an_error_and_not_an_empty_epoch(wrapped: Any) -> None:
    source = ReplayLoader(wrapped)
    position = position_after(source, 2)
    source.load_state_dict({**position, "batch": 90})
    with pytest.raises(MismatchError, match="only"):
        iter(source)
    assert source.state_dict()["batch"] == 90


class Endless(Sampler[int]):
    """A sampler that never ends and has no length, with a generator of its own."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield from torch.randperm(SIZE, generator=generator).tolist()


def test_a_sampler_without_a_length_is_replayed() -> None:
    def loader() -> ReplayLoader:
        return ReplayLoader(DataLoader(Noisy(SIZE), 4, sampler=Endless(), num_workers=1), seed=3)

    first = loader()
    batches = iter(first)
    for _ in range(9):
        next(batches)
    state = first.state_dict()
    expected = [next(batches) for _ in range(3)]
    first.shutdown()
    seed_streams(12)
    second = loader()
    second.load_state_dict(state)
    assert same([batch for _, batch in zip(range(3), second, strict=False)], expected)
    second.shutdown()


def test_an_evaluation_on_the_loader_does_not_touch_the_digest_of_the_epochs_order() -> None:
    """And the digest is a number that the boundary ring packs without a detour."""
    loader = ReplayLoader(DataLoader(range(12), 2, sampler=RandomSampler(range(12))))  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()["samples"]
    with loader.set_aside():
        assert len(list(loader)) > 1
    assert loader.state_dict()["samples"] == before < 1 << 63
    next(batches)
    assert loader.state_dict()["samples"] != before
