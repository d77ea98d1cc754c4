"""The order of gradient arrival: recorded once, in the first backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.ddp import GradientOrder

pytestmark = pytest.mark.usefixtures("one_rank_group")


class Crossed(nn.Module):
    """Uses its layers in another order than it registers them, so that the arrival is not simply reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(self.frozen(self.c(x))))
        return out


def backward(module: nn.Module) -> None:
    module(torch.ones(2, 3)).sum().backward()


def test_the_order_of_the_first_arrivals_is_recorded() -> None:
    module = DistributedDataParallel(Crossed())
    order = GradientOrder(module)
    assert order.finish(), "it was never to be recorded"
    order = GradientOrder(module)
    order.record()
    assert not order.finish(), "no backward yet"
    backward(module)
    backward(module)
    assert order.finish() and order.finish()
    assert order.order == [1, 0, 2], "b, a, c by their index among the parameters with gradients"
    backward(module)
    assert order.order == [1, 0, 2], "no hook stays"
