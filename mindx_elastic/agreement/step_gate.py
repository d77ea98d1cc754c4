"""The step gate: the watcher holds the training thread at a boundary while the ranks agree on the stop step.

It costs the training thread one lock and one compare a step, in `arrive`.
"""

from __future__ import annotations

import threading

__all__ = ["StepGate"]

_NEVER = 1 << 62


class StepGate:
    """Counts boundaries and stops the training thread at `limit`.

    `arrive`, `enter_step` and `leave_step` belong to the training thread, the rest to any other thread.
    """

    def __init__(self, step: int = 0) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._step = step
        self._limit = _NEVER
        self._decided = True
        self._between = 0  # open blocks between two steps; nested, because an evaluation may save inside

    @property
    def step(self) -> int:
        return self._step

    @property
    def is_between(self) -> bool:
        """Whether the training thread is between two steps, where it may stay for long. Any thread."""
        return self._between > 0

    def arrive(self, step: int) -> bool:
        """Boundary `step` is reached. True: this is the limit, call `wait` before going on."""
        with self._lock:
            self._step = step
            return step >= self._limit

    def at_limit(self) -> bool:
        """Whether the training thread must stay at the last boundary. For code between two steps."""
        return self._step >= self._limit

    def leave_step(self) -> None:
        """The training thread is between two steps (an evaluation): it can stop at the last boundary."""
        with self._lock:
            self._between += 1

    def enter_step(self) -> bool:
        """The next step begins. True: the limit is the last boundary, call `wait`."""
        with self._lock:
            self._between -= 1
            return self._step >= self._limit

    def close(self) -> int:
        """Hold the training thread at the next boundary (or at this one, between steps). Returns that boundary."""
        with self._lock:
            self._limit = self._step if self._between else self._step + 1
            self._decided = False
            self._changed.notify_all()
            return self._limit

    def wait_for_limit(self, timeout_s: float) -> None:
        """Training thread, shortly before an alarm: wait until it has set a limit, at most `timeout_s` seconds."""
        with self._lock:
            self._changed.wait_for(lambda: self._limit != _NEVER, timeout_s)

    def open_until(self, limit: int | None) -> None:
        """Let the training thread run to boundary `limit`; None: without limit."""
        with self._lock:
            self._limit = _NEVER if limit is None else limit
            self._decided = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Training thread, at the limit: wait until it is decided. True: stop here; False: go on.

        Without a decision in `timeout_s` seconds the answer is True: stopping at a boundary is always safe.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: self._decided, timeout_s):
                return True
            return self._step >= self._limit
