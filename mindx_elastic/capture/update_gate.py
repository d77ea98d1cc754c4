"""The update gate: says whether the live parameters and optimizer state are those of the last boundary.

========  ================================================================================================
CLEAN     nothing has stepped since the boundary: live stable state + volatile copy = the boundary, exactly
UPDATING  an ``optimizer.step()`` runs, or was cut off by an exception
DIRTY     one has run and the boundary is not reached yet (second optimizer, EMA)
========  ================================================================================================

Whoever reads live state holds the gate; ``optimizer.step()`` waits for it. Forward and backward do not.

Torch's optimizer hooks are global (`register_optimizer_step_pre_hook`), so an optimizer that nobody told us about is
seen too, and one that steps inside backward. An update without any optimizer (``with torch.no_grad(): p -= ...``) shows
in the parameters' version counters, which are compared before and after a read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["GateState", "UpdateGate"]

_COPY_S = 600.0  # the first copy of a large state, into memory that was never touched, is slow


class GateState(Enum):
    """See the module's table."""

    CLEAN = "live state is the last boundary"
    UPDATING = "an optimizer step is in progress"
    DIRTY = "updated, boundary not reached"


class UpdateGate:
    """One per guard.

    `begin_update`, `end_update` and `pass_boundary` run in the thread that updates, `hold` anywhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clean = threading.Condition(self._lock)
        self._waiters = 0
        self._hopeless = False
        self._state = GateState.CLEAN
        self._running = 0
        self.waited_s = 0.0
        """How long updates have waited for copies so far, in seconds."""
        self.unguarded = False
        """The program has updated parameters without an optimizer: no hook tells, so nothing waits at this gate."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._parameters: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []

    @property
    def state(self) -> GateState:
        return self._state

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Install the optimizer hooks and remember whose version counters to compare."""
        self._parameters = parameters
        self._versions = [p._version for p in parameters]
        self._handles = [
            register_optimizer_step_pre_hook(lambda *_: self.begin_update()),
            register_optimizer_step_post_hook(lambda *_: self.end_update()),
        ]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_update(self) -> None:
        """Waits while somebody holds the gate."""
        if not self._lock.acquire(blocking=False):
            began = time.perf_counter()
            self._lock.acquire()
            self.waited_s += time.perf_counter() - began
        try:
            self._running += 1
            self._state = GateState.UPDATING
        finally:
            self._lock.release()

    def end_update(self) -> None:
        with self._lock:
            # Several at once: optimizers in backward run on autograd's device threads.
            self._running = max(0, self._running - 1)
            if self._running == 0:
                self._state = GateState.DIRTY

    def pass_boundary(self, copy_volatile: Callable[[], None]) -> bool:
        """The boundary is reached: copy the volatile state and be clean.

        Returns False when an update that began never ended (an exception inside ``optimizer.step()`` that the program
        swallowed): the caller says so, the program has chosen to go on from there.
        """
        with self._lock:
            torn = self._running > 0
            copy_volatile()
            self._running = 0
            versions = [p._version for p in self._parameters]
            self.unguarded |= self._state is GateState.CLEAN and versions != self._versions
            self._state = GateState.CLEAN
            self._versions = versions
            if self._waiters:
                self._clean.notify_all()
            return not torn

    def give_up(self) -> None:
        """The training thread has failed: no boundary will come, nobody need wait for one. Any thread."""
        with self._lock:
            self._hopeless = True
            self._clean.notify_all()

    def lend(self) -> None:
        """Training thread, right after a boundary: close the gate for a copy that another thread makes.

        `give_back` must follow, in any thread. The next update, and the next boundary, wait for it.
        """
        self._lock.acquire()

    def give_back(self) -> None:
        """The copy that `lend` was for is complete. Any thread."""
        self._lock.release()

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[str | None]:
        """Hold the gate while it is clean. Yields None, or why the live state is not the last boundary.

        Waits up to `timeout_s` seconds for an update in progress to reach its boundary, and for a copy in progress as
        long as such a thing may take.
        """
        end = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(_COPY_S, timeout_s)):
            yield "another capture holds the update gate"
            return
        try:
            self._waiters += 1
            try:
                while self._state is not GateState.CLEAN:
                    left = end - time.monotonic()
                    if left <= 0 or self._hopeless or not self._clean.wait(left):
                        break
            finally:
                self._waiters -= 1
            yield self._why_not_clean()
        finally:
            self._lock.release()

    def window_open(self) -> bool:
        """Whether gradients wait for an update that has not come since the boundary (gradient accumulation)."""
        if self._state is not GateState.CLEAN or self.changed_since_boundary():
            return False
        return any(p.grad is not None for p in self._parameters)

    def changed_since_boundary(self) -> str | None:
        """Names the fact that parameters were changed outside any optimizer, else None. Call it holding the gate."""
        now = [p._version for p in self._parameters]
        if now == self._versions:
            return None
        count = sum(a != b for a, b in zip(now, self._versions, strict=True))
        return f"{count} parameters were changed in place since the boundary, outside any optimizer"

    def _why_not_clean(self) -> str | None:
        if self._state is GateState.UPDATING:
            return "an optimizer.step() was in progress or failed half-way"
        if self._state is GateState.DIRTY:
            return "an optimizer had stepped and the boundary was not reached"
        return self.changed_since_boundary()
