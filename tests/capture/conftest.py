"""Quiet generators, and process groups of ranks that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)  # networks this small only lose by more
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture
def join() -> Iterator[Callable[[int], None]]:
    """``join(rank)``: be this rank of four; the others are not there, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def be(rank: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)

    yield be
    if dist.is_initialized():
        dist.destroy_process_group()
