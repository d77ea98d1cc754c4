"""The step gate: the watcher holds the training thread at a boundary while the ranks agree on the stop step.

It costs the training thread one lock and one compare a step, in `arrive`.

A pause is an agreed step at which the gate stays closed. A stop overrides it: its `close` and `open_until` end the
pause, and a training thread that waits in the pause offers the boundary at which it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["StepGate"]

_NEVER = 1 << 62


class StepGate:
    """Counts boundaries and stops the training thread at `limit`.

    `arrive`, `enter_step`, `leave_step` and `wait_out_pause` belong to the training thread, the rest to any other
    thread.
    """

    def __init__(self, step: int = 0) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._step = step
        self._limit = _NEVER
        self._decided = True
        self._between = 0  # open blocks between two steps; nested, because an evaluation may save inside
        self._paused = False  # the limit is that of a pause
        self._waits = False  # the training thread waits in `wait_out_pause`

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
            self._limit = self._coming()
            self._decided = self._paused = False
            self._changed.notify_all()
            return self._limit

    def _coming(self) -> int:
        return self._step if self._between or self._waits else self._step + 1

    def wait_for_limit(self, timeout_s: float) -> None:
        """Training thread, shortly before an alarm: wait until it has set a limit, at most `timeout_s` seconds."""
        with self._lock:
            self._changed.wait_for(lambda: self._limit != _NEVER, timeout_s)

    def open_until(self, limit: int | None) -> None:
        """Let the training thread run to boundary `limit`; None: without limit."""
        with self._lock:
            self._limit = _NEVER if limit is None else limit
            self._decided, self._paused = True, False
            self._changed.notify_all()

    # --- pauses ---

    def pause(self) -> int | None:
        """Hold the training thread as `close` does, for a pause. Returns the boundary; None: a stop has a limit."""
        with self._lock:
            if self._limit != _NEVER and not self._paused:
                return None
            self._limit = self._coming()
            self._decided, self._paused = False, True
            self._changed.notify_all()
            return self._limit

    def pause_at(self, limit: int) -> None:
        """The ranks have agreed: the training thread runs to boundary `limit` and waits there. Nothing after a stop."""
        with self._lock:
            if self._paused:
                self._limit = limit
                self._changed.notify_all()

    def resume(self) -> None:
        """End the pause: the training thread goes on. Nothing after a stop."""
        with self._lock:
            if self._paused:
                self._limit = _NEVER
                self._decided, self._paused = True, False
                self._changed.notify_all()

    def waits_at(self, step: int) -> bool:
        """Whether the training thread waits in a pause, at boundary `step` or a later one. Any thread."""
        with self._lock:
            return self._waits and self._paused and self._step >= step

    def wait_out_pause(self, tell: Callable[[], None]) -> bool:
        """Training thread, at the limit: wait as long as this boundary is the pause's. False: the program goes on;
        True: a stop has set a limit here. `tell` is called once the thread counts as waiting; it must not block."""
        with self._lock:
            self._waits = True
            try:
                tell()
                self._changed.wait_for(lambda: not self._paused or self._step < self._limit)
            finally:
                self._waits = False
            return self._step >= self._limit

    # --- the stop ---

    def wait(self, timeout_s: float) -> bool:
        """Training thread, at the limit: wait until it is decided. True: stop here; False: go on.

        Without a decision in `timeout_s` seconds the answer is True: stopping at a boundary is always safe.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: self._decided, timeout_s):
                return True
            return self._step >= self._limit
