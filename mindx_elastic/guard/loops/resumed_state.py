"""Keeps the resumed state as it is until the loop reaches the resumed place.

A resumed program runs from its first line, so code inside the guard's block runs again whose effect the state already
has: a learning rate that is set before the loop, what stands between two loops over epochs, an evaluation on the
training's own loader. What it changes in the small state (options of optimizers, schedulers, buffers, objects in
`stateful`, positions) is put back, and one line says so. Weights cannot be put back: that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent, PlainComponent
from mindx_elastic.capture.copying import copy_tree, same_tree
from mindx_elastic.guard.loops.followed_loader import FollowedLoader

__all__ = ["moved_since", "named_streams", "put_back_small_state", "put_back_streams"]


def put_back_small_state(collector: Collector) -> list[str]:
    """Make optimizers' options, buffers and plain objects as at the boundary. Returns the names of what was not."""
    changed: list[str] = []
    buffers: list[str] = []
    for name, component in collector.components.items():
        if isinstance(component, OptimizerComponent):
            if not same_tree(component.look(), component.groups):
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
                if same_tree(component.look(), component.seen):
                    # Where an epoch was over, the next iteration would begin another.
                    component.put_back(component.state())
            if not same_tree(component.look(), component.seen):
                changed.append(name)
                component.put_back(component.state())
    return changed + buffers


def moved_since(collector: Collector) -> tuple[list[str], list[str]]:
    """What is not as at the boundary now: optimizers, schedulers and named generators; other objects of the program."""
    certain: list[str] = []
    others: list[str] = []
    for name, component in collector.components.items():
        if isinstance(component, OptimizerComponent):
            if not same_tree(component.look(), component.groups):
                certain.append(name)
        elif not isinstance(component, PlainComponent):
            continue
        elif component.is_heavy or isinstance(component.target, FollowedLoader):
            continue  # not copied at the boundary, or asked for its batch just now
        elif not same_tree(component.look(), component.seen):
            is_known = component.is_stream or type(component.target).__module__.partition(".")[0] == "torch"
            (certain if is_known else others).append(name)
    return certain, others


def _put_back_options(component: OptimizerComponent) -> None:
    optimizers = {id(o): o for o in (component.optimizer, component.local)}
    for optimizer in optimizers.values():
        if len(optimizer.param_groups) == len(component.groups):
            for live, copied in zip(optimizer.param_groups, component.groups, strict=True):
                for key, value in copied.items():
                    if not same_tree(live.get(key), value):
                        live[key] = copy_tree(value)


@torch.no_grad()
def _put_back_buffers(component: ModuleComponent) -> list[str]:
    copies = component.copied_buffers()
    changed = []
    for name, live in component.named_buffers():
        copied = copies.get(name)
        if copied is not None and copied.shape == live.shape and not same_tree(live, copied):
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
