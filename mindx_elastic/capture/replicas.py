"""Reads from DDP which modules it wraps, which ranks hold the same weights, and in which order gradients arrive."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import unwrap_module
from mindx_elastic.capture.ddp_order import DdpModules, GradientOrder
from mindx_elastic.capture.find_objects import find_objects
from mindx_elastic.capture.layouts import ByHand, ParallelSetup
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.layout import Layout
from mindx_elastic.core.ports import Risks

__all__ = [
    "GradientOrders",
    "ddp_modules",
    "outermost_replicas",
    "parallel_setup_of",
    "replica_ranks",
]


def ddp_modules(targets: Mapping[str, Any]) -> list[tuple[str, DistributedDataParallel]]:
    """Every DDP module and its path: those among the guard's objects, at any depth, and those that the guard was not
    given but that wrap one of its modules (``ddp = DDP(model)``, ``Guard(model=model)``). All ranks find the same ones.
    """
    found = [
        (f"{name}.{place}" if place else name, module)
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in target.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and _alone(targets, found):
        found += _hidden(targets, {id(module) for _, module in found})
    return found


def _trained(targets: Mapping[str, Any]) -> dict[int, str]:
    """The parameters that are trained, by id, with their path: those that a named optimizer has. An average of the
    weights is in none, though its parameters may ask for gradients."""
    optimizers = [t for t in targets.values() if isinstance(t, torch.optim.Optimizer)]
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        id(p): path for path, p in _parameters(targets) if p.requires_grad and (id(p) in optimized or not optimized)
    }


def _parameters(targets: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Of the job's modules, with their paths in the checkpoint."""
    for name, target in targets.items():
        if isinstance(target, nn.Module):
            yield from ((f"{name}.{place}", p) for place, p in unwrap_module(target).named_parameters())


def _alone(targets: Mapping[str, Any], found: DdpModules) -> bool:
    """Whether some trained parameter is whole on this rank and in no DDP module of `found`."""
    wrapped = {id(parameter) for _, module in found for parameter in module.parameters()}
    return any(
        parameter.requires_grad and id(parameter) not in wrapped and not isinstance(parameter, DTensor)
        for target in targets.values()
        if isinstance(target, nn.Module)
        for parameter in target.parameters()
    )


def _hidden(targets: Mapping[str, Any], known: Collection[int]) -> list[tuple[str, DistributedDataParallel]]:
    """DDP modules anywhere in the process around a module of `targets`."""
    modules = _named_modules(targets)
    paths = {id(module): path for path, module in modules.items()}
    living = [each for each in find_objects(DistributedDataParallel) if id(each) not in known]
    found: dict[str, DistributedDataParallel] = {}
    for module in living:
        path = paths.get(id(unwrap_module(module))) or next(
            (paths[id(part)] for part in module.modules() if id(part) in paths and "." not in paths[id(part)]), None
        )
        if path is not None:
            found[path] = module  # of two around one module the later one
    return sorted(found.items())


def _named_modules(targets: Mapping[str, object]) -> dict[str, nn.Module]:
    """Every module of the job by its path, without the wrappers (DDP, torch.compile) around a whole component."""
    return {
        f"{name}.{place}" if place else name: module
        for name, target in targets.items()
        if isinstance(target, nn.Module)
        for place, module in unwrap_module(target).named_modules()
    }


def outermost_replicas(targets: Mapping[str, Any], ddp: DdpModules) -> list[nn.Module]:
    """The modules whose forward runs a replica: DDP, or the `torch.compile` wrapper around it. Both keep hooks.

    `ddp`, here and below: what `ddp_modules` gives for `targets`.
    """
    modules = [module for _, module in ddp]
    wrappers = [t for t in targets.values() if isinstance(t, nn.Module) and hasattr(t, "_orig_mod")]
    inside = {id(wrapper): {id(part) for part in wrapper.modules()} for wrapper in wrappers}
    compiled = [wrapper for wrapper in wrappers if any(id(module) in inside[id(wrapper)] for module in modules)]
    return [*compiled, *(m for m in modules if not any(id(m) in inside[id(wrapper)] for wrapper in compiled))]


def replica_ranks(targets: Mapping[str, Any], ddp: DdpModules) -> list[int]:
    """The ranks that hold the same weights as this one, if DDP reduces every trained parameter; empty: unknown."""
    modules = [module for _, module in ddp]
    if any(module.parameters_to_ignore for module in modules):  # each rank has its own (experts of one rank)
        return []
    groups = {tuple(sorted(dist.get_process_group_ranks(module.process_group))) for module in modules}
    trained, reduced = _trained(targets), {id(parameter) for module in modules for parameter in module.parameters()}
    if not trained or len(groups) != 1 or not trained.keys() <= reduced:
        return []
    return list(groups.pop())


def parallel_setup_of(
    targets: Mapping[str, Any],
    ranks: RankInfo,
    layouts: Mapping[str, Layout] | None,
    ddp: DdpModules,
) -> ParallelSetup:
    """This rank's place in the parallel job. Raises UsageError for malformed layouts."""
    return ParallelSetup(
        ranks.rank,
        ranks.world_size,
        replica_ranks(targets, ddp),
        ByHand(layouts or {}, ranks),
    )


class GradientOrders:
    """Records the gradient order of every DDP module that does not have one yet, during the first backward."""

    def __init__(
        self,
        ddp: DdpModules,
        collector: Collector,
        risks: Risks,
        *,
        world_size: int,
        by_hand: bool = False,
    ) -> None:
        """by_hand: the user has given layouts, or the guard does not train; then there is no warning without DDP."""
        self._collector = collector
        if world_size > 1 and not by_hand and not ddp and not collector.is_sharded:
            others = find_objects(DistributedDataParallel)  # around something else: perhaps around a copy
            logger.log(
                logging.WARNING if others else logging.INFO,
                "no DDP or sharded module among the guard's objects: if the model is wrapped in DDP, give the guard "
                "the wrapped one, or a resumed run may differ in the last bits at 3 and more ranks",
            )
        self._recording: dict[str, GradientOrder] = {}
        for name, module in ddp:
            if module.static_graph:
                if module.process_group.size() > 2:  # a sum of two is the same in any order
                    risks.risk(
                        f"{name} is DDP with static_graph=True, whose order of gradients no checkpoint has: a resumed "
                        "run may differ in the last bits from 3 ranks on",
                        "Write DDP(..., static_graph=False), and torch.utils.checkpoint with use_reentrant=False",
                    )
            elif not collector.gradient_order.get(name):
                order = self._recording[name] = GradientOrder(module)
                order.record()
        self.are_complete = not self._recording
        """There is nothing left to record, and `at_boundary` need not be called."""

    def at_boundary(self) -> None:
        """Training thread, at each boundary: keep the orders that are complete."""
        for name, order in list(self._recording.items()):
            is_complete = order.finish()
            self._collector.gradient_order[name] = order.order
            if is_complete:
                del self._recording[name]
                self.are_complete = not self._recording
