"""Keeps the resumed state as it is until the loop reaches the resumed place.

A resumed program runs from its first line, so code inside the guard's block runs again whose effect the state already
has: a learning rate that is set before the loop, what stands between two loops over epochs, an evaluation on the
training's own loader. What it changes in the small state (options of optimizers, schedulers, buffers, objects in
`stateful`, positions) is put back, and one line says so. Weights cannot be put back: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent, PlainComponent
from mindx_elastic.capture.copying import copy_tree
from mindx_elastic.core.looks import are_equal
from mindx_elastic.guard.loops.followed_loader import FollowedLoader

__all__ = ["equal_trees", "moved_since", "named_streams", "put_back_small_state", "put_back_streams"]

_PLAIN = frozenset((type(None), bool, int, float, str))


def put_back_small_state(collector: Collector) -> list[str]:
    """Make optimizers' options, buffers and plain objects as at the boundary. Returns the names of what was not."""
    changed: list[str] = []
    buffers: list[str] = []
    for name, component in collector.components.items():
        if isinstance(component, OptimizerComponent):
            if not equal_trees(component.look(), component.groups):
                changed.append(name)
                _put_back_options(component)
        elif isinstance(component, ModuleComponent):
            buffers += [f"{name}.{place}" for place in _put_back_buffers(component)]
        elif isinstance(component, PlainComponent) and not component.is_stream:
            if component.is_heavy:
                continue  # not copied at the boundary
            if isinstance(component.target, FollowedLoader):
                cursor = component.target.engine.cursor
                if cursor.live or cursor.pending:
                    continue  # the loop has begun to iterate, or nothing has
                if equal_trees(component.look(), component.seen):
                    # Where an epoch was over, the next iteration would begin another.
                    component.put_back(component.state())
            if not equal_trees(component.look(), component.seen):
                changed.append(name)
                component.put_back(component.state())
    return changed + buffers


def moved_since(collector: Collector) -> tuple[list[str], list[str]]:
    """What is not as at the boundary now: optimizers, schedulers and named generators; other objects of the program."""
    certain: list[str] = []
    others: list[str] = []
    for name, component in collector.components.items():
        if isinstance(component, OptimizerComponent):
            if not equal_trees(component.look(), component.groups):
                certain.append(name)
        elif not isinstance(component, PlainComponent):
            continue
        elif component.is_heavy or isinstance(component.target, FollowedLoader):
            continue  # not copied at the boundary, or asked for its batch just now
        elif not equal_trees(component.look(), component.seen):
            is_known = component.is_stream or type(component.target).__module__.partition(".")[0] == "torch"
            (certain if is_known else others).append(name)
    return certain, others


def _put_back_options(component: OptimizerComponent) -> None:
    optimizers = {id(o): o for o in (component.optimizer, component.local)}
    for optimizer in optimizers.values():
        if len(optimizer.param_groups) == len(component.groups):
            for live, copied in zip(optimizer.param_groups, component.groups, strict=True):
                for key, value in copied.items():
                    if not equal_trees(live.get(key), value):
                        live[key] = copy_tree(value)


@torch.no_grad()
def _put_back_buffers(component: ModuleComponent) -> list[str]:
    copies = component.copied_buffers()
    changed = []
    for name, live in component.named_buffers():
        copied = copies.get(name)
        if copied is not None and copied.shape == live.shape and not equal_trees(live, copied):
            live.copy_(copied)
            changed.append(name)
    return changed


def named_streams(collector: Collector) -> dict[str, Any]:
    """The states of the random generators that the program has named."""
    return {name: c.look() for name, c in collector.components.items() if isinstance(c, PlainComponent) and c.is_stream}


def put_back_streams(collector: Collector, states: Mapping[str, Any]) -> None:
    """Set them as `named_streams` has given them."""
    for name, state in states.items():
        component = collector.components.get(name)
        if isinstance(component, PlainComponent) and component.is_stream:
            component.put_back(state)


def equal_trees(one: Any, other: Any) -> bool:
    """Whether two nested states are the same, bit for bit in tensors and arrays."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _equal_bits(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and _equal_pairs([(value, other[key]) for key, value in one.items()])
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, (str, bytes)):
        return len(one) == len(other) and _equal_pairs(zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    if type(one) is not type(other):
        return False
    return are_equal(one, other)


def _equal_pairs(pairs: Iterable[tuple[Any, Any]]) -> bool:
    for one, other in pairs:  # without a call for what most are
        if one is other or (type(one) in _PLAIN and type(one) is type(other) and one == other):
            continue
        if not equal_trees(one, other):
            return False
    return True


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    if torch.equal(one, other):
        return True
    # nan equals nan
    return bool(torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)))
