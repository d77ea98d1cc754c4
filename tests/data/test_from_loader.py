from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from mindx_elastic.data import ReplayLoader, ResumableLoader, from_loader
from mindx_elastic.errors import UsageError
from tests.data.datasets import Noisy, NoisyStream

DATA = Noisy(22)


def indices(loader: Any) -> list[int]:
    return [int(index) for batch in loader for index in batch[:, 0]]


def test_settings_are_kept() -> None:
    settings: dict[str, Any] = {
        "num_workers": 1,
        "collate_fn": torch.stack,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 7,
        "worker_init_fn": print,
        "multiprocessing_context": "spawn",
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    plain = DataLoader(DATA, 5, shuffle=True, **settings)
    made = from_loader(plain)
    assert isinstance(made, ResumableLoader)
    for name in ("dataset", "batch_size", *settings):
        assert getattr(made, name) == getattr(plain, name), name
    assert len(made) == len(plain) == 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_distributed_sampler_is_kept(drop_last: bool) -> None:
    samplers: list[Any] = [DistributedSampler(DATA, 4, rank, drop_last=drop_last) for rank in range(4)]
    plain = [DataLoader(DATA, 3, sampler=sampler) for sampler in samplers]
    made = [from_loader(loader) for loader in plain]
    assert [len(loader) for loader in made] == [len(loader) for loader in plain]
    seen = [indices(loader) for loader in made]
    together = {index for part in seen for index in part}
    assert sum(map(len, seen)) == len(together) == (20 if drop_last else 22)
    assert not drop_last or {len(part) for part in seen} == {5}


def test_seeds_that_the_user_chose_count() -> None:
    def order(make: Callable[[], DataLoader[Any]], seed: int = 0) -> list[int]:
        return indices(from_loader(make(), seed))

    def sampled(seed: int) -> DataLoader[Any]:
        return DataLoader(DATA, 5, sampler=DistributedSampler(DATA, 1, 0, seed=seed))

    def generated(seed: int) -> DataLoader[Any]:
        return DataLoader(DATA, 5, shuffle=True, generator=torch.Generator().manual_seed(seed))

    for make in (sampled, generated):
        first = order(lambda make=make: make(1))  # type: ignore[misc]
        assert first == order(lambda make=make: make(1))  # type: ignore[misc]
        assert first != order(lambda make=make: make(2))  # type: ignore[misc]
        assert first != order(lambda make=make: make(1), 8)  # type: ignore[misc]


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 5, sampler=SubsetRandomSampler(range(9))),
        DataLoader(DATA, 5, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, 5, sampler=RandomSampler(range(9))),
        DataLoader(DATA, 5, sampler=SequentialSampler(range(9))),
        DataLoader(DATA, None),
        DataLoader(NoisyStream(9), 3),
        Own(DATA, 5),
        [[torch.zeros(2, 2)]],
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_anything_else_is_replayed(loader: Any) -> None:
    made = from_loader(loader)
    assert isinstance(made, ReplayLoader)
    assert made.loader is loader
    assert len(list(made)) == len(list(loader))


def test_a_loader_that_resumes_comes_back_unchanged_and_an_iterator_is_refused() -> None:
    for loader in (ResumableLoader(DATA, 5), ReplayLoader([1, 2])):
        assert from_loader(loader) is loader
    with pytest.raises(UsageError, match="only once"):
        from_loader(iter(DataLoader(DATA, 5)))
