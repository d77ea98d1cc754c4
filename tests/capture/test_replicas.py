"""Which DDP modules belong to a job, where they are, whether they make its ranks replicas, and what is told of them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp import (
    DdpModules,
    GradientOrders,
    ddp_modules,
    outermost_replicas,
    replica_ranks,
)
from mindx_elastic.guard.unmanaged import Unmanaged


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
        self.wrapped = DistributedDataParallel(model)


def with_ddp(targets: dict[str, Any]) -> tuple[dict[str, Any], DdpModules]:
    return targets, ddp_modules(targets)


def paths(targets: dict[str, Any]) -> list[str]:
    return [path for path, _ in ddp_modules(targets)]


def test_ddp_around_a_component_in_one_and_under_compile() -> None:
    whole = DistributedDataParallel(nn.Linear(2, 2))
    assert paths({"model": whole}) == ["model"] and replica_ranks(*with_ddp({"model": whole})) == [0]
    assert paths({"model": nn.Linear(2, 2)}) == [], "it is around something else"
    compiled: Any = OptimizedModule(DistributedDataParallel(nn.Linear(2, 2)), torch._dynamo.disable())
    assert paths({"model": compiled}) == ["model._orig_mod"] and replica_ranks(*with_ddp({"model": compiled})) == [0]
    assert outermost_replicas(*with_ddp({"model": compiled})) == [compiled]


def test_a_part_outside_of_ddp_makes_no_replica() -> None:
    targets = {"model": Pair(DistributedDataParallel)}
    assert paths(targets) == ["model.net"]
    assert replica_ranks(*with_ddp(targets)) == [], "each rank trains a head of its own"
    targets["model"].head.requires_grad_(False)
    assert replica_ranks(*with_ddp(targets)) == [0]


def test_ddp_in_an_object_that_is_no_module_or_around_parts_or_more() -> None:
    model = nn.Linear(2, 2)
    trainer = Trainer(model)
    assert ddp_modules({"model": model}) == [("model", trainer.wrapped)]
    assert replica_ranks(*with_ddp({"model": model})) == [0]
    assert outermost_replicas(*with_ddp({"model": model})) == [trainer.wrapped]
    pair = Pair(lambda module: module)
    parts = [DistributedDataParallel(pair.net), DistributedDataParallel(pair.head)]
    assert ddp_modules({"model": pair}) == [("model.head", parts[1]), ("model.net", parts[0])]
    assert replica_ranks(*with_ddp({"model": pair})) == [0]
    inner = nn.Linear(2, 2)
    around = DistributedDataParallel(nn.Sequential(inner, nn.ReLU()))
    assert ddp_modules({"model": inner}) == [("model", around)]


def test_parameters_that_ddp_ignores_make_no_replica() -> None:
    inner = nn.ModuleDict({"shared": nn.Linear(2, 2), "own": nn.Linear(2, 2)})
    assert replica_ranks(*with_ddp({"model": DistributedDataParallel(inner)})) == [0]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["own.weight", "own.bias"])
    assert replica_ranks(*with_ddp({"model": DistributedDataParallel(inner)})) == []


@pytest.mark.parametrize("other", [False, True])
def test_ranks_without_ddp_are_warned_only_where_some_ddp_lives(other: bool, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    wrapped = DistributedDataParallel(nn.Linear(2, 2)) if other else None
    targets = {"model": nn.Linear(2, 2)}
    collector = Collector(targets)
    with caplog.at_level(logging.INFO, logger="mindx_elastic"):
        GradientOrders(ddp_modules(targets), collector, Unmanaged("error"), world_size=2)
    (record,) = [r for r in caplog.records if "no DDP or sharded module" in r.getMessage()]
    assert record.levelno == (logging.INFO if wrapped is None else logging.WARNING)
