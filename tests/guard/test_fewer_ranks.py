"""With fewer ranks than it is meant to have, a job's updates are what they were, or it does not make them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindx_elastic.config import RankInfo
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.data import ResumableLoader, from_function
from mindx_elastic.errors import UnmanagedStateError
from mindx_elastic.guard.fewer_ranks import FewerRanks, why_fixed
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.unmanaged import Unmanaged

Enter = Callable[..., FewerRanks]


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Any:
    with ExitStack() as stack:

        def enter(optimizer: Any, full: int = 4, there: int = 2, **more: Any) -> FewerRanks:
            monkeypatch.setenv("WORLD_SIZE", str(there))
            monkeypatch.setenv("MINDX_FULL_WORLD_SIZE", str(full))
            fewer = FewerRanks()
            collector: Any = SimpleNamespace(optimizers=lambda: [optimizer])
            content = {"counting": None, "by_name": list, **more}
            loaders: Any = SimpleNamespace(**content)
            fewer.enter(stack, Unmanaged("error"), StatusPage(), RankInfo(world_size=there), collector, loaders)
            return fewer

        yield enter


def weights(optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 0.5)
    return weight, optimizer([weight])


def test_an_update_of_a_loop_that_does_not_ask_is_refused(enter: Enter) -> None:
    weight, optimizer = weights(lambda p: torch.optim.SGD(p, lr=0.5))
    fewer = enter(optimizer)
    with pytest.raises(UnmanagedStateError, match="does not accumulate over more batches"):
        optimizer.step()
    assert weight.tolist() == [1.0] * 3
    assert fewer.accumulation(3) == 6
    optimizer.step()


def test_an_update_of_too_few_batches_is_refused(enter: Enter) -> None:
    loader = ResumableLoader(list(range(40)), batch_size=2, rank=0, world_size=2)
    _, optimizer = weights(lambda p: torch.optim.SGD(p, lr=0.5))
    first = FollowedLoader("loader", loader, None)
    cursor = first.cursor
    cursor.track = first
    fewer = enter(optimizer, counting=first)
    assert fewer.accumulation(1) == 2
    batches = iter(loader)
    for _ in range(2):
        next(batches), next(batches)
        optimizer.step()
    next(batches)
    with pytest.raises(UnmanagedStateError, match="used 1 batches, and with 2 ranks in the place of 4 it takes 2"):
        optimizer.step()
    list(batches)
    next(iter(loader))
    cursor.finished = True  # the last window of an epoch may be shorter
    optimizer.step()


@pytest.mark.parametrize(
    ("full", "there", "window"), [(4, 2, 1), (4, 2, 3), (4, 3, 3), (3, 2, 2), (3, 1, 1), (6, 4, 2)]
)
def test_a_step_that_is_ended_with_each_batch_counts_as_with_all_ranks(
    enter: Enter, full: int, there: int, window: int
) -> None:
    fewer = enter(weights(lambda p: torch.optim.SGD(p, lr=0.5))[1], full, there)
    longer = fewer.accumulation(window)
    for _ in range(3):
        is_inside = [number < longer for number in range(1, longer + 1)]
        left_out = [fewer.leaves_out(partial(bool, inside)) for inside in is_inside]
        assert left_out.count(False) == window
        assert not left_out[-1]


def test_what_keeps_the_number_of_ranks() -> None:
    shared = ResumableLoader(list(range(8)), rank=0, world_size=4)
    whole = ResumableLoader(list(range(8)), rank=0, world_size=1)
    assert why_fixed(4, [("loader", shared)]) == ""
    assert "no DistributedSampler" in why_fixed(4, [("loader", whole)])
    assert "from its number" in why_fixed(4, [("loader", from_function(lambda: 1, 4))])
    assert "keeps its own position" in why_fixed(4, [("loader", object())])
