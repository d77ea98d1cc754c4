"""What a rank writes down of its tensors: from DTensors, from DDP, by hand, and what it only assumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.layouts import ByHand, LayoutRecorder, ParallelSetup
from mindx_elastic.config import RankInfo
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.strategy import LayoutRecord, Strategy, TensorSpec
from mindx_elastic.errors import UnsupportedStateError, UsageError

WORLD = 4
EVERYWHERE = {"mesh": [4], "placements": ["R"], "ranks": [[0, 4]]}
Join = Callable[[int], None]


def recorder(targets: Mapping[str, object], rank: int = 0, world_size: int = WORLD, **fields: Any) -> LayoutRecorder:
    return LayoutRecorder(Collector(targets).components, ParallelSetup(rank, world_size, **fields))


def layout_at(record: Mapping[str, Any], place: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    number, shape = record["tensors"][place]
    return record["layouts"][number], tuple(shape)


def places_of(targets: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a file of these objects would hold: place -> (type, shape)."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, component in Collector(targets).components.items():
        state = component.state()
        flat = (
            {f"state.{i}.{k}": v for i, s in state["state"].items() for k, v in s.items()}
            if "state" in state
            else state
        )
        found |= {f"{name}.{key}": ("F32", tuple(t.shape)) for key, t in flat.items() if isinstance(t, torch.Tensor)}
    return found


def strategy_of(targets: Mapping[str, Any], one: LayoutRecorder) -> Strategy:
    return LayoutRecord.from_json(json.loads(json.dumps(one.record().json))).strategy(places_of(targets))


def stepped(parameters: Any, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    parameters = list(parameters)
    optimizer = kind(parameters, lr=0.1)  # type: ignore[call-arg]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


class Laid(nn.Module):
    """Parameters as they are given."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def test_what_is_known_of_the_job_comes_back_in_the_strategy() -> None:
    network = nn.Linear(3, 2)
    one = recorder({"model": network}, rank=1)
    told = TensorSpec("model.other", (8, 3), Layout((2,), ("S(0)",), (2, 3)))  # type: ignore[arg-type]
    one.set_job_layouts([told])
    strategy = strategy_of({"model": network}, one)
    assert strategy.by_name["model.other"] == (told,) and strategy.world_size == 4


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_zero_state_is_its_ranks_alone_and_marked(one_rank_group: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    network = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    targets = {"model": network, "optimizer": optimizer}
    one = recorder(targets, rank=3, replicas=range(4))
    record = one.record().json
    assert record["layouts"][record["default"]] == EVERYWHERE, "the weights"
    alone = {"mesh": [1], "placements": ["R"], "ranks": [[3, 1]]}
    for place, shape in (("optimizer.state.0.exp_avg", (2, 3)), ("optimizer.state.1.step", ())):
        assert layout_at(record, place) == (alone, shape)
    assert [(spec.name, spec.layout.to_json()) for spec in one.markers()] == [("@optimizer.state", alone)]
    assert recorder({"model": network, "optimizer": stepped(network.parameters())}).markers() == []


def part(mesh: DeviceMesh, placements: list[Any], *local: int) -> DTensor:
    return DTensor.from_local(torch.zeros(*local), mesh, placements, run_check=False)


@pytest.mark.parametrize("rank", [0, 3])
def test_placements_of_dtensors(join: Join, rank: int) -> None:
    join(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    network = Laid(
        rows=part(mesh, [Replicate(), Shard(0)], 2, 3),
        columns=part(mesh, [Shard(0), Shard(-1)], 2, 3),
        both=part(mesh, [Replicate(), Replicate()], 5),
    )
    targets = {"model": network, "optimizer": stepped(network.parameters())}
    one = recorder(targets, rank)
    record = one.record().json
    known = {"mesh": [2, 2], "ranks": [[0, 4]], "names": ["dp", "tp"]}
    assert layout_at(record, "model.rows") == ({**known, "placements": ["R", "S(0)"]}, (4, 3))
    assert layout_at(record, "model.columns") == ({**known, "placements": ["S(0)", "S(1)"]}, (4, 6))
    assert layout_at(record, "model.both") == ({**known, "placements": ["R", "R"]}, (5,))
    assert layout_at(record, "optimizer.state.1.exp_avg_sq")[1] == (4, 6), "moments are laid out like their parameter"
    assert "optimizer.state.1.step" not in record["tensors"], "a counter, as everywhere"
    assert record["layouts"][record["default"]] == EVERYWHERE
    assert record["assumed"] == [record["default"]], "what no DTensor describes is only assumed to be a replica"
    strategy = strategy_of(targets, one)
    (columns,) = strategy.by_name["model.columns"]
    assert columns.layout.local_shape(columns.shape, columns.layout.shard_of(rank)) == (2, 3)


splits_unevenly = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 does not")


@splits_unevenly
@pytest.mark.parametrize("rank", [0, 3])
def test_fsdp2_around_tensor_parallel(join: Join, rank: int) -> None:
    """6 and 7 rows, 2 x 2: uneven and strided. Weights that are not tensor parallel lie on the dp part of the mesh."""
    join(rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(7))
    parallelize_module(network, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(network, mesh=mesh["dp"])
    targets = {"model": network, "optimizer": stepped(network.parameters())}
    one = recorder(targets, rank)
    record = one.record().json
    layouts = {place: layout_at(record, place)[0]["placements"] for place in record["tensors"]}
    assert layouts["model.0.weight"] == layouts["optimizer.state.0.exp_avg"] == ["_S(0,2)", "S(0)"]
    assert layouts["model.2.weight"] == ["S(0)", "S(1)"]
    assert layouts["model.3.weight"] == layouts["optimizer.state.4.exp_avg"] == ["S(0)", "R"]
    for place in ("model.3.weight", "model.3.bias"):
        layout, shape = layout_at(record, place)
        assert (layout["mesh"], layout["ranks"], shape) == ([2, 2], [[0, 4]], (7,)), "spread out over the whole mesh"
    numbers = {record["tensors"]["model.3.weight"][0], record["default"]}
    assert set(record["assumed"]) == numbers, "nobody says that the tp ranks have equal norms"
    strategy = strategy_of(targets, one)
    for place, (_, shape) in places_of(targets).items():
        if place.startswith("model."):
            (spec,) = strategy.by_name[place]
            assert spec.layout.local_shape(spec.shape, spec.layout.shard_of(rank)) == shape
    assert strategy.by_name["model.0.weight"][0].shape == (6, 4)


def test_hsdp_is_replicas_of_shards(join: Join) -> None:
    join(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    targets = {"model": fully_shard(nn.Linear(3, 5), mesh=mesh)}
    assert strategy_of(targets, recorder(targets, 3)).replica_groups() == [(0, 2), (1, 3)]


def test_a_sum_that_is_not_done_is_refused(join: Join) -> None:
    join(0)
    mesh = init_device_mesh("cpu", (4,))
    network = Laid(w=torch.zeros(2))
    one = recorder({"model": network})
    network.w = nn.Parameter(part(mesh, [Partial()], 2))
    with pytest.raises(UnsupportedStateError, match=r"model\.w.*sum that is not done yet"):
        one.record()


def by_hand(
    network: nn.Module, layouts: Mapping[str, Layout], rank: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[dict[str, Any], LayoutRecorder]:
    targets: dict[str, Any] = {"model": network, "optimizer": stepped(network.parameters(), kind)}
    return targets, recorder(targets, rank, by_hand=ByHand(layouts, RankInfo(rank=rank, world_size=WORLD)))


@pytest.mark.parametrize("rank", [0, 3])
def test_layouts_by_hand(rank: int) -> None:
    """Experts on two ranks each, everything else everywhere; the first pattern that fits counts."""
    network = nn.ModuleDict({"experts": nn.Linear(3, 2), "rest": nn.Linear(4, 4)})
    layouts = {
        "model.experts.weight": Layout((2, 2), ("shard(0)", "replicate"), mesh_dim_names=("ep", "dp")),  # type: ignore[arg-type]
        "model.*": Layout((4,), ("replicate",)),  # type: ignore[arg-type]
    }
    targets, one = by_hand(network, layouts, rank)
    record = one.record().json
    for place in ("model.experts.weight", "optimizer.state.0.exp_avg"):
        layout, shape = layout_at(record, place)
        assert (layout["placements"], shape) == (["S(0)", "R"], (4, 3)), place
    for place in ("model.rest.weight", "optimizer.state.2.exp_avg_sq"):
        assert layout_at(record, place) == (EVERYWHERE, (4, 4)), place
    strategy = strategy_of(targets, one)
    assert strategy.replica_groups() in ([(0, 1), (2, 3)], [(0, 1), (2, 3), (0,)]), "of what is told"
    (step,) = strategy.by_name["optimizer.state.model.experts.weight.step"]
    assert set(step.layout.ranks) == {0, 1, 2, 3}, "a counter goes with its parameter"


def test_row_sums_of_a_matrix_that_is_split_by_hand_are_this_ranks_own() -> None:
    """Adafactor's follow the split, and have no replicas."""
    layouts = {"model.weight": Layout((4,), ("shard(0)",))}  # type: ignore[arg-type]
    record = by_hand(nn.Linear(6, 4, bias=False), layouts, 3, torch.optim.Adafactor)[1].record().json
    assert layout_at(record, "model.weight") == ({**EVERYWHERE, "placements": ["S(0)"]}, (16, 6))
    assert layout_at(record, "optimizer.state.0.row_var")[0] == {"mesh": [1], "placements": ["R"], "ranks": [[3, 1]]}


def test_layouts_by_hand_that_are_none() -> None:
    outside: Any = {"model.*": Layout((2,), ("R",), ranks=(3, 4))}  # type: ignore[arg-type]
    wrong: list[Any] = [{"model.*": "replicate"}, {3: Layout((1,), ("R",))}]  # type: ignore[arg-type]
    for layouts, message in ((outside, "names rank 4; the job has 4"), *((each, "give a pattern") for each in wrong)):
        with pytest.raises(UsageError, match=message):
            by_hand(nn.Linear(3, 2), layouts, 0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"n": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_tied_weights_buffers_and_extra_state() -> None:
    network = Counting()
    targets = {"model": network, "optimizer": stepped(network.parameters())}
    one = recorder(targets, world_size=1)
    assert one.record().json["volatile"] == {"model": ["count", "_extra_state"]}
    assert one.record().json["parameters"] == {"optimizer": ["model.embedding.weight"]}
    blueprint = one.blueprint()
    assert blueprint.parameters == {"model": ["embedding.weight", "head.weight"]}
    assert blueprint.volatile == {"model": ["count", "_extra_state"]}
    assert blueprint.optimizers == {"optimizer": [["model.embedding.weight"]]}
    assert one.shapes() == {"model.embedding.weight": (5, 3), "model.head.weight": (5, 3)}


def test_a_parameter_of_no_model_is_known_by_its_number() -> None:
    targets = {"optimizer": stepped([nn.Parameter(torch.zeros(3))])}
    assert "optimizer.state.optimizer.0.exp_avg" in strategy_of(targets, recorder(targets, world_size=1)).by_name
