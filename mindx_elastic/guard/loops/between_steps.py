"""What the code between two steps moves, on its way to the resumed place, after a boundary, or in an evaluation.

A resumed program runs from its first line, so code inside the guard's block runs again whose effect the state already
has: a learning rate that is set before the loop, what stands between two loops over epochs, an evaluation on the
training's own loader. What it changes in the small state (options of optimizers, schedulers, buffers, objects in
`stateful`, positions) is put back, and one line says so. Weights cannot be put back: that is refused.

What the code between a boundary and the next batch moves, a run that is stopped at that boundary goes on without: it
is named, at looks after a few boundaries, and after evaluations, whose results such code may note (`BetweenSteps`).

`Guard.outside_step` leaves no trace in the training, and a stop inside saves the boundary (`Evaluations`):

========================  ==============================================================================================
random streams            put back afterwards: global ones, named generators, samplers' own
modes of the modules      put back afterwards
position of the loaders   put back afterwards: a named loader can be iterated, also in mid-epoch. One that keeps its
                          position by itself cannot be put back: told where the block has moved it
weights                   an evaluation may exchange them (averaged ones) and put them back. Meanwhile nothing is
                          saved: a stop waits for the end of the block. Nor is it after an exception that leaves them
                          exchanged
buffers                   are not put back, for a program may want the change: named, unless they end as they began
========================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.components import ModuleComponent, OptimizerComponent, PlainComponent
from mindx_elastic.capture.copying import copy_tree, same_tree
from mindx_elastic.capture.rng import capture_rng, kept_rng, moved_streams
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.capture.weight_samples import WeightSample, WeightSamples
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["BetweenSteps", "Evaluations", "moved_since", "named_streams", "put_back_small_state", "put_back_streams"]


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
                cursor = component.target.cursor
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


class BetweenSteps:
    """One per entered guard. Training thread."""

    def __init__(
        self,
        collector: Collector,
        unmanaged: Unmanaged,
        samples: WeightSamples,
        is_clean: Callable[[], bool],
        *,
        is_resumed: bool,
    ) -> None:
        """`is_clean`: as `UpdateGate.is_clean`. `is_resumed`: the run goes on from a boundary. It looks after other
        steps than the first process did, and what that process was not refused for (a sample that is drawn every
        thousandth step) must not keep the run from going on."""
        self._collector, self._unmanaged, self._samples = collector, unmanaged, samples
        self._is_clean = is_clean
        self._certain = unmanaged.risk if is_resumed else unmanaged.certain
        self.is_watching = False
        self._weights: Mapping[str, WeightSample] = {}
        self.drawn: tuple[list[str], dict[str, Any]] | None = None
        """The streams that had moved at the last look, and how all were then; for `judge_drawn`."""

    def watch(self, sample: Mapping[str, WeightSample] | None) -> None:
        """Watch from the boundary that was just copied. `sample`: of its weights, where one was taken."""
        self.is_watching = True
        if sample is None:
            sample = self._samples.take() if self._is_clean() else {}
        self._weights = sample

    def leave(self) -> None:
        """What follows belongs to no boundary yet."""
        self.is_watching = False

    def look(self) -> None:
        """The next step begins. Raises UnmanagedStateError."""
        if not self.is_watching:
            return
        self.is_watching = False
        moved, others = moved_since(self._collector)
        now = capture_rng(self._collector.rng)
        if drawn := moved_streams(self._collector.rng, now):
            self.drawn = drawn, now
        sample, self._weights = self._weights, {}
        # Also where no counter has moved (`.data`). Weights that were exchanged and put back are the same.
        moved += self._samples.changed_since(sample)
        for names, tell in ((moved, self._certain), (others, self._unmanaged.risk)):
            if names:
                tell(*_moves(listed(names, 3)))

    def judge_drawn(self, drawn: list[str], then: dict[str, Any]) -> None:
        """A step has ended. Numbers that were drawn in front of it to print something do no harm where no step draws
        from that stream. Raises UnmanagedStateError."""
        self.drawn = None
        steps = moved_streams(then, self._collector.rng)
        if used := [name for name in drawn if name in steps]:
            self._certain(*_moves(f"a random stream ({listed(used, 3)})"))


def _moves(names: str) -> tuple[str, str]:
    what = (
        f"{names} moves after guard.step_end() and before the next batch, and a run that is stopped at that step goes "
        "on without it"
    )
    return what, (
        "Do it before guard.step_end(), or at the head of the loop for the step before; what only draws random numbers "
        "belongs into `with guard.outside_step():`"
    )


class Evaluations:
    """One per entered guard. Training thread."""

    def __init__(self, collector: Collector, gate: UpdateGate, loaders: Loaders, unmanaged: Unmanaged) -> None:
        self._collector, self._gate, self._loaders, self._unmanaged = collector, gate, loaders, unmanaged
        self._samples = WeightSamples(collector)
        self._warned_of_buffers = False
        self.depth = 0
        """The number of such blocks that the program is inside: what happens there belongs to no step."""

    @contextmanager
    def block(self, step: int) -> Iterator[None]:
        """Around an evaluation after boundary `step`."""
        buffers = self._collector.look_at_buffers()
        places = [(each, copy_tree(each.state_dict())) for each in self._loaders.positioned_by_themselves]
        with ExitStack() as stack:
            stack.enter_context(kept_rng())
            stack.enter_context(self._collector.kept_streams_and_flags())
            stack.enter_context(self._loaders.outside())
            for loader in self._loaders.named:
                if hasattr(loader, "set_aside"):
                    stack.enter_context(loader.set_aside())
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
        if any(not same_tree(each.state_dict(), before) for each, before in places):
            self._unmanaged.risk(
                "a named loader that keeps its position by itself was iterated inside guard.outside_step(), which "
                "cannot put it back: a run that is stopped there goes on without that",
                "Make a second loader for the evaluation",
            )
        changed = [] if self._warned_of_buffers else self._collector.changed_buffers(buffers)
        if changed:
            self._warned_of_buffers = True
            self._unmanaged.risk(
                f"step {step}: {listed(changed, 3)} changed inside guard.outside_step(): no boundary has that, so a "
                "run that is stopped here goes on without it",
                "Call eval() on the model first",
            )

    @contextmanager
    def watched_weights(self) -> Iterator[None]:
        """Inside, `UpdateGate.hold` finds out when the weights are exchanged, also where that counts no version. Where
        an exception leaves them so, it goes on to find that out until the next boundary."""
        gate = self._gate
        if gate.others is not None or not gate.is_clean():
            yield
            return
        samples, sample = self._samples, self._samples.take()
        exchanged = "the weights are exchanged inside guard.outside_step()"
        gate.others = lambda: exchanged if samples.changed_since(sample) else None
        try:
            yield
        finally:
            if gate.others() is None:
                gate.others = None
                gate.accept_changes()
