"""Gives a resumed DDP module the bucket layout that the interrupted process had.

DDP rebuilds its buckets once, from the order in which gradients arrive in its first backward. The usual solution is a
throwaway forward and backward of the real model before loading the state, which needs a batch and the loss, changes
BatchNorm buffers and random generators, and costs a step. This module replays only what DDP observes: a graph that
uses every parameter with a zero gradient, built so that autograd reaches the parameters in the recorded order.

With ``gradient_as_bucket_view=True`` gradients lie in the buckets, where ``zero_grad(set_to_none=False)`` leaves them:
DDP divides those by the number of ranks, and multiplies any others by its reciprocal. So a second replay puts them
there. Which of them there are, `capture.extra_state.Flags` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mindx_elastic.capture.ddp import DdpModules, GradientOrder, effect_of_order
from mindx_elastic.core.ports import Risks

__all__ = ["replay_gradient_order", "replay_orders"]


def replay_orders(state: Mapping[str, Any], ddp: DdpModules, risks: Risks) -> None:
    """Let DDP lay out its buckets as it had at the boundary of `state`. All ranks together."""
    orders = state.get("gradient_order", {})
    are_known = all("gradients" in extras for extras in state.get("module_extras", {}).values())  # not in older files
    for name, module in ddp:
        if module.static_graph:
            continue  # told at the entry
        problem = replay_gradient_order(module, orders.get(name, []), in_buckets=are_known)
        if problem is not None and (effect := effect_of_order(module)):
            risks.risk(
                f"{name}: the order in which DDP adds gradients could not be restored, so the resumed run {effect}: "
                f"{problem}",
                "Give the model the same trained parameters as the run that wrote the checkpoint, and wrap it in DDP "
                "before the guard is entered",
            )


def replay_gradient_order(module: DistributedDataParallel, order: list[int], *, in_buckets: bool = False) -> str | None:
    """Run one synthetic backward through `module` (a collective: every rank must call it), two where its gradients are
    views of its buckets. Main thread.

    Returns None when the layout is restored, else the reason why it is not. Does not change parameters, buffers, random
    generators or gradients. `in_buckets`: such views stay, all zeros.
    """
    if module.static_graph:
        return "it has static_graph=True"
    parameters = GradientOrder(module).parameters
    if module.find_unused_parameters:  # DDP never rebuilds, so there is no order to restore
        if not module.gradient_as_bucket_view:
            return None
        order = [*range(len(parameters))]
    if sorted(order) != list(range(len(parameters))):
        return f"the checkpoint recorded {len(order)} gradients, the model has {len(parameters)} that need one"
    gradients = [p.grad for p in parameters]

    inner = module.module
    broadcast, module.broadcast_buffers = module.broadcast_buffers, False
    try:
        module._modules["module"] = _Replay(parameters, order)  # not inner.forward: no hook of the user's runs
        for _ in range(1 + module.gradient_as_bucket_view):  # DDP rebuilds before the second
            for parameter in parameters:
                parameter.grad = None
            with torch.enable_grad():
                module(torch.zeros(1, device=parameters[0].device)).backward()
    finally:
        module._modules["module"] = inner
        module.broadcast_buffers = broadcast
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if not (in_buckets and module.gradient_as_bucket_view):
                parameter.grad = gradient
    return None


class _Replay(nn.Module):
    """Touches each parameter with a zero, in an order that makes autograd arrive at them in `order`."""

    def __init__(self, parameters: list[nn.Parameter], order: list[int]) -> None:
        super().__init__()
        self._touched = [parameters[index] for index in order]  # a plain list: it must not register the parameters

    def forward(self, anchor: torch.Tensor) -> torch.Tensor:
        total = anchor.sum()
        # Autograd runs the node that was created last first, so the chain starts at the end of the order.
        for parameter in reversed(self._touched):
            total = total + (parameter.flatten()[:1] * 0).sum().to(total.device, total.dtype)
        return total
