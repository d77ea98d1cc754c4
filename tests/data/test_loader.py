from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from mindx_elastic.data import ResumableLoader
from mindx_elastic.errors import MismatchError, UsageError
from tests.data.datasets import Noisy, NoisyStream, noisy_collate, same


def loader(size: int = 30, batch_size: int = 4, **options: Any) -> ResumableLoader:
    options.setdefault("collate_fn", noisy_collate)
    return ResumableLoader(Noisy(size), batch_size, True, **options)


def take(source: ResumableLoader, count: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The first `count` batches of the next iteration, and the position after them."""
    iterator = iter(source)
    batches = [next(iterator) for _ in range(count)]
    return batches, source.state_dict()


def indices(batches: list[torch.Tensor]) -> list[int]:
    return [int(index) for batch in batches for index in batch[:, 0]]


EPOCH = list(loader())


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    seed=st.integers(-5, 2**70),
    data=st.data(),
)
def test_the_rest_of_the_epoch_is_the_same_after_a_resume(
    size: int, batch_size: int, world_size: int, drop_last: bool, seed: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    options: dict[str, Any] = {"seed": seed, "rank": rank, "world_size": world_size, "drop_last": drop_last}
    whole = list(loader(size, batch_size, **options))
    done = data.draw(st.integers(0, len(whole)))
    before, state = take(loader(size, batch_size, **options), done)
    resumed = loader(size, batch_size, **options)
    resumed.load_state_dict(state)
    assert same(before + list(resumed), whole)
    assert resumed.state_dict()["batch"] == len(whole)


@pytest.mark.parametrize(("before", "after", "done"), [(0, 1, 5), (2, 0, 5), (2, 1, 1)])
def test_the_number_of_workers_may_change(before: int, after: int, done: int) -> None:
    first, state = take(loader(num_workers=before), done)
    resumed = loader(num_workers=after)
    resumed.load_state_dict(state)
    assert same(first + list(resumed), EPOCH)


def test_an_older_iterator_cannot_take_from_persistent_workers() -> None:
    source = loader(num_workers=1, persistent_workers=True)
    old = iter(source)
    next(old)
    new = iter(source)
    with pytest.raises(UsageError, match="newer iterator"):
        next(old)
    next(new)
    source.shutdown()


def test_padding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    source = loader(5, 1, rank=0, world_size=3)
    list(source), list(source)
    (message,) = caplog.messages
    assert "the last step of each epoch repeats 1 of them" in message


@pytest.mark.parametrize("workers", [0, 1])
def test_the_hook_comes_before_the_first_fetch(workers: int) -> None:
    calls: list[int] = []
    source = loader(num_workers=workers)
    source.on_iterator_ready = lambda: calls.append(source.state_dict()["batch"])
    iterator = iter(source)
    assert calls == []
    list(iterator)
    assert calls == [0]
    _, state = take(source, 3)
    source.load_state_dict(state)
    list(source)
    assert calls == [0, 0, 3]
    source.load_state_dict(source.state_dict())
    assert list(source) == [] and calls == [0, 0, 3, 8], "also where no batch is left"


class Failing(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("sample five is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_data_set_reaches_the_caller_and_counts_as_a_batch(workers: int) -> None:
    source = ResumableLoader(Failing(8), 2, num_workers=workers)
    iterator = iter(source)
    got = [next(iterator), next(iterator)]
    state = source.state_dict()
    with pytest.raises(KeyError, match="sample five"):
        next(iterator)
    assert source.state_dict()["batch"] == 3
    got.append(next(iterator))
    assert indices(got) == [0, 1, 2, 3, 6, 7]
    source.load_state_dict(state)
    with pytest.raises(KeyError, match="sample five"):
        next(iter(source))


class Unpicklable(Noisy):
    def __init__(self) -> None:
        super().__init__(8)
        self.hold = lambda: None


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_workers_that_cannot_start_leave_the_position() -> None:
    source = ResumableLoader(Unpicklable(), 2, num_workers=1, multiprocessing_context="spawn")
    before = source.state_dict()
    with pytest.raises(Exception, match=r"pickle|Can't get local object"):
        iter(source)
    assert source.state_dict() == before
    assert source.epoch == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "7"}, "seed='7'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"sampler": range(3)}, "sampler="),
        ({"rank": 0}, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"dataset": NoisyStream(3)}, "iterable"),
        ({"dataset": object()}, "__len__"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ResumableLoader(**{"dataset": Noisy(8), **options})


def test_a_changed_loader_is_named() -> None:
    _, state = take(loader(), 2)
    for other, message in (
        (loader(batch_size=5), "batch_size was 4, is 5"),
        (loader(seed=1), "seed was 0, is 1"),
        (loader(drop_last=True), "drop_last was False, is True"),
    ):
        _, before = take(other, 1)
        with pytest.raises(MismatchError, match=message):
            other.load_state_dict(state)
        assert other.state_dict() == before


def test_another_data_set_is_refused_when_it_is_read_in_mid_epoch(caplog: pytest.LogCaptureFixture) -> None:
    words = "has 31 samples, and had 30 at the checkpoint"
    _, state = take(loader(), 2)
    other = loader(size=31)
    other.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(MismatchError, match=words):
            iter(other)
    _, state = take(loader(), 8)
    other = loader(size=31)
    other.load_state_dict(state)
    caplog.set_level(logging.INFO, "mindx_elastic")
    assert [len(list(other)) for _ in range(2)] == [0, 8]
    assert caplog.text.count(words) == 1, "at an epoch's end the training may have set it for the next one"


def test_a_damaged_position_or_one_of_a_later_version_is_refused() -> None:
    source = loader()
    before = source.state_dict()
    for name, value in (("kind", "replay"), ("epoch", -1), ("batch", "3"), ("samples", 31), ("samples", True)):
        with pytest.raises(MismatchError):
            source.load_state_dict({**before, name: value})
    with pytest.raises(MismatchError, match=r"streams=6.*newer"):
        source.load_state_dict({**before, "streams": 6})
    assert source.state_dict() == before


class Growing(Dataset[int]):
    size = 4

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("done", "sizes"), [(1, [6]), (3, [6, 8])], ids=["in mid-epoch", "at an epoch's end"])
def test_a_data_set_may_get_its_length_between_the_load_and_the_iteration(done: int, sizes: list[int]) -> None:
    dataset = Growing()
    dataset.size = 6
    _, state = take(ResumableLoader(dataset, 2), done)
    for size in sizes:
        other = Growing()
        resumed = ResumableLoader(other, 2)
        resumed.load_state_dict(state)
        other.size = size
        assert [batch.tolist() for batch in resumed] == [[0, 1], [2, 3], [4, 5]][done:]


def test_a_position_of_an_earlier_version_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The order is the same, and samples draw otherwise."""
    source = loader()
    first, state = take(source, 3)
    source.load_state_dict(state)
    assert not caplog.records
    source.load_state_dict({name: value for name, value in state.items() if name != "streams"})
    assert "they draw others" in caplog.text
    assert indices([*first, *source]) == indices(EPOCH)
