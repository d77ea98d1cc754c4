"""The update gate: says whether the live parameters and optimizer state are those of the last boundary.

========  ================================================================================================
CLEAN     nothing has stepped since the boundary: live stable state + volatile copy = the boundary, exactly
UPDATING  an ``optimizer.step()`` runs, or was cut off by an exception
DIRTY     one has run and the boundary is not reached yet (second optimizer, EMA)
PASSING   the boundary is reached and its volatile state is being copied (or the copy has failed)
========  ================================================================================================

It is a readers/writer gate. Readers: the copy of a snapshot (`lend`, `give_back`) and a save (`hold`). Writers:
``optimizer.step()`` (`begin_update`) and the boundary (`pass_boundary`). Forward and backward are neither.

================  =========================  ==============================  ==================================
call              no reader, CLEAN           readers, CLEAN                  UPDATING, DIRTY, PASSING
================  =========================  ==============================  ==================================
`hold`            reads                      reads with them, at once        waits for CLEAN up to its time-out, then
                                                                             reads with the reason why it is not
`lend`            reads                      reads with them                 (the training thread asks at a boundary)
`begin_update`    UPDATING                   waits for the readers           UPDATING, after the readers
`pass_boundary`   PASSING, then CLEAN        waits for the readers           PASSING, then CLEAN, after the readers
================  =========================  ==============================  ==================================

A reader never waits for a waiting writer: a dying save must read during a slow copy, ahead of the training thread
that waits for the same copy. The writer does not starve, because few readers can come while it waits. The thread that
takes snapshots and saves between steps is the waiting one itself, so there is the copy that it lent to, and the one
save of a stop.

No thread keeps the lock for longer than a few assignments, or while it waits. So a thread that is stuck while it reads
holds up the writers, which it must, and no reader.

Torch's optimizer hooks are global (`register_optimizer_step_pre_hook`), so the gate also sees optimizers that were not
given to the guard, and those that step inside backward. An update without any optimizer
(``with torch.no_grad(): p -= ...``) shows in the parameters' version counters, which are compared before and after a
read (`version_counters`).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mindx_elastic.capture.version_counters import VersionCounters, state_tensors

__all__ = ["GateState", "UpdateGate"]

_state_of = attrgetter("state")


class GateState(Enum):
    """See the module's table."""

    CLEAN = "live state is the last boundary"
    UPDATING = "an optimizer step is in progress"
    DIRTY = "updated, boundary not reached"
    PASSING = "the boundary is being copied"


class UpdateGate:
    """One per guard.

    `begin_update`, `end_update` and `pass_boundary` run in the thread that updates, `hold` anywhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._readers = self._writers = self._waiters = 0
        self._hopeless = False
        self.state = GateState.CLEAN
        self._running = 0
        self._updates = 0  # since the boundary; see `VersionCounters.look`
        self._is_there = False  # the program has not gone on since the boundary
        self._before = GateState.CLEAN  # what `perhaps_updating` goes back to
        self.waited_s = 0.0
        """How long updates have waited for copies so far, in seconds."""
        self.unguarded = False
        """The program has updated parameters without an optimizer: no hook runs then, so no update waits here."""
        self.before_update: Callable[[], None] | None = None
        """Called in the updating thread before an optimizer steps. What it raises leaves the gate as it is."""
        self.on_update: Callable[[torch.optim.Optimizer | None], None] = lambda optimizer: None
        """Called in the updating thread right before the gate says that an optimizer steps, with it if it is known."""
        self.expected: set[int] = set()
        """The `id` of optimizers of which `at_stranger` need not be told."""
        self.at_stranger: Callable[[torch.optim.Optimizer], None] | None = None
        """Called in the updating thread after each step of an optimizer that is not in `expected`."""
        self.named: Collection[int] = ()
        """The `id` of the optimizers that the guard was given: each of their steps is an update."""
        self.others: Callable[[], str | None] | None = None
        """In an evaluation, and after one that has not put them back, until the next boundary: says that the
        parameters hold other weights now, which no version counter need show."""
        self.hidden: Callable[[], str | None] | None = None
        """Says that parameters have changed since the boundary without torch's knowledge, where that is looked at."""
        self.has_more_state = False
        """An optimizer has state for more parameters than ever at a boundary before; reset by the reader."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._parameters: Sequence[torch.Tensor] = ()
        self._ids: frozenset[int] = frozenset()  # theirs
        self._versions = VersionCounters(lambda: self._parameters)
        self._states: list[VersionCounters] = []
        self._counters = [self._versions]  # and these
        self._optimizers: list[Any] = []  # theirs
        self._num_states = 0

    def watch(self, parameters: Sequence[torch.Tensor], optimizers: Iterable[Any] = ()) -> None:
        """Install the optimizer hooks and remember whose version counters to compare. `optimizers`: those that the
        guard was given; from here on they are `named`."""
        optimizers = list(optimizers)
        self.named = frozenset(map(id, optimizers))
        self._optimizers = [o for o in optimizers if isinstance(getattr(o, "state", None), dict)]
        self._states = [VersionCounters(partial(state_tensors, o)) for o in self._optimizers]
        self._num_states = sum(map(len, map(_state_of, self._optimizers)))
        self.follow(parameters)
        self._handles = [
            register_optimizer_step_pre_hook(self.begin_update),
            register_optimizer_step_post_hook(self._stepped),
        ]
        _watching.add(self)

    def leave_uncompiled(self) -> None:
        """Compiling ``optimizer.step``, dynamo would compile its hooks and all that they call. Call it before that,
        and only where something is compiled: each call of a hook takes 3 us longer."""
        for handle in self._handles:
            hooks: Any = handle.hooks_dict_ref()
            hooks[handle.id] = torch.compiler.disable(hooks[handle.id])

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take these as the parameters from now on: some were replaced, added or removed. At a boundary."""
        self._parameters, self._ids = parameters, frozenset(map(id, parameters))
        self._versions = VersionCounters(lambda: parameters)
        self._counters = [self._versions, *self._states]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _watching.discard(self)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        key = id(optimizer)
        if key not in self.expected and self.at_stranger is not None:
            self.at_stranger(optimizer)
        if key in self.named or self._is_ours(optimizer):
            self.end_update(key)

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Of one that is not `named`: it is not one of something else (a probe that is trained in an evaluation), whose
        steps tear nothing."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def begin_update(self, optimizer: torch.optim.Optimizer | None = None, *_: object) -> None:
        """An optimizer is about to step. Waits for the readers."""
        if optimizer is not None and id(optimizer) not in self.named and not self._is_ours(optimizer):
            return
        if self.before_update is not None:
            self.before_update()
        self.on_update(optimizer)
        with self._lock:
            if self._readers:
                self._wait_for_readers()
            self._running += 1
            self.state = self._before = GateState.UPDATING

    def end_update(self, which: int = 1) -> None:
        """An optimizer has stepped: `which`, by a number of its own."""
        with self._lock:
            # Several at once: optimizers in backward run on autograd's device threads.
            self._running = max(0, self._running - 1)
            self._updates += which
            self._before = GateState.DIRTY
            if self._running == 0:
                self.state = GateState.DIRTY

    @contextmanager
    def perhaps_updating(self) -> Iterator[None]:
        """Around what may be an update, which is not known yet: as in one, no thread reads inside, and the readers are
        waited for. Any thread that updates; several at once."""
        with self._lock:
            if self._readers:
                self._wait_for_readers()
            if self._running == 0:
                self._before = self.state
            self._running += 1
            self.state = GateState.UPDATING
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if self._running == 0 and self.state is GateState.UPDATING:
                    self.state = self._before
                if self._waiters:
                    self._changed.notify_all()

    def pass_boundary(self, copy_volatile: Callable[..., None], *args: object, closely: bool = True) -> bool:
        """The boundary is reached: copy the volatile state (with `args`) and be clean. Waits for the readers.
        `closely`: see `close_looks`.

        Returns False when an update that began never ended (the program swallowed an exception inside
        ``optimizer.step()``): the caller warns, since the program has chosen to go on from there. An exception in
        `copy_volatile` leaves the gate not clean: half of the copy may be the last boundary's.
        """
        with self._lock:
            if self._readers:
                self._wait_for_readers()
            torn = self._running > 0
            before, self.state = self.state, GateState.PASSING
        if before is GateState.CLEAN and not self.unguarded:
            self.unguarded = self._versions.num_changed() > 0
        updates, self._updates = self._updates, 0
        if (count := sum(map(len, map(_state_of, self._optimizers)))) > self._num_states:
            # More is trained than before (a new group, a layer that is no longer frozen): no step like the others.
            self._num_states, self.has_more_state, closely = count, True, True
        for counters in self._counters:
            if counters.is_regular and not closely and counters.updates == updates:
                counters.steps += 1  # without a call, as at each boundary
            else:
                counters.look(updates)
        copy_volatile(*args)  # runs code of the program (`state_dict`), so not under the lock
        with self._lock:
            self._running = 0
            self.state, self.others, self._is_there = GateState.CLEAN, None, True
            if self._waiters:
                self._changed.notify_all()
        return not torn

    def leave_boundary(self) -> None:
        """The program goes on."""
        with self._lock:
            self._is_there = False

    def pass_unknown(self) -> None:
        """A step has ended, and its boundary cannot be told: what the steps up to the next one do is not compared."""
        with self._lock:
            self._updates = 0
            for counters in self._counters:
                counters.read()

    def _wait_for_readers(self) -> None:
        began = time.perf_counter()
        self._writers += 1
        try:
            while self._readers:
                self._changed.wait()
        finally:
            self._writers -= 1
            self.waited_s += time.perf_counter() - began

    def give_up(self) -> None:
        """The training thread has failed: stop waiting for a boundary. Any thread."""
        with self._lock:
            self._hopeless = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Right before a copy that the training thread makes itself, at a boundary: the counters are read there."""
        with self._lock:
            self._settle()

    def lend(self) -> None:
        """Begin to read for a copy that another thread makes. Training thread, right after a boundary.

        `give_back` must follow, in any thread. The next update and the next boundary wait for it.
        """
        with self._lock:
            self._settle()
            self._readers += 1

    def _settle(self) -> None:
        """With the lock. What the counters are at the boundary need not be worked out while the program is there."""
        if self._is_there:
            for counters in self._counters:
                if counters.steps:
                    counters.read()

    def give_back(self) -> None:
        """The copy that `lend` was for is complete. Any thread."""
        with self._lock:
            self._readers -= 1
            if self._writers and not self._readers:
                self._changed.notify_all()

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[str | None]:
        """Read while the state is clean, with other readers. Yields None, or why it is not the last boundary.

        Waits up to `timeout_s` seconds for an update in progress to reach its boundary. Any thread. No update begins
        and no boundary is passed inside, whatever was yielded.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            self._waiters += 1
            try:
                while self.state is not GateState.CLEAN:
                    left = end - time.monotonic()
                    if left <= 0 or self._hopeless or not self._changed.wait(left):
                        break
            finally:
                self._waiters -= 1
            self._readers += 1
            if self.state is GateState.CLEAN:
                self._settle()
            problem = self._why_not_clean()
        try:
            for look in (self.others, self.hidden):
                if problem is None and look is not None:
                    problem = look()  # not under the lock: it may wait for a device
            yield problem
        finally:
            self.give_back()

    def window_open(self) -> bool:
        """Whether there are gradients and no update since the boundary (gradient accumulation). What has no gradient
        may have changed: the weights of a momentum encoder follow in each forward."""
        if self.state is not GateState.CLEAN:
            return False
        has_gradients = False
        for parameter, version in zip(self._parameters, self._versions.versions, strict=True):
            if parameter.grad is not None:
                if parameter._version != version:
                    return False
                has_gradients = True
        return has_gradients

    def is_clean(self) -> bool:
        """Whether the live state is that of the last boundary, as far as hooks and counters tell. Training thread."""
        return self.state is GateState.CLEAN and self.changed_since_boundary() is None

    def accept_changes(self) -> None:
        """The parameters were changed in place since the boundary, and are as before. Training thread."""
        with self._lock:
            if self.state is GateState.CLEAN:
                self._versions.read()

    def changed_since_boundary(self) -> str | None:
        """A text if parameters, or the state of optimizers, were changed outside of any optimizer, else None. Call it
        holding the gate."""
        if count := self._versions.num_changed():
            uneven = ", or updated otherwise than in the steps before" if self._versions.steps else ""
            return f"{count} parameters were changed in place since the boundary, outside any optimizer{uneven}"
        if count := sum(states.num_changed() for states in self._states):
            return f"{count} values of the optimizers' state were changed since the boundary, outside their steps"
        return None

    def why_changed(self) -> str | None:
        """As `changed_since_boundary`, and what `hidden` finds. Any thread that keeps updates away."""
        problem = self.changed_since_boundary()
        return self.hidden() if problem is None and self.hidden is not None else problem

    def _why_not_clean(self) -> str | None:
        if self.state is GateState.UPDATING:
            return "an optimizer.step() was in progress or failed half-way"
        if self.state is GateState.DIRTY:
            return (
                "an optimizer had stepped and the boundary was not reached (call step_end() right after the step's "
                "updates, and log after it)"
            )
        if self.state is GateState.PASSING:
            return "the boundary was being copied, or its copy failed"
        return self.changed_since_boundary()


_watching: weakref.WeakSet[UpdateGate] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Free a forked child's optimizers from the gate.

    The child has none of the reading threads, and perhaps a lock that one of them held. Its weights are not saved.
    """
    for gate in list(_watching):
        gate._lock = threading.Lock()
        gate._changed = threading.Condition(gate._lock)
        gate._readers = gate._writers = gate._waiters = 0
        gate.unwatch()


os.register_at_fork(after_in_child=_after_fork_in_child)
