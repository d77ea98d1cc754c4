"""The bucket layout of an interrupted process, given to a new one without a trace elsewhere."""

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
from mindx_elastic.guard.unmanaged import Unmanaged
from mindx_elastic.start.ddp_warmup import replay_gradient_order, replay_orders
from tests.capture.round_trip import assert_same, through_format
from tests.checkpoint_files import write
from tests.start.test_start import start

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


@pytest.mark.parametrize("unused", [False, True])
def test_gradients_that_lay_in_the_buckets_lie_there_again(unused: bool) -> None:
    """With `zero_grad(set_to_none=False)`: at three ranks DDP rounds otherwise where they do not."""
    first, resumed = (wrap(gradient_as_bucket_view=True, find_unused_parameters=unused) for _ in range(2))
    collector = Collector({"model": first})
    backward(first)
    first.module.get_parameter("a.weight").grad = None
    collector.copy(Position(1))
    saved = through_format(collector.state())
    saved["gradient_order"]["model"] = [1, 0, 2]
    replay_orders(saved, [("model", resumed)], Unmanaged("error"))
    Collector({"model": resumed}).load_flags(saved)
    gradients = [resumed.module.get_parameter(f"{name}.weight").grad for name in "abc"]
    assert gradients[0] is None and all(g is not None and not g.any() for g in gradients[1:])
    backward(resumed, 2)
    for name, before in zip("bc", gradients[1:], strict=True):
        now = resumed.module.get_parameter(f"{name}.weight").grad
        assert now is not None and before is not None and now.data_ptr() == before.data_ptr(), "it is not moved"


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


# --- optimizers that step inside backward (one a parameter) also step in the replay ---


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

        self.hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in optimizers]
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
    second.collector.load_flags(saved)  # which `start` leaves out: it is that of a guard that evaluates
    assert_same(through_format(second.collector.state()), saved)
    first.train(2)
    second.train(2)
    assert_same(dict(second.network.state_dict()), dict(first.network.state_dict()))
    for hook in (*first.hooks, *second.hooks):
        hook.remove()  # torch's hooks are out of the garbage collector's sight, and keep what they refer to
