"""Updates that move no version counter and run no optimizer's hook: ``p.data.add_(...)``, code in C++ or CUDA.

Where gradients are kept, each step of such a program looks like a part of one accumulation window, in which no run can
be resumed: nothing would ever be saved. So in a window of many steps some weights are compared from one step to the
next.
"""

from __future__ import annotations

from mindx_elastic.capture.collector import Collector
from mindx_elastic.guard.checks.movements import Movement, TensorsLook
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["UnseenUpdates"]

_LOOKS = frozenset((8, 64, 512, 4096))
"""Behind so many steps without an update, and behind the next one."""


class UnseenUpdates:
    """One per entered guard. Training thread."""

    def __init__(self, collector: Collector, unmanaged: Unmanaged) -> None:
        self._collector, self._unmanaged = collector, unmanaged
        self._num_steps = 0
        self._before: TensorsLook | None = None

    def at_step(self, *, is_inside: bool) -> None:
        """A step has ended. `is_inside`: with gradients, and without an update. Raises UnmanagedStateError."""
        if not is_inside:
            self._num_steps, self._before = 0, None
            return
        self._num_steps += 1
        if self._before is None and self._num_steps not in _LOOKS:
            return
        self._collector.devices.wait_for_update()  # a look reads from them
        before, now = self._before, TensorsLook.at(self._collector.parameters)
        self._before = now if before is None else None
        if before is not None and before.movement(now) is Movement.MOVED:
            self._unmanaged.certain(
                f"in {self._num_steps} steps no optimizer has stepped, there are gradients, and weights have changed "
                "without torch's knowledge (through .data, or by code in C++ or CUDA): each step looks like a part of "
                "one accumulation, and none can be saved",
                "Change weights under torch.no_grad() without .data (p.sub_(...)), or in a torch.optim.Optimizer",
            )
