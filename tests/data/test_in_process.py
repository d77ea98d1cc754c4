"""Batches without workers: those of torch's own iterator, and its record while a profiler runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from mindx_elastic.data import ResumableLoader
from mindx_elastic.data import iteration as iteration_module
from mindx_elastic.data.in_process import can_be_in_process


class Drawn(Dataset[Any]):
    """Draws from the streams that are asked for; one sample is broken."""

    def __init__(self, draws: str, broken: int = -1) -> None:
        self.draws, self.broken = draws, broken

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise ValueError(f"sample {index}")
        python = random.random() if "p" in self.draws else 0.0
        numpy = np.random.random() if "n" in self.draws else 0.0
        noise = torch.rand(3) if "t" in self.draws else torch.zeros(3)
        return torch.tensor(float(index)), python, numpy, noise


class Batched(Drawn):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in reversed(indices)]


def batches(dataset: Dataset[Any], **options: Any) -> list[Any]:
    """Of two epochs, with what the training draws in between; an error is an item of the list."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    found: list[Any] = []
    loader = ResumableLoader(dataset, 4, shuffle=True, seed=5, **options)
    for _ in range(2):
        iterator = iter(loader)
        while True:
            try:
                found.append(repr(next(iterator)))
            except StopIteration:
                break
            except ValueError as error:
                found.append(str(error))
            found.append((torch.rand(1).item(), np.random.random(), random.random(), loader.state_dict()))
    return found


@pytest.mark.parametrize("kind", [Drawn, Batched])
@pytest.mark.parametrize("draws", ["", "p", "nt", "pnt"])
def test_the_same_batches_as_from_the_iterator_of_torch(
    monkeypatch: pytest.MonkeyPatch, kind: type[Drawn], draws: str
) -> None:
    dataset = kind(draws, broken=7)
    ours = batches(dataset)
    monkeypatch.setattr(iteration_module, "can_be_in_process", lambda loader: False)
    assert batches(dataset) == ours
    assert "sample 7" in ours


def test_only_loaders_of_ours_without_workers() -> None:
    dataset = Drawn("")
    assert can_be_in_process(ResumableLoader(dataset, 4)._build())
    assert not can_be_in_process(DataLoader(dataset, 4))
    assert not can_be_in_process(ResumableLoader(dataset, 4, num_workers=1)._build())


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"timeout|^$"):  # up to torch 2.9 it has no words
        iter(ResumableLoader(Drawn(""), 4, timeout=3))


def test_a_profiler_sees_the_batches_under_their_usual_name() -> None:
    loader = ResumableLoader(Drawn(""), 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        count = len(list(loader))
    names = [event.name for event in profile.events() or ()]
    usual = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert names.count(usual) == count + 1  # and once in vain at the end
