"""Optimizers that step inside backward (one a parameter) also step in the replay of DDP's gradient order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import GradientOrder
from mindx_elastic.core.position import Position
from tests.capture.round_trip import assert_same, through_format
from tests.checkpoint_files import write
from tests.start.test_start import start

pytestmark = pytest.mark.usefixtures("one_rank_group")


class Job:
    """A DDP network with an optimizer a parameter; weight decay moves weights even when the gradient is zero."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.network = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        optimizers = {p: torch.optim.AdamW([p], lr=0.1, weight_decay=0.5) for p in self.network.parameters()}
        self.steps = 0

        def update(parameter: Any) -> None:
            self.steps += 1
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(update)
        self.targets: dict[str, Any] = {"model": self.network}
        self.targets |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers.values())}
        self.collector = Collector(self.targets)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.network(torch.arange(12.0).reshape(4, 3) * step).square().sum().backward()


def test_the_loaded_state_is_that_of_the_file(tmp_path: Path) -> None:
    first = Job(0)
    order = GradientOrder(first.network)
    order.record()
    first.train(2)
    assert order.finish()
    first.collector.gradient_order = {"model": order.order}
    first.collector.copy(Position(step=2, epoch=1, step_in_epoch=2, batch_num=4))
    saved = through_format(first.collector.state())
    write(tmp_path / "net-1_2.safetensors", step=2, epoch=1, step_in_epoch=2, state=first.collector.state())

    second = Job(1)
    begun = start(tmp_path, second.targets, collector=second.collector)
    assert begun.resumed is not None
    assert second.steps == len(order.order), "the replay has stepped them"
    assert_same(through_format(second.collector.state()), saved)
    first.train(2)
    second.train(2)
    assert_same(dict(second.network.state_dict()), dict(first.network.state_dict()))
