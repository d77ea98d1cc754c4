"""The bytes of ``mindx.layout``: they stay as version 0.1 wrote them, so that files of all versions are comparable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.layouts import ParallelSetup
from mindx_elastic.capture.replicas import ddp_modules, parallel_setup_of
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import TensorSpec

WORLD = 4
GOLDEN = Path(__file__).with_name("layout_records.json")
"""Kind of job -> the text of each rank, as version 0.1 wrote it. Never written anew."""
Make = Callable[[int], Collector]


def stepped(network: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, object]:
    optimizer = kind(network.parameters(), lr=0.1)  # type: ignore[call-arg]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": network, "optimizer": optimizer}


def collector_of(targets: Mapping[str, object], rank: int, **fields: Any) -> Collector:
    collector = Collector(targets)
    collector.set_parallel_setup(ParallelSetup(rank, WORLD, **fields))
    return collector


def by_hand(targets: Mapping[str, object], rank: int, layouts: Mapping[str, Layout]) -> Collector:
    collector = Collector(targets)
    collector.set_parallel_setup(
        parallel_setup_of(targets, RankInfo(rank=rank, world_size=WORLD), layouts, ddp_modules(targets))
    )
    return collector


def sharded(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(network, mesh=mesh)
    return network


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def ddp(rank: int) -> Collector:
    return collector_of(stepped(plain()), rank, replicas=range(WORLD), ignored_by_ddp=frozenset({"model.0.bias"}))


def two_ddp_groups(rank: int) -> Collector:
    return collector_of(stepped(plain()), rank, replicas=[rank % 2, rank % 2 + 2])


def each_its_own(rank: int) -> Collector:
    return collector_of(stepped(plain()), rank)


def zero(rank: int) -> Collector:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return collector_of({"model": network, "optimizer": optimizer}, rank, replicas=range(WORLD))


def fsdp(rank: int) -> Collector:
    network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(7))
    return collector_of(stepped(sharded(network, mesh=init_device_mesh("cpu", (WORLD,)))), rank)


def hsdp(rank: int) -> Collector:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return collector_of(stepped(sharded(nn.Linear(3, 5), mesh=mesh)), rank)


def tensor_parallel(rank: int) -> Collector:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4))
    parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return collector_of(stepped(network), rank)


def fsdp_around_tensor_parallel(rank: int) -> Collector:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(7))
    parallelize_module(network, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return collector_of(stepped(sharded(network, mesh=mesh["dp"])), rank)


class Laid(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor))


def meshes_in_another_order(rank: int) -> Collector:
    """Ranks that are not consecutive; two meshes of which one is part of the other; one shape under two names."""

    def part(mesh: DeviceMesh, placements: list[Any], *local: int) -> DTensor:
        return DTensor.from_local(torch.zeros(*local), mesh, placements, run_check=False)

    wide = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    renamed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("c", "d"))
    network = Laid(
        w=part(wide, [Shard(0), Shard(-1)], 2, 2),
        x=part(wide, [Replicate(), Shard(0)], 2, 2),
        y=part(renamed, [Replicate(), Shard(0)], 2, 2),
        n=part(wide["b"], [Shard(0)], 2),
        b=torch.zeros(3),
    )
    return collector_of(stepped(network), rank)


def experts_by_hand(rank: int) -> Collector:
    network = nn.ModuleDict({"experts": nn.Linear(3, 2), "rest": nn.Linear(4, 4)})
    layouts = {
        "model.experts.weight": Layout((2, 2), ("shard(0)", "replicate"), (0, 2, 1, 3), ("ep", "dp")),  # type: ignore[arg-type]
        "model.rest.*": Layout((4,), ("replicate",)),  # type: ignore[arg-type]
    }
    return by_hand(stepped(network), rank, layouts)


def factored_by_hand(rank: int) -> Collector:
    """Adafactor's row sums follow the split of their matrix."""
    network = nn.Linear(6, 4, bias=False)
    return by_hand(stepped(network, torch.optim.Adafactor), rank, {"model.weight": Layout((4,), ("shard(0)",))})  # type: ignore[arg-type]


def knowing_the_job(rank: int) -> Collector:
    """Of what other ranks hold each layout once: one that this rank has, too, and others."""
    collector = ddp(rank)
    everywhere, columns = Layout((4,), ("R",)), Layout((2,), ("shard(1)",), (1, 3), ("tp",))  # type: ignore[arg-type]
    own = Layout((1,), ("R",), (2,))  # type: ignore[arg-type]
    job = [("model.0.weight", everywhere, (2, 3)), ("model.9.weight", columns, (8, 3)), ("@optimizer.state", own, ())]
    collector.layouts.set_job_layouts([TensorSpec(name, shape, layout) for name, layout, shape in job])
    return collector


WITHOUT_GROUP = (knowing_the_job, ddp, two_ddp_groups, each_its_own, experts_by_hand, factored_by_hand)
WITH_GROUP = (zero, fsdp, hsdp, tensor_parallel, fsdp_around_tensor_parallel, meshes_in_another_order)
MAKES: dict[str, Make] = {make.__name__: make for make in (*WITHOUT_GROUP, *WITH_GROUP)}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_record_is_what_it_was(join: Callable[[int], None], kind: str, rank: int) -> None:
    if kind == "fsdp_around_tensor_parallel" and torch.__version__ < "2.7":
        pytest.skip("torch 2.6 does not split unevenly there")
    join(rank)
    assert json.dumps(MAKES[kind](rank).layout()) == json.loads(GOLDEN.read_text())[kind][str(rank)]
