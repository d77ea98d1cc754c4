"""Reads from DDP which modules it wraps, which ranks hold the same weights, and in which order gradients arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.ddp_order import GradientOrder
from mindx_elastic.core.events import logger

__all__ = [
    "GradientOrders",
    "ddp_modules",
    "ignored_parameters",
    "is_replicated",
    "outermost_replicas",
    "replica_ranks",
]


def ddp_modules(targets: Mapping[str, Any]) -> list[tuple[str, DistributedDataParallel]]:
    """Every DDP module and its path, also below the top level (in a `ModuleDict`, under `torch.compile`)."""
    return [
        (f"{name}.{place}" if place else name, module)
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in target.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]


def outermost_replicas(targets: Mapping[str, Any]) -> list[nn.Module]:
    """The modules whose forward runs a replica: DDP, or the `torch.compile` wrapper around it. Both keep hooks."""
    wrapped = {name.split(".")[0] for name, _ in ddp_modules(targets)}
    compiled = [t for name, t in targets.items() if name in wrapped and hasattr(t, "_orig_mod")]
    inside = {id(module) for target in compiled for module in target.modules()}
    return [*compiled, *(module for _, module in ddp_modules(targets) if id(module) not in inside)]


def replica_ranks(targets: Mapping[str, Any]) -> list[int]:
    """The ranks that hold the same weights as this one, if every trained module is wrapped in DDP; empty: unknown."""
    trained = {
        name
        for name, target in targets.items()
        if isinstance(target, nn.Module) and any(p.requires_grad for p in target.parameters())
    }
    modules = ddp_modules(targets)
    groups = {tuple(sorted(dist.get_process_group_ranks(module.process_group))) for _, module in modules}
    if not trained or len(groups) != 1 or not trained <= {name.split(".")[0] for name, _ in modules}:
        return []
    return list(groups.pop())


def ignored_parameters(targets: Mapping[str, Any]) -> frozenset[str]:
    """Paths of parameters that DDP ignores (experts of one rank, for example)."""
    found = set()
    for place, module in ddp_modules(targets):
        component, _, inner = place.partition(".")
        for name in module.parameters_to_ignore:
            found.add(f"{component}.{inner}.{name}" if inner else f"{component}.{name}")
    return frozenset(found)


def is_replicated(targets: Mapping[str, Any], collector: Collector, world_size: int) -> bool:
    """Whether every rank holds the same state, so that one rank's file can replace any other's."""
    whole = len(replica_ranks(targets)) == world_size > 1 and not ignored_parameters(targets)
    return whole and not collector.is_sharded and not collector.is_spread


class GradientOrders:
    """Records the gradient order of every DDP module that does not have one yet, during the first backward."""

    def __init__(
        self, targets: Mapping[str, Any], collector: Collector, *, world_size: int, by_hand: bool = False
    ) -> None:
        """by_hand: the user has given layouts, or the guard does not train; then there is no warning without DDP."""
        self._collector = collector
        if world_size > 1 and not by_hand and not ddp_modules(targets) and not collector.is_sharded:
            logger.warning(
                "no DDP or sharded module among the guard's objects: if the model is wrapped in DDP, give the guard "
                "the wrapped one, or a resumed run may differ in the last bits at 3 and more ranks"
            )
        self._recording: dict[str, GradientOrder] = {}
        for name, module in ddp_modules(targets):
            if not collector.gradient_order.get(name):
                self._recording[name] = GradientOrder(module)
                self._recording[name].record()

    def at_boundary(self) -> None:
        """Training thread, at each boundary: keep the orders that are complete."""
        if not self._recording:
            return
        for name, order in list(self._recording.items()):
            if order.finish():
                self._collector.gradient_order[name] = self._recording.pop(name).order
