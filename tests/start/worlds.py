"""Checkpoint files of made-up worlds: whole tensors, cut by a layout and written by as many ranks as it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindx_elastic.capture.layouts import Blueprint
from mindx_elastic.core.layout import REPLICATE, Layout
from mindx_elastic.core.strategy import LaidOut, LayoutRecord, Strategy, TensorSpec
from mindx_elastic.persist.catalog import read_entries
from mindx_elastic.persist.writer import write_checkpoint
from mindx_elastic.start.facts import Refusal, ResumePlan, World
from mindx_elastic.start.file_facts import facts_of
from mindx_elastic.start.planner import plan_resume
from mindx_elastic.start.reshard import Parts, assemble
from mindx_elastic.start.restore import Target
from tests.checkpoint_files import info_of

__all__ = ["Saved", "cut", "resharded", "target_of"]

Laid = tuple[torch.Tensor, Layout]


def cut(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What `rank` holds, by torch.chunk: mesh dimensions from left to right, a ``_StridedShard`` after those right of
    it."""
    coordinate = torch.tensor(list(layout.ranks)).reshape(layout.mesh_shape).eq(rank).nonzero()[0].tolist()
    order = sorted(range(len(layout.mesh_shape)), key=lambda i: layout.placements[i].split_factor > 1)
    for i in order:
        dim = layout.placements[i].dim
        if dim is not None:
            chunks = tensor.chunk(layout.mesh_shape[i], dim)
            empty = tensor.narrow(dim, 0, 0)
            tensor = chunks[coordinate[i]] if coordinate[i] < len(chunks) else empty
    return tensor


@dataclass
class Saved:
    """A world that saves a step: ``Saved(4, {"w": (tensor, layout)}).write(root)``.

    `moments`: of some of the parameters, tensors of the same shape, laid out like the parameter, and a counter.
    """

    world_size: int
    parameters: Mapping[str, Laid]
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    groups: Sequence[Sequence[str]] | None = None
    """Parameters by group of the optimizer; default: one group, in order."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further name -> parameter."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the optimizer keeps of a rank's first parameter, too."""

    def write(self, root: Path, step: int = 7) -> Saved:
        for rank in range(self.world_size):
            folder = root / f"rank_{rank}" if self.world_size > 1 else root
            folder.mkdir(parents=True, exist_ok=True)
            path, info = folder / f"w-1_{step}.safetensors", info_of(step, world_size=self.world_size, rank=rank)
            write_checkpoint(path, self.state(rank, step), info, layout=self.record(rank))
        return self

    @property
    def all_groups(self) -> list[list[str]]:
        return [list(self.parameters)] if self.groups is None else [list(names) for names in self.groups]

    def state(self, rank: int, step: int) -> dict[str, Any]:
        held = {name: cut(*laid, rank).clone() for name, laid in self.parameters.items() if rank in laid[1]}
        model = {**held, **{other: held[name] for other, name in self.tied.items() if name in held}}
        model["running"] = torch.tensor([float(rank)])  # a buffer: each rank's own
        order = [name for group in self.all_groups for name in group if name in held]
        states = {
            number: {
                "exp_avg": cut(self.moments[name], self.parameters[name][1], rank).clone(),
                "step": torch.tensor(float(step)),
                "note": f"of {name}",
            }
            for number, name in enumerate(order)
            if name in self.moments
        }
        if self.extra:
            states.setdefault(0, {}).update(self.extra)
        groups, first = [], 0
        for number, names in enumerate(self.all_groups):
            count = sum(name in held for name in names)
            groups.append({"lr": 0.1 / (number + 1), "params": list(range(first, first + count))})
            first += count
        return {
            "model": model,
            "optimizer": {"state": states, "param_groups": groups, "class": "AdamW"},
            "lr_scheduler": {"last_epoch": step, "rank": rank},
            "rng": {"torch": torch.tensor([rank])},
            "progress": {"step": step, "epoch": 1, "step_in_epoch": step, "batch_num": 100},
            "gradient_order": {},
        }

    def record(self, rank: int) -> dict[str, Any]:
        """``mindx.layout``, as `capture.layouts` writes it."""
        named: dict[str, LaidOut] = {}
        order = [n for group in self.all_groups for n in group if rank in self.parameters[n][1]]
        for name, (tensor, layout) in self.parameters.items():
            if rank not in layout:
                continue
            laid = LaidOut(layout, tuple(tensor.shape), False)
            for place in (name, *(other for other, first in self.tied.items() if first == name)):
                named[f"model.{place}"] = laid
            if name in self.moments:
                named[f"optimizer.state.{order.index(name)}.exp_avg"] = laid
                whole = LaidOut(Layout((layout.size,), (REPLICATE,), layout.ranks), (), False)
                named[f"optimizer.state.{order.index(name)}.step"] = whole
        return LayoutRecord(
            rank=rank,
            world_size=self.world_size,
            default=LaidOut(Layout((self.world_size,), (REPLICATE,)), (), False),
            tensors=named,
            parameters={"optimizer": [f"model.{name}" for name in order]},
            modules=["model"],
            volatile={"model": ["running"]},
        ).json


def target_of(
    world_size: int,
    parameters: Mapping[str, tuple[Sequence[int], Layout]],
    groups: Sequence[Sequence[str]] | None = None,
    rank: int = 0,
) -> Target:
    """What a new world wants: name -> (shape, layout); of `rank`'s own program."""
    specs = [TensorSpec(f"model.{name}", tuple(shape), layout) for name, (shape, layout) in parameters.items()]
    held = [name for name, (_, layout) in parameters.items() if rank in layout]
    groups = [list(parameters)] if groups is None else groups
    strategy = Strategy(world_size, tuple(specs))
    return Target(
        strategy,
        Blueprint(
            {"model": held},
            {"model": ["running"]},
            {"optimizer": [[f"model.{name}" for name in group if name in held] for group in groups]},
        ),
        strategy,
    )


def resharded(
    root: Path,
    world_size: int,
    parameters: Mapping[str, tuple[Sequence[int], Layout]],
    groups: Sequence[Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """The state of each rank of a new world, put together from the files under `root`. AssertionError for a refusal."""
    plan = plan_for(root, target_of(world_size, parameters, groups))
    states = []
    for rank in range(world_size):
        with Parts(plan, plan.ranks[rank]) as parts:
            states.append(assemble(parts, target_of(world_size, parameters, groups, rank).blueprint).state)
    return states


def plan_for(root: Path, target: Target) -> ResumePlan:
    facts, rejected = facts_of(read_entries(root))
    plan = plan_resume(facts, World(target.own.world_size, target.own), rejected=rejected)
    assert not isinstance(plan, Refusal), plan
    return plan
