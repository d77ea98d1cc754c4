"""What differs between the same program with 3 and with 2 ranks is seen, before its guard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mindx_elastic.guard.built import TOO_MUCH, what_is_built

DATA = TensorDataset(torch.zeros(12, 1))


class Loss(nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size


class Trainer:
    def __init__(self, world_size: int) -> None:
        self.validation = loader(world_size)


def loader(world_size: int) -> DataLoader[Any]:
    return DataLoader(DATA, 2, sampler=DistributedSampler(DATA, num_replicas=world_size, rank=0))


def facts(build: Callable[[int], Any], world_size: int) -> dict[str, str]:
    """As in a program that has `thing` in a variable: what is found by that name."""
    thing = build(world_size)
    found = what_is_built(sys._getframe(), {})
    del thing
    return {name: value for name, value in found.items() if '"thing' in name}


@pytest.mark.parametrize(
    "build",
    [
        lambda n: n,
        loader,
        Trainer,
        lambda n: {"validation": [loader(n)]},
        Loss,
        lambda n: nn.Sequential(nn.Linear(1, 1), Loss(n)),
        lambda n: [str(each) for each in range(0, 1200, n)],
        lambda n: [str(n)] * 100,
        lambda n: {"size": n},
    ],
)
def test_what_depends_on_the_number_of_ranks_is_seen(build: Callable[[int], Any]) -> None:
    two = facts(build, 2)
    assert facts(build, 3) != two == facts(build, 2)


def test_a_function_of_what_is_kept_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    found = [
        what_is_built(None, {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, partial(max, size))})
        for size in (3, 2, 2)
    ]
    assert found[0] != found[1] == found[2]


def test_what_is_too_much_agrees_with_nothing() -> None:
    many: list[Any] = [DistributedSampler(DATA, num_replicas=2, rank=0) for _ in range(64)]
    found = what_is_built(None, {"many": [[[*many]] * 4 for _ in range(8)]})
    assert TOO_MUCH not in found
    build: dict[str, Any] = {f"s{n}": DistributedSampler(DATA, num_replicas=2, rank=0) for n in range(5000)}
    one, other = what_is_built(None, build), what_is_built(None, dict(build))
    assert one[TOO_MUCH] != other[TOO_MUCH]
