"""How far the devices have come, and what they hold.

The program queues work on a CUDA device and goes on, so it may be several steps ahead of the device. A boundary is
reached when the device has done everything that was queued before it, which an event tells.

When another rank dies, the device may never get there: an all-reduce over NCCL that lacks a rank does not end, and
everything queued after it waits, while the program has passed the step's boundary and perhaps the next one. The device
then still holds an older boundary, whole: weights and optimizer state change only in updates, and an update that waits
after a collective has not begun. So two kinds of events are kept of the last boundaries: at the boundary, and before
the update that follows it. Together with the small state in host memory as it was then (`kept`) they give the newest
boundary that the device holds (`newest_held`).

So that the program is little ahead, it waits until the device has come to the update that led to its newest boundary
(`wait_for_update`). After a collective that never ends there is then little in the queue. CUDA's takes about a
thousand kernels, and where it is full, every call of CUDA stands still, also that of the thread that saves. Where a
forward is of few kernels (`forward_fits_queue`), the wait is at its end: the device has all of the forward to do
meanwhile. Else it is at the boundary, before the next forward. An optimizer that changes many parameters one after the
other fills the queue by itself; there the wait is before the update.

Rejected: to let the program be two boundaries ahead, for that reason; to wait before each update (the device would be
idle until the program has queued it); a second copy of the weights on the device. Not done: another process that maps
the device's memory and reads it, which no queue of this one would stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["DeviceProgress", "PassedBoundary", "fills_queue", "forward_fits_queue"]

_KEPT = 4
_FEW = 32
"""Parameters that an optimizer may change one after the other, some twenty kernels each."""
_KERNELS = 700
"""Leaves room in a queue of about a thousand for the update, and for what the boundary queues."""
_KERNELS_OF_MODULE = 4
_LOOK_S = 0.005


def fills_queue(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an update may have more kernels than a CUDA queue takes: it has many parameters, and changes each by
    itself."""
    if optimizer is None:
        return False
    options = optimizer.defaults
    together = options.get("fused") or ("foreach" in options and options["foreach"] is not False)
    return not together and sum(len(group["params"]) for group in optimizer.param_groups) > _FEW


def forward_fits_queue(modules: Iterable[nn.Module]) -> bool:
    """Whether what DDP queues after its collectives (a kernel for each parameter) and a forward, as far as the number
    of its layers tells, have few kernels."""
    parameters = layers = 0
    for module in modules:
        parameters += sum(1 for _ in module.parameters())
        layers += sum(1 for child in module.modules() if next(child.children(), None) is None)
    return parameters + _KERNELS_OF_MODULE * layers <= _KERNELS


@dataclass
class PassedBoundary:
    """A boundary that the program has passed."""

    step: int
    kept: Any
    """The small state in host memory as it was then; see `Collector.kept`."""
    events: Sequence[Any]
    """One for each device: it has come to the boundary."""
    updates: Sequence[Any] = field(default_factory=list)
    """One for each device: it has come to the first update after the boundary. Empty: the program has not."""
    is_changed: bool = False
    """The program has changed parameters by hand between the boundary and that update: no event marks it."""

    @property
    def is_reached(self) -> bool:
        return all(event.query() for event in self.events)

    @property
    def is_left(self) -> bool:
        """Whether a device may have begun to change the weights after it."""
        return self.is_changed or (bool(self.updates) and any(event.query() for event in self.updates))


class DeviceProgress:
    """One per collector. `follow`, `at_boundary`, `keep`, `begin_update`, `end_forward`, `end_step` and
    `wait_for_update` belong to the training thread; the rest may be called by any thread that holds the update gate."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """`cuda`: where events and streams come from."""
        self._cuda = cuda
        self._devices: list[torch.device] = []
        self.is_used = False
        """Whether some of the job's state is on a CUDA device."""
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._boundaries: deque[PassedBoundary] = deque(maxlen=_KEPT)
        self._held: PassedBoundary | None = None
        self._last_s = time.monotonic()
        self.step_s = 0.0
        """Between the last two boundaries of the program."""
        self.keeps_older = False
        """Other ranks' deaths can stop the device: keep what is needed to go back to an older boundary."""
        self.waits_in_forward = False
        """`end_forward` is called, and a forward has few kernels: the program need not wait at the boundary."""

    @property
    def device(self) -> torch.device | None:
        """The first device that holds some of the job's state; None: there is none."""
        return self._devices[0] if self._devices else None

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take `tensors` as the job's from now on. Older boundaries had others and are forgotten."""
        self._devices = sorted({t.device for t in tensors if t.is_cuda}, key=str)
        self.is_used = bool(self._devices)
        self._boundaries.clear()
        self._held = None
        for device in self._devices:  # now: a dying process should make none
            if device not in self._streams:
                # A dying save must not wait for a copier that waits for a boundary that never comes.
                self._streams[device] = self._cuda.Stream(device), self._cuda.Stream(device, priority=-1)

    def _mark(self) -> list[Any]:
        events = []
        for device in self._devices:
            event = self._cuda.Event(blocking=True)
            event.record(self._cuda.current_stream(device))
            events.append(event)
        return events

    def at_boundary(self, step: int, kept: Any) -> None:
        """The program has passed the boundary `step`, or copies it once more, after code that belongs to it."""
        if not self._devices:
            return
        newest = self.newest
        is_again = newest is not None and newest.step == step and not newest.updates
        if is_again:
            self._boundaries.pop()  # the coming update would mark only one of the two
        elif not self.keeps_older:
            self._boundaries.clear()
        self._boundaries.append(PassedBoundary(step, kept, self._mark()))
        self._held = None
        if not is_again:
            before, self._last_s = self._last_s, time.monotonic()
            self.step_s = self._last_s - before

    def keep(self, kept: Any) -> None:
        """More has been added to the newest boundary."""
        if (newest := self.newest) is not None:
            newest.kept = kept

    def begin_update(self, is_changed: Callable[[], object] = lambda: False, *, is_long: bool = False) -> None:
        """An optimizer is about to queue its update. Before the update gate says so. `is_changed`: whether parameters
        have changed since the boundary. `is_long`: the update may fill the queue (`fills_queue`); then this waits until
        the devices have come to it."""
        newest = self.newest
        if self.keeps_older and newest is not None and not newest.updates and not self._is_capturing():
            if self.waits_in_forward:
                self.wait_for_update()  # the program may have called its layers one by one
            newest.is_changed = bool(is_changed())
            newest.updates = self._mark()
            for event in newest.updates if is_long else ():
                event.synchronize()

    def end_forward(self) -> None:
        """A forward of the job's modules is queued."""
        if self.waits_in_forward and self.keeps_older:
            self.wait_for_update()

    def end_step(self) -> None:
        """All that belongs to the boundary is done, and the program goes on."""
        if not self.waits_in_forward:
            self.wait_for_update()

    def wait_for_update(self) -> None:
        """After a boundary: wait until the devices have come to the update that led there. The update itself, which
        may take long, is queued, and goes on meanwhile. Call it before anything that queues a lot, or waits for the
        device: after a collective that never ends it would fill the queue."""
        passed = tuple(self._boundaries)
        if self.keeps_older and len(passed) > 1 and not self._is_capturing():
            for event in passed[-2].updates:
                event.synchronize()

    def _is_capturing(self) -> bool:
        """Whether what the program queues goes into a CUDA graph, and is not done now."""
        return bool(self._cuda.is_current_stream_capturing())

    @property
    def newest(self) -> PassedBoundary | None:
        """The newest boundary of the program; None: it has passed none since the start, or uses no device."""
        passed = tuple(self._boundaries)
        return passed[-1] if passed else None

    def comes_here(self, timeout_s: float) -> bool:
        """Whether the devices have reached the newest boundary of the program, or reach it in `timeout_s` seconds."""
        newest, end = self.newest, time.monotonic() + timeout_s
        try:
            while newest is not None and not newest.is_reached:
                if time.monotonic() > end:
                    return False
                time.sleep(_LOOK_S)
        except RuntimeError:  # the device has failed
            return False
        return True

    def newest_held(self, waits: Callable[[], bool], *, has_updated: bool) -> PassedBoundary | None:
        """The newest boundary whose state the devices hold; None: they hold none.

        While ``waits()``, waits for the newest one of the program; or, if the program has begun an update after that
        (`has_updated`), for the devices to begin it, too: where they do not, they never will. Raises RuntimeError where
        a device has failed.
        """
        newest = self.newest
        if newest is None:
            return None
        with self._cuda.device(self._devices[0]):  # else this thread may bring another one to life
            while not (newest.is_left if has_updated else newest.is_reached) and waits():
                time.sleep(_LOOK_S)
            for boundary in reversed(tuple(self._boundaries)):
                is_last = boundary is newest and not has_updated
                if boundary.is_reached and (is_last or not boundary.is_left):
                    return boundary
        return None

    def hold(self, boundary: PassedBoundary | None) -> None:
        """Let `boundary` count from here on, until the program passes another one. None: the newest one."""
        self._held = boundary

    @property
    def has_gone_back(self) -> bool:
        """Whether an older boundary than the program's newest counts, or the newest though an update has begun."""
        return self._held is not None

    @property
    def still_holds(self) -> bool:
        """Whether what was read since `hold` is of that boundary: the device has not gone on."""
        return self._held is None or not self._held.is_left

    @contextmanager
    def reading(self, *, dying: bool = False) -> Iterator[None]:
        """Inside, what this thread reads from the devices waits for the boundary that counts, and for nothing that was
        queued after it. The caller holds the update gate. `dying`: nor for other readers."""
        boundary = self._held or self.newest
        with ExitStack() as stack:
            for device, event in zip(self._devices, boundary.events if boundary else (), strict=False):
                stream = self._streams[device][dying]
                stream.wait_event(event)
                stack.enter_context(self._cuda.stream(stream))
            yield
