"""One rank's process group without a network, for DDP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.random.fork_rng(devices=[]):
        yield
    dist.destroy_process_group()
