"""Whether DDP broadcasts buffers in its next forward is a state of the training."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import BufferBroadcasts
from mindx_elastic.core.position import Position

pytestmark = pytest.mark.usefixtures("one_rank_group")


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def train(module: nn.Module) -> None:
    module(torch.ones(2, 2)).sum().backward()


def broadcasts(module: DistributedDataParallel) -> bool:
    return bool(module.will_sync_module_buffers())


def collector_of(module: DistributedDataParallel) -> Collector:
    collector = Collector({"model": module})
    collector.broadcasts = BufferBroadcasts([("model", module)])
    return collector


def test_an_evaluation_leaves_it_as_it_was() -> None:
    module = wrapped()
    collector = collector_of(module)
    with collector.kept_streams_and_flags(), torch.no_grad():
        module(torch.ones(2, 2))
        assert not broadcasts(module)
    assert broadcasts(module)


@pytest.mark.parametrize("is_behind", [True, False])
def test_in_front_of_the_code_behind_an_epoch_it_is_as_it_was_there(is_behind: bool) -> None:
    """Also in a resumed process."""
    module, after = wrapped(), wrapped()
    collector = collector_of(module)
    with module.no_sync() if is_behind else nullcontext():
        train(module)
    collector.copy(Position())
    in_front = broadcasts(module)
    front = collector.copy_of_small()
    with torch.set_grad_enabled(is_behind):  # an evaluation through DDP, or something that trains
        module(torch.ones(2, 2))
    collector.copy(Position())
    assert broadcasts(module) != in_front
    collector_of(after).load_flags(collector.state())
    assert broadcasts(after) == broadcasts(module)
    collector.load_flags(collector.compose(collector.state(), front))
    assert broadcasts(module) == in_front
