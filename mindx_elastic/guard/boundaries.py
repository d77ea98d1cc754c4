"""Joins what looks at the training's state: the gate that sees its updates, and what is done at each boundary.

The state is copied there, and what has changed in the step is compared with what a start can make again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindx_elastic.capture.close_looks import CLOSE_EVERY, CLOSE_FIRST
from mindx_elastic.capture.components import OptimizerComponent, PlainComponent
from mindx_elastic.capture.ddp import CollectiveWaits, GradientOrders
from mindx_elastic.capture.device_progress import fills_queue
from mindx_elastic.capture.graph_replays import GraphReplays
from mindx_elastic.capture.update_gate import GateState, UpdateGate
from mindx_elastic.capture.weight_samples import HiddenChanges, WeightSamples
from mindx_elastic.core.events import logger
from mindx_elastic.core.looks import attributes_of
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import listed
from mindx_elastic.core.tensor_memory import without_collections
from mindx_elastic.errors import UnsupportedStateError
from mindx_elastic.guard.checks.checks import FIRST_LOOKS, Checks
from mindx_elastic.guard.checks.ddp import CommHooks, UnreducedUpdates
from mindx_elastic.guard.checks.movements import TensorsLook
from mindx_elastic.guard.loops.loops import Loops
from mindx_elastic.guard.opening import Opening
from mindx_elastic.persist.flatten import flatten

__all__ = ["Boundaries"]

_CLEAN = GateState.CLEAN
_LONG_WINDOW = 64
_STEPS = 5


def _num_functions_of(target: Any) -> int:
    """The number of functions of a LambdaLR, one a group."""
    found = attributes_of(target).get("lr_lambdas")
    return len(found) if type(found) is list else 0


class Boundaries:
    """One per entered guard. Training thread; `stack` removes the hooks in the end."""

    def __init__(self, stack: ExitStack, opening: Opening, checks: Checks, loops: Loops) -> None:
        targets, ddp, world_size = opening.targets, opening.ddp, opening.saver.ranks.world_size
        collector, unmanaged = self._collector, self._unmanaged = opening.collector, opening.unmanaged
        self.has_passed = False
        """A boundary was passed since the start."""
        self.number = 0
        """Number of steps that have ended with a boundary."""
        self.times = deque([time.monotonic()], maxlen=_STEPS + 1)
        """When the last of them were reached, by `time.monotonic`; the first one is the entry."""
        self.is_look = False
        """The last one is one of those where the program is looked at: 1, 2, 3, 4, 8, 16, ..."""
        gate = self.gate = UpdateGate()
        gate.watch(collector.parameters, collector.optimizers())
        stack.callback(gate.unwatch)
        self._unreduced: UnreducedUpdates | None = None
        if world_size > 1:
            collector.watch_weights()
            collector.keep_older_boundaries()
            self._unreduced = UnreducedUpdates(ddp, unmanaged, collector.weight_samples)
        # Without an optimizer gradients show no accumulation: the program updates by hand and may never clear them.
        self._accumulates = any(isinstance(t, torch.optim.Optimizer) for t in targets.values())
        self.hidden = HiddenChanges(
            WeightSamples(collector), gate.changed_since_boundary, are_likely=not self._accumulates
        )
        """Compares samples of the weights at some boundaries."""
        gate.hidden = self.hidden.problem
        gate.on_update = self._begin_update
        collector.compiled.at_first = gate.leave_uncompiled
        collector.compiled.listen()
        stack.callback(collector.compiled.stop)
        collector.on_new_parameters = gate.follow
        collector.watch()
        stack.callback(collector.unwatch)
        if collector.devices.is_used:
            replays = GraphReplays(collector, gate)
            replays.watch()
            stack.callback(replays.unwatch)
        self._hooks = CommHooks(targets, ddp, unmanaged)
        by_hand = bool(opening.options.layouts) or opening.evaluates
        self._orders = GradientOrders(ddp, collector, unmanaged, world_size=world_size, by_hand=by_hand)
        if opening.around.link is not None and not opening.evaluates:
            waits = CollectiveWaits(ddp, opening.shared_modules(), opening.around.page)
            stack.callback(waits.remove)
        self._make_room = opening.saver.make_room
        self._num_without_update = 0  # steps since the last boundary
        self._weights: TensorsLook | None = None  # as the last but one of those that are waited for has left them
        self._num_functions = [(name, t, count) for name, t in targets.items() if (count := _num_functions_of(t))]
        self.look_for_not_kept: Callable[[], None] = lambda: None
        """Called at boundary `not_kept_at`, which it moves on: looks for what changes in the training and is not
        kept."""
        self.not_kept_at = math.inf
        self._checks, self._loops = checks, loops

    def _begin_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        if self._unreduced is not None:
            self._unreduced.at_update(optimizer)
        gate, devices = self.gate, self._collector.devices
        if self.hidden.sample is not None and gate.state is _CLEAN and self.hidden.before_update():
            gate.unguarded = True  # a snapshot that is copied during the next forward would have both
        if self._unreduced is not None:  # several ranks
            devices.begin_update(gate.changed_since_boundary, is_long=fills_queue(optimizer))

    def is_inside_accumulation(self) -> bool:
        """Whether there are gradients without an update: the step that has ended is not a boundary."""
        gate = self.gate
        return gate.state is _CLEAN and self._accumulates and gate.window_open()

    def inside_window(self) -> None:
        """A step has ended inside of an accumulation window. Without torch's knowledge (``p.data -= ...``, C++) updates
        show nowhere: each step looks like a part of one window that never ends. So does one that an optimizer makes of
        new parameters, which the guard was not given. Raises UnmanagedStateError."""
        self._checks.inside_window()
        self._num_without_update += 1
        if self._num_without_update not in (_LONG_WINDOW - 1, _LONG_WINDOW):
            return
        weights = [p for p in self._collector.parameters if not isinstance(p, DTensor)]  # FSDP2 has them whole at times
        self._collector.devices.wait_for_update()  # a look reads from them
        before, self._weights = self._weights, TensorsLook.at(weights)
        if before is not None and before.has_moved(self._weights):
            self._unmanaged.hint(
                f"{_LONG_WINDOW} steps have left gradients, and no optimizer has stepped: they count as parts of one "
                "accumulation, and none of them can be saved",
                "Where weights are updated in each of them, change them in a torch.optim.Optimizer, or under "
                "torch.no_grad() without .data (p.sub_(...)) and clear the gradients",
            )

    def cut(self, position: Position, *, again: bool = False) -> None:
        """A step has ended at `position` with a state to resume from: copy the volatile state. `again`: once more,
        since code that belongs to the step has run. Raises UnmanagedStateError."""
        if not self._orders.are_complete and not again:
            self._orders.at_boundary()
        self.has_passed = True
        step = position.step  # as `is_close`, without a call
        closely = position.step_in_epoch == 1 or self.number < CLOSE_FIRST or (step + 1) % CLOSE_EVERY < 2
        if self._unreduced is not None and not again:
            self._unreduced.at_boundary(step, closely=closely)
        if not self.gate.pass_boundary(self._collector.copy, position, closely, closely=closely):
            logger.warning(
                "step %d: an optimizer.step() failed and the program went on; the state includes its partial update",
                step,
            )
        if self._collector.structure_is_new:
            self._refuse_new_structure()
        if self._collector.at_first_boundary is not None:
            self._collector.leave_head()
        hidden = self.hidden
        if closely or hidden.sample is not None:
            self.gate.unguarded |= hidden.at_boundary(step)
        if again:
            return
        number = self.number = self.number + 1
        self._num_without_update = 0
        self.times.append(time.monotonic())
        self.is_look = number <= FIRST_LOOKS or not number & (number - 1)
        if self.is_look and self._hooks.watched:
            self._hooks.look()
        if self._collector.compiled.is_new:
            self._tell_of_compiled()
        packs = number == 1 or self.gate.has_more_state or (self.is_look and number > FIRST_LOOKS)
        if packs or number >= self.not_kept_at:
            with without_collections():
                if packs:
                    self._pack_for_trial(refuses=number == 1)
                if number >= self.not_kept_at:
                    self.look_for_not_kept()
        self._loops.at_boundary(hidden.sample)
        checks = self._checks
        if self.is_look or checks.has_news or self._unmanaged.has_refused:
            checks.at_boundary(number, is_look=self.is_look)

    def _pack_for_trial(self, *, refuses: bool) -> None:
        """Make all of a file but its bytes: what no checkpoint can hold is found here, and not at the stop. `refuses`:
        else it warns, since to refuse late would throw away the steps that were done."""
        collector, self.gate.has_more_state = self._collector, False
        try:
            for component in collector.components.values():
                if isinstance(component, (OptimizerComponent, PlainComponent)):
                    component.check()
            with collector.devices.reading():
                _, tensors = flatten(collector.state())
            self._make_room(len(tensors))
            collector.layout()
        except UnsupportedStateError as error:
            if refuses:
                remedy = 'With unmanaged="warn" the training goes on, and no step of it can be saved'
                self._unmanaged.certain(f"no checkpoint can hold {error}", remedy)
            else:
                remedy = "Take it out of what the guard keeps, or keep it as tensors, numbers and texts"
                self._unmanaged.risk(f"no step can be saved any more: no checkpoint can hold {error}", remedy)

    def _tell_of_compiled(self) -> None:
        if found := self._collector.compiled.look():
            self._unmanaged.risk(
                f"torch.compile compiles {listed(found, 2)} for sizes or numbers that vary, in the order in which they "
                "come, and a resumed run meets them in another: it may differ in the last bits",
                "Give it batches of one size (drop_last=True, padding) or write torch.compile(..., dynamic=False); an "
                "optimizer whose step is compiled gets its rate as a tensor (lr=torch.tensor(0.1))",
            )

    def _refuse_new_structure(self) -> None:
        """The program has changed what it has built. Flags, masks and groups are made again from the checkpoint; the
        rest is refused when it happens, not when somebody needs the checkpoint."""
        self._collector.structure_is_new = False
        for problem in self._collector.problems:
            self._unmanaged.certain(
                f"{problem} since the guard was entered",
                "A resumed program builds the first model again and cannot load this. Build all parts before the guard "
                "is entered and switch them on by requires_grad or a flag of your own, or train the next phase under a "
                "guard with its own directory",
            )
        for name, scheduler, count in self._num_functions:
            if _num_functions_of(scheduler) != count:
                self._unmanaged.certain(
                    f"{name} has got a function for a new parameter group in mid-run, and functions are not saved",
                    "Give the scheduler one function for each group when it is made, with an empty group "
                    '({"params": []}) for those to come, or set that group\'s lr by hand',
                )
