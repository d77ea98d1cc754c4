"""What a loop compares with the boundary, and puts back: positions of loaders, named generators.

A resumed program runs from its first line, so code inside the guard's block runs again whose effect the state already
has: a learning rate that is set before the loop, what stands between two loops over epochs, an evaluation on the
training's own loader. What the start has loaded it puts back itself (`capture.loop_head`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent, PlainComponent
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.guard.loops.followed_loader import FollowedLoader, OwnState

__all__ = ["changed_buffers", "moved_since", "named_streams", "put_back_positions", "put_back_streams"]


def put_back_positions(collector: Collector) -> list[str]:
    """Make loaders as at the boundary, where code has iterated them since; `capture.loop_head` leaves them out. Returns
    the names of those that were not."""
    changed: list[str] = []
    for name, component in collector.components.items():
        if not isinstance(component, PlainComponent):
            continue
        if isinstance(component.target, FollowedLoader):
            cursor = component.target.engine.cursor
            # Else the loop has begun to iterate, or nothing has. Where an epoch was over, the next iteration would
            # begin another.
            if not (cursor.live or cursor.pending):
                if not same_tree(component.look(), component.seen):
                    changed.append(name)
                component.put_back(component.state())
        elif isinstance(component.target, OwnState) and not same_tree(component.look(), component.seen):
            changed.append(name)
            component.put_back(component.state())
    return changed


def changed_buffers(collector: Collector) -> list[str]:
    """The modules' buffers that are not as at the boundary, by module and name."""
    found: list[str] = []
    for module, component in collector.components.items():
        if isinstance(component, ModuleComponent):
            live, copies = dict(component.named_buffers()), component.copied_buffers()
            found += [f"{module}.{n}" for n in live.keys() & copies.keys() if not same_tree(live[n], copies[n])]
    return sorted(found)


def moved_since(collector: Collector) -> tuple[list[str], list[str]]:
    """What is not as at the boundary now: optimizers, schedulers and named generators; other objects of the program."""
    certain: list[str] = []
    others: list[str] = []
    for name, component in collector.components.items():
        if isinstance(component, OptimizerComponent):
            if not same_tree(component.look(), component.seen):
                certain.append(name)
        elif not isinstance(component, PlainComponent):
            continue
        elif component.is_heavy or isinstance(component.target, FollowedLoader):
            continue  # not copied at the boundary, or asked for its batch just now
        elif not same_tree(component.look(), component.seen):
            is_known = component.is_stream or type(component.target).__module__.partition(".")[0] == "torch"
            (certain if is_known else others).append(name)
    return certain, others


def named_streams(collector: Collector) -> dict[str, Any]:
    """The states of the random generators that the program has named."""
    return {name: c.look() for name, c in collector.components.items() if isinstance(c, PlainComponent) and c.is_stream}


def put_back_streams(collector: Collector, states: Mapping[str, Any]) -> None:
    """Set them as `named_streams` has given them."""
    for name, state in states.items():
        component = collector.components.get(name)
        if isinstance(component, PlainComponent) and component.is_stream:
            component.put_back(state)
