"""The bucket layout of an interrupted process, given to a new one without a trace elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.ddp import GradientOrder
from mindx_elastic.start.ddp_warmup import replay_gradient_order

pytestmark = pytest.mark.usefixtures("one_rank_group")

TINY_MB = 0.00003  # every parameter is a bucket of its own


class Network(nn.Module):
    """Three matrices used in another order than registered, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        out: torch.Tensor = self.b(self.a(self.norm(self.frozen(self.c(x)))))
        return out


def wrap(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Network(), bucket_cap_mb=TINY_MB, **options)


def backward(module: nn.Module, times: int = 1) -> None:
    for step in range(times):
        module(torch.ones(2, 3) * step).square().sum().backward()


def layout(module: DistributedDataParallel) -> str:
    """The buckets in the order in which they are reduced, from DDP's own log."""
    data = module._get_ddp_logging_data()
    return str(data["rebuilt_per_bucket_param_indices"])


def test_the_layout_is_that_of_the_interrupted_process() -> None:
    first = wrap()
    order = GradientOrder(first)
    order.record()
    backward(first)
    assert order.finish()
    backward(first, 2)

    resumed, plain = wrap(), wrap()
    with torch.no_grad():  # as a program may wrap its start
        assert replay_gradient_order(resumed, order.order) is None
    for module in (resumed, plain):
        backward(module, 2)
    assert layout(resumed) == layout(first) == "1, 0, 2"
    gradients = [[p.grad for p in module.parameters() if p.grad is not None] for module in (resumed, plain)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
def test_nothing_else_has_changed(broadcast_buffers: bool, as_view: bool) -> None:
    module = wrap(gradient_as_bucket_view=as_view)
    module.broadcast_buffers = broadcast_buffers
    inner = module.module
    assert isinstance(inner, Network)
    called: list[str] = []
    inner.register_forward_hook(lambda *_: called.append("hook"))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    assert replay_gradient_order(module, [1, 0, 2]) is None
    assert module.module is inner and inner.forwards == 0 and called == []
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [p.grad for p in module.parameters()] == [None] * 5
    assert module.broadcast_buffers is broadcast_buffers


def test_a_model_of_another_size_unused_parameters_and_a_static_graph() -> None:
    problem = replay_gradient_order(wrap(), [0, 1])
    assert problem is not None and "recorded 2 gradients, the model has 3" in problem
    assert replay_gradient_order(wrap(), [0, 1, 1]) is not None
    assert replay_gradient_order(wrap(find_unused_parameters=True), [1, 0, 2]) is None, "nothing to do"
    assert replay_gradient_order(wrap(static_graph=True), [1, 0, 2]) == "it has static_graph=True"


def test_a_failure_puts_the_module_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = wrap()
    inner = module.module

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("injected: a peer has died")

    monkeypatch.setattr(torch.Tensor, "backward", fail)
    with pytest.raises(RuntimeError, match="injected"):
        replay_gradient_order(module, [1, 0, 2])
    assert module.module is inner and module.broadcast_buffers
