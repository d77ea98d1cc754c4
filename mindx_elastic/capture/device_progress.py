"""How far the devices have come, and what they hold.

The program queues work on a CUDA device and goes on, so it may be several steps ahead of the device. A boundary is
reached when the device has done everything that was queued before it, which an event tells.

When another rank dies, the device may never get there: an all-reduce over NCCL that lacks a rank does not end, and
everything queued behind it waits, while the program has passed the step's boundary and perhaps the next one. The device
then still holds an older boundary, whole: weights and optimizer state change only in updates, and an update that waits
behind a collective has not begun. So two kinds of events are kept of the last boundaries: at the boundary, and before
the update that follows it. Together with the small state in host memory as it was then (`kept`) they give the newest
boundary that the device holds (`landed`).

The program may be two boundaries ahead, not more (`wait_for_older`): the boundary ring in shared memory holds four.
Training does not become slower by that, because a device with two steps in its queue has always something to do.

Rejected: to wait for the device before each update (it would be idle from the end of each backward until the program
has queued the update, and the next forward); a second copy of the weights on the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["DeviceProgress", "LandedBoundary"]

_KEPT = 4
_AHEAD = 2
_LOOK_S = 0.005


@dataclass
class LandedBoundary:
    """A boundary that the program has passed."""

    step: int
    kept: Any
    """The small state in host memory as it was then; see `Collector.kept`."""
    events: Sequence[Any]
    """One for each device: it has come to the boundary."""
    updates: Sequence[Any] = field(default_factory=list)
    """One for each device: it has come to the first update behind the boundary. Empty: the program has not."""

    @property
    def is_reached(self) -> bool:
        return all(event.query() for event in self.events)

    @property
    def is_left(self) -> bool:
        """Whether a device may have begun to change the weights after it."""
        return bool(self.updates) and any(event.query() for event in self.updates)


class DeviceProgress:
    """One per collector. `at_boundary`, `begin_update` and `wait_for_older` belong to the training thread; the rest may
    be called by any thread that holds the update gate."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """`cuda`: where events and streams come from."""
        self._cuda = cuda
        self._devices: list[torch.device] = []
        self._streams: dict[torch.device, Any] = {}
        self._boundaries: deque[LandedBoundary] = deque(maxlen=_KEPT)
        self.keeps_older = False
        """Other ranks' deaths can stop the device: keep what is needed to go back to an older boundary."""

    @property
    def is_used(self) -> bool:
        """Whether any of the job's parameters is on a CUDA device."""
        return bool(self._devices)

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        """From here on these are the parameters. Older boundaries had others and are forgotten."""
        self._devices = sorted({t.device for t in tensors if t.is_cuda}, key=str)
        self._boundaries.clear()
        for device in self._devices:  # now: a dying process should make none
            if device not in self._streams:
                self._streams[device] = self._cuda.Stream(device)

    def _mark(self) -> list[Any]:
        events = []
        for device in self._devices:
            event = self._cuda.Event()
            event.record(self._cuda.current_stream(device))
            events.append(event)
        return events

    def at_boundary(self, step: int, kept: Any) -> None:
        """The program has passed the boundary `step`."""
        if self._devices:
            if not self.keeps_older:
                self._boundaries.clear()
            self._boundaries.append(LandedBoundary(step, kept, self._mark()))

    def keep(self, kept: Any) -> None:
        """More has been added to the newest boundary."""
        if self._boundaries:
            self._boundaries[-1].kept = kept

    def begin_update(self) -> None:
        """An optimizer is about to queue its update. Before the update gate says so."""
        if self.keeps_older and self._boundaries and not self._boundaries[-1].updates:
            self._boundaries[-1].updates = self._mark()

    def wait_for_older(self) -> None:
        """Right behind a boundary: wait until the device is at most two boundaries behind the program."""
        if self.keeps_older and len(self._boundaries) > _AHEAD:
            for event in self._boundaries[-1 - _AHEAD].events:
                event.synchronize()

    @property
    def newest(self) -> LandedBoundary | None:
        """The newest boundary of the program; None: it has passed none since the start, or uses no device."""
        return self._boundaries[-1] if self._boundaries else None

    @property
    def is_here(self) -> bool:
        """Whether the devices have reached the newest boundary of the program. Raises RuntimeError as `landed`."""
        return self.newest is None or self.newest.is_reached

    def landed(self, waits: Callable[[], bool], *, has_updated: bool) -> LandedBoundary | None:
        """The newest boundary whose state the devices hold; None: they hold none.

        Waits for the newest one of the program for as long as ``waits()``. `has_updated`: the program has begun an
        update behind that. Raises RuntimeError where a device has failed.
        """
        while not self.is_here and waits():
            time.sleep(_LOOK_S)
        for boundary in reversed(self._boundaries):
            is_last = boundary is self.newest and not has_updated
            if boundary.is_reached and (is_last or not boundary.is_left):
                return boundary
        return None

    def go_back(self, boundary: LandedBoundary) -> None:
        """Forget the boundaries behind it: it is the newest one."""
        while self._boundaries and self._boundaries[-1] is not boundary:
            self._boundaries.pop()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, what this thread reads from the devices waits for the newest boundary, and for nothing that was
        queued behind it. The caller holds the update gate."""
        newest = self.newest
        with ExitStack() as stack:
            for device, event in zip(self._devices, newest.events if newest else (), strict=False):
                stream = self._streams[device]
                stream.wait_event(event)
                stack.enter_context(self._cuda.stream(stream))
            yield
