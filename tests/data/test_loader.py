from __future__ import annotations

import logging
import random
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from mindx_elastic.data import PositionedLoader, ResumableLoader
from mindx_elastic.data.random_streams import capture_streams, restore_streams
from mindx_elastic.errors import MismatchError, UsageError
from tests.data.datasets import Batched, Noisy, NoisyStream, draw, noisy_collate, same


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


def flat(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [batch for batches in ranks for batch in batches]


EPOCH = list(loader())


# Resuming


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


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("done", [1, 5])
def test_the_number_of_workers_may_change(before: int, after: int, done: int) -> None:
    first, state = take(loader(num_workers=before), done)
    resumed = loader(num_workers=after)
    resumed.load_state_dict(state)
    assert same(first + list(resumed), EPOCH)


def test_prefetched_batches_do_not_count() -> None:
    source = loader(num_workers=2, prefetch_factor=3)
    iterator = iter(source)
    assert source.state_dict()["batch"] == 0
    next(iterator)
    state = source.state_dict()
    assert (state["batch"], state["samples"], state["finished"]) == (1, 4, False)


def test_persistent_workers_go_on_through_epochs_and_breaks() -> None:
    plain = loader()
    epochs = {number: list(plain) for number in (1, 2, 3, 4)}
    source = loader(num_workers=2, persistent_workers=True)
    assert same(list(source), epochs[1])
    assert same(take(source, 3)[0], epochs[2][:3])
    workers = source._engine._workers
    assert same(list(source), epochs[3])
    source.load_state_dict({**source.state_dict(), "epoch": 4, "batch": 2, "samples": 8, "finished": False})
    assert same(list(source), epochs[4][2:])
    assert source._engine._workers is workers
    source.shutdown()
    source.set_epoch(2)
    assert same(list(source), epochs[2])
    source.shutdown()


def test_an_older_iterator_cannot_take_from_persistent_workers() -> None:
    source = loader(num_workers=1, persistent_workers=True)
    old = iter(source)
    next(old)
    new = iter(source)
    with pytest.raises(UsageError, match="newer iterator"):
        next(old)
    next(new)
    source.shutdown()


def test_spawned_workers() -> None:
    source = loader(num_workers=1, multiprocessing_context="spawn")
    source.load_state_dict(take(loader(), 4)[1])
    assert same(list(source), EPOCH[4:])


def test_another_world_size_finishes_the_epoch() -> None:
    old = [loader(batch_size=2, rank=rank, world_size=2) for rank in range(2)]
    begun = [take(source, 3) for source in old]
    new = [loader(batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    for source in new:
        source.load_state_dict(begun[0][1])
    rest = [list(source) for source in new]
    assert len({len(batches) for batches in rest}) == 1
    seen = indices([batch for batches, _ in begun for batch in batches]) + indices(flat(rest))
    assert sorted(seen) == list(range(30))
    assert {source.epoch for source in new} == {2}


# Epochs


def test_each_iteration_is_the_next_epoch() -> None:
    source = loader()
    assert source.epoch == 1
    first, second = list(source), list(source)
    assert sorted(indices(first)) == sorted(indices(second)) == list(range(30))
    assert indices(first) != indices(second)
    assert source.epoch == 3
    source.set_epoch(2)
    assert same(list(source), second)


def test_augmentation_differs_between_epochs() -> None:
    source = loader()
    rows = [{int(row[0]): row[1:4] for batch in source for row in batch} for _ in range(2)]
    assert all(not torch.equal(rows[0][index], rows[1][index]) for index in rows[0])


def test_break_leaves_the_position_and_the_next_iteration_is_the_next_epoch() -> None:
    source, second = loader(), list(_at_epoch(2))
    for _ in source:
        break
    state = source.state_dict()
    assert (state["epoch"], state["batch"], source.epoch) == (1, 1, 2)
    assert same(list(source), second)
    source.load_state_dict(state)
    assert (source.epoch, source.state_dict()) == (1, state)
    assert same(list(source), EPOCH[1:])


def _at_epoch(epoch: int, **options: Any) -> ResumableLoader:
    source = loader(**options)
    source.set_epoch(epoch)
    return source


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_only() -> None:
    _, state = take(_at_epoch(3), 2)
    resumed = loader()
    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    resumed.set_epoch(3)
    assert same(list(resumed), list(_at_epoch(3))[2:])
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert same(list(resumed), list(_at_epoch(4)))


def test_set_epoch_after_a_break_begins_that_epoch_anew() -> None:
    source = loader()
    take(source, 3)
    source.set_epoch(1)
    assert source.state_dict()["batch"] == 0
    assert same(list(source), EPOCH)


def test_the_end_of_an_epoch_is_a_position_with_nothing_left() -> None:
    source = loader()
    assert len(list(source)) == 8
    state = source.state_dict()
    assert (state["epoch"], state["batch"], state["samples"], state["finished"]) == (1, 8, 30, True)
    resumed = loader()
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert resumed.epoch == 1
    assert list(resumed) == []
    assert resumed.epoch == 2
    assert same(list(resumed), list(_at_epoch(2)))


def test_a_dropped_remainder_is_not_picked_up_by_fewer_ranks() -> None:
    source = loader(batch_size=4, drop_last=True, rank=0, world_size=4)
    list(source)
    resumed = loader(batch_size=4, drop_last=True, rank=0, world_size=1)
    resumed.load_state_dict(source.state_dict())
    assert list(resumed) == []


def test_a_position_before_the_first_batch() -> None:
    state = loader().state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert same(list(resumed), EPOCH)


# Ranks


def test_ranks_share_an_epoch() -> None:
    ranks = [list(loader(31, 4, rank=rank, world_size=4)) for rank in range(4)]
    assert {len(batches) for batches in ranks} == {2}
    assert sorted(indices(flat(ranks))) == list(range(31))


def test_augmentation_follows_the_sample_to_another_rank() -> None:
    alone = {int(row[0]): row[:4] for batch in EPOCH for row in batch}
    shared = [row for rank in range(3) for batch in loader(rank=rank, world_size=3) for row in batch]
    assert all(torch.equal(row[:4], alone[int(row[0])]) for row in shared)


def test_padding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    source = loader(5, 1, rank=0, world_size=3)
    with caplog.at_level(logging.WARNING):
        list(source)
        list(source)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].endswith(
        "the last step of each epoch repeats 1 of them. drop_last=True drops the remainder instead"
    )


# Random streams


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_streams_are_not_touched(workers: int) -> None:
    kept = capture_streams()
    expected = draw()
    restore_streams(kept)
    list(loader(num_workers=workers))
    assert draw() == expected


def test_without_per_sample_seed_the_running_streams_are_used() -> None:
    source = loader(per_sample_seed=False)
    kept = capture_streams()
    first = list(source)
    restore_streams(kept)
    source.set_epoch(1)
    assert same(list(source), first)
    source.set_epoch(1)
    assert not same(list(source), first)
    assert indices(first) == indices(EPOCH)


def test_batched_data_sets() -> None:
    def make(workers: int) -> ResumableLoader:
        return ResumableLoader(Subset(Batched(20), range(20)), 4, True, num_workers=workers)

    whole = list(make(0))
    _, state = take(make(0), 2)
    resumed = make(1)
    resumed.load_state_dict(state)
    assert same(list(resumed), whole[2:])


# The hook


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


def test_the_hook_comes_when_no_batch_is_left() -> None:
    source = loader()
    list(source)
    source.load_state_dict(source.state_dict())
    calls: list[str] = []
    source.on_iterator_ready = lambda: calls.append("ready")
    assert list(source) == []
    assert calls == ["ready"]


def test_streams_restored_in_the_hook_reach_the_data_set() -> None:
    source = loader(per_sample_seed=False)
    kept = capture_streams()
    first = list(source)
    draw()
    source.on_iterator_ready = lambda: restore_streams(kept)
    source.set_epoch(1)
    assert same(list(source), first)


# As a DataLoader


def test_it_looks_like_a_dataloader() -> None:
    dataset = Noisy(30)
    source = ResumableLoader(dataset, 4, True, drop_last=True)
    assert isinstance(source, DataLoader)
    assert isinstance(source, PositionedLoader)
    assert (source.dataset, source.batch_size, source.drop_last, len(source)) == (dataset, 4, True, 7)
    assert source.batches_per_epoch == 7


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    assert indices(list(ResumableLoader(Noisy(10), 3))) == list(range(10))


def _open_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    cast(Noisy, info.dataset).opened_by = worker_id + 10


class Opened(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.opened_by is not None
        return torch.tensor([self.opened_by])


def test_worker_init_fn_sees_the_users_data_set() -> None:
    source = ResumableLoader(Opened(4), 2, num_workers=2, worker_init_fn=_open_dataset)
    assert [batch.flatten().tolist() for batch in source] == [[10, 10], [11, 11]]


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


def test_pinning_without_an_accelerator_is_quiet() -> None:
    assert len(list(loader(pin_memory=True))) == 8


def test_two_iterators_at_once_go_their_own_ways() -> None:
    source = loader()
    pairs = list(zip(source, source, strict=True))
    assert same([left for left, _ in pairs], EPOCH)
    assert same([right for _, right in pairs], list(_at_epoch(2)))
    assert source.state_dict()["epoch"] == 2


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": None}, "batch_size=None"),
        ({"seed": "7"}, "seed='7'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"sampler": range(3)}, "sampler="),
        ({"batch_sampler": [[1]]}, "batch_sampler="),
        ({"generator": torch.Generator()}, "generator="),
        ({"in_order": False}, "in_order="),
        ({"rank": 0}, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"dataset": NoisyStream(3)}, "iterable"),
        ({"dataset": object()}, "__len__"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ResumableLoader(**{"dataset": Noisy(8), **options})


def test_set_epoch_takes_whole_numbers() -> None:
    with pytest.raises(UsageError, match="epoch='2'"):
        loader().set_epoch("2")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="epoch=-1"):
        loader().set_epoch(-1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 5}, "batch_size was 4, is 5"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"drop_last": True}, "drop_last was False, is True"),
    ],
)
def test_a_changed_loader_is_named(changed: dict[str, Any], message: str) -> None:
    _, state = take(loader(), 2)
    other = loader(**changed)
    take(other, 1)
    before = other.state_dict()
    with pytest.raises(MismatchError, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == before


@pytest.mark.parametrize("batches", [2, 8], ids=["in mid-epoch", "at an epoch's end"])
def test_another_data_set_is_refused_when_it_is_read(batches: int) -> None:
    _, state = take(loader(), batches)
    other = loader(size=31)
    other.load_state_dict(state)
    with pytest.raises(MismatchError, match="has 31 samples, and had 30 at the checkpoint"):
        iter(other)


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "replay"},
        {"kind": None},
        {"epoch": -1},
        {"batch": "3"},
        {"samples": 31},
        {"samples": True},
        {"num_samples": None},
    ],
)
def test_a_damaged_position_is_refused(damage: dict[str, Any]) -> None:
    state = {**loader().state_dict(), **damage}
    with pytest.raises(MismatchError):
        loader().load_state_dict(state)


class Growing(Dataset[int]):
    size = 4

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def test_a_data_set_may_grow_between_epochs() -> None:
    dataset = Growing()
    source = ResumableLoader(dataset, 2)
    assert len(list(source)) == 2
    dataset.size = 6
    assert [batch.tolist() for batch in source] == [[0, 1], [2, 3], [4, 5]]
    assert source.state_dict()["num_samples"] == 6


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


def test_an_empty_data_set_has_no_batches() -> None:
    source = loader(0)
    assert (len(source), list(source)) == (0, [])
    assert source.state_dict()["finished"]


def test_python_randomness_of_the_caller_is_free() -> None:
    random.seed(1)
    first = list(loader())
    random.seed(2)
    assert same(first, list(loader()))


def test_a_position_of_a_later_version_is_refused() -> None:
    source = loader()
    before = source.state_dict()
    with pytest.raises(MismatchError, match=r"streams=4.*newer"):
        source.load_state_dict({**before, "streams": 4})
    assert source.state_dict() == before


def test_a_position_of_an_earlier_version_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The order is the same, and samples draw otherwise."""
    source = loader()
    first, state = take(source, 3)
    source.load_state_dict(state)
    assert not caplog.records
    source.load_state_dict({name: value for name, value in state.items() if name != "streams"})
    assert "they draw others" in caplog.text
    assert indices([*first, *source]) == indices(EPOCH)
