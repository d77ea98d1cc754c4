"""DDP modules: which belong to a job, whether they make its ranks replicas, and what of theirs is kept."""

from __future__ import annotations

import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import (
    BufferBroadcasts,
    CollectiveWaits,
    GradientOrder,
    GradientOrders,
    ddp_modules,
    outermost_replicas,
    replica_ranks,
)
from mindx_elastic.core.position import Position
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.guard.unmanaged import Unmanaged

DDP = nn.parallel.DistributedDataParallel


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one rank that says it had two: DDP needs a real one, and looks for hidden DDP modules only matter with
    several ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    yield
    monkeypatch.undo()
    dist.destroy_process_group()


class Pair(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.net, self.head = wrap(nn.Linear(2, 2)), nn.Linear(2, 2)


class Trainer:
    """No module, so that only the process knows that it has one."""

    def __init__(self, model: nn.Module) -> None:
        self.wrapped = DDP(model)


def found(model: nn.Module) -> tuple[list[str], list[int], list[nn.Module]]:
    """Paths, replicas, and the modules whose forward a replica runs."""
    targets = {"model": model}
    ddp = ddp_modules(targets)
    return [path for path, _ in ddp], replica_ranks(targets, ddp), outermost_replicas(targets, ddp)


def test_which_modules_make_replicas() -> None:
    linear = nn.Linear(2, 2)
    assert found(linear) == ([], [], [])
    trainer = Trainer(linear)
    assert found(linear) == (["model"], [0], [trainer.wrapped]), "in an object that is no module"
    compiled: Any = OptimizedModule(DDP(nn.Linear(2, 2)), torch._dynamo.disable())
    assert found(compiled) == (["model._orig_mod"], [0], [compiled])
    part = Pair(DDP)
    assert found(part)[:2] == (["model.net"], []), "each rank trains a head of its own"
    part.head.requires_grad_(False)
    assert found(part)[1] == [0]
    pair = Pair(lambda module: module)
    parts = [DDP(pair.net), DDP(pair.head)]
    assert found(pair) == (["model.head", "model.net"], [0], parts[::-1])
    inner = nn.Linear(2, 2)
    around = DDP(nn.Sequential(inner, nn.ReLU()))
    assert found(inner)[::2] == (["model"], [around])


def test_parameters_that_ddp_ignores_make_no_replica() -> None:
    inner = nn.ModuleDict({"shared": nn.Linear(2, 2), "own": nn.Linear(2, 2)})
    assert found(DDP(inner))[1] == [0]
    DDP._set_params_and_buffers_to_ignore_for_model(inner, ["own.weight", "own.bias"])
    assert found(DDP(inner))[1] == []


def test_local_sgd_of_a_hook_makes_no_replica() -> None:
    """Its ranks go on alone after some steps, and average their weights now and then."""
    module = DDP(nn.Linear(2, 2))
    module.register_comm_hook(local.PostLocalSGDState(None, None, 4), local.post_localSGD_hook)
    assert found(module)[1] == []


@pytest.mark.parametrize("other", [False, True])
def test_ranks_without_ddp_are_warned_only_where_some_ddp_lives(other: bool, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    wrapped = DDP(nn.Linear(2, 2)) if other else None
    targets = {"model": nn.Linear(2, 2)}
    with caplog.at_level(logging.INFO, logger="mindx_elastic"):
        GradientOrders(ddp_modules(targets), Collector(targets), Unmanaged("error"), world_size=2)
    (record,) = [r for r in caplog.records if "no DDP or sharded module" in r.getMessage()]
    assert record.levelno == (logging.INFO if wrapped is None else logging.WARNING)


@pytest.mark.parametrize("state", [None, {"errors": 0}])
def test_a_static_graph_is_told_at_two_ranks_where_a_hook_has_state(state: dict[str, int] | None) -> None:
    """PowerSGD's errors lie in the order of the gradients, which no resumed process has from its first step on."""
    module = DDP(nn.Linear(2, 2), static_graph=True)
    module.register_comm_hook(state, lambda state, bucket: torch.futures.Future())
    targets, told = {"model": module}, Unmanaged("error")
    GradientOrders(ddp_modules(targets), Collector(targets), told, world_size=2)
    assert ["the communication hook has state" in each for each in told.notes] == ([] if state is None else [True])


class Crossed(nn.Module):
    """Uses its layers in another order than it registers them, so that the arrival is not simply reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(self.frozen(self.c(x))))
        return out


def backward(module: nn.Module) -> None:
    module(torch.ones(2, 2)).sum().backward()


def test_the_order_of_the_first_arrivals_is_recorded() -> None:
    module = DDP(Crossed())
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


def with_buffers() -> tuple[DDP, Collector]:
    module = DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    collector = Collector({"model": module})
    collector.broadcasts = BufferBroadcasts([("model", module)])
    return module, collector


def broadcasts(module: DDP) -> bool:
    """In its next forward, which is a state of the training."""
    return bool(module.will_sync_module_buffers())


def test_an_evaluation_leaves_broadcasts_as_they_were() -> None:
    module, collector = with_buffers()
    with collector.kept_streams_and_flags(), torch.no_grad():
        module(torch.ones(2, 2))
        assert not broadcasts(module)
    assert broadcasts(module)


@pytest.mark.parametrize("is_behind", [True, False])
def test_in_front_of_the_code_behind_an_epoch_broadcasts_are_as_they_were_there(is_behind: bool) -> None:
    """Also in a resumed process."""
    (module, collector), (after, its_collector) = with_buffers(), with_buffers()
    with module.no_sync() if is_behind else nullcontext():
        backward(module)
    collector.copy(Position())
    in_front = broadcasts(module)
    front = collector.copy_of_small()
    with torch.set_grad_enabled(is_behind):  # an evaluation through DDP, or something that trains
        module(torch.ones(2, 2))
    collector.copy(Position())
    assert broadcasts(module) != in_front
    its_collector.load_flags(collector.state())
    assert broadcasts(after) == broadcasts(module)
    collector.load_flags(collector.compose(collector.state(), front))
    assert broadcasts(module) == in_front


def test_waits_are_noted_and_the_module_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the buffers' broadcast and once for the gradients, whatever fails on the way."""
    module, _ = with_buffers()
    noted: list[int] = []
    page = StatusPage()
    monkeypatch.setattr(page, "note_wait", noted.append)
    waits = CollectiveWaits([("model", module)], [module], page)
    backward(module)
    assert not noted, "no step is timed yet"
    page.is_timed = True
    with pytest.raises(RuntimeError):
        module(torch.ones(2, 3))
    assert len(noted) == 1, "its broadcast"
    for count, fails in ((3, False), (4, True), (6, False)):
        loss = module(torch.ones(2, 2)).sum()
        assert not module.module._forward_pre_hooks, "a program pickles it"
        pickle.dumps(module.module)
        if fails:
            loss.register_hook(lambda _: 1 // 0)
        with suppress(ZeroDivisionError):
            loss.backward()
        assert len(noted) == count
    assert all(each >= 0 for each in noted)
    module.eval()
    with torch.no_grad():
        module(torch.ones(2, 2))
    waits.remove()
    backward(module)
    assert len(noted) == 7 and not any(each._forward_pre_hooks for each in module.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_takes_no_hooks_and_trains_on() -> None:
    module = DDP(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    page = StatusPage()
    page.is_timed = True
    waits = CollectiveWaits([("model", module)], [module], page)
    backward(module)
    waits.remove()
