"""Updates that move no version counter and run no optimizer's hook: ``p.data.add_(...)``, code in C++ or CUDA.

Where gradients are kept, each step of such a program looks like a part of one accumulation window, in which no run can
be resumed: nothing would ever be saved. So in a long window at the start some weights with gradients are compared from
one step to the next. Once a window has ended with an update that was seen, windows are what they seem to be.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from mindx_elastic.capture.collector import Collector
from mindx_elastic.guard.checks.movements import TensorsLook
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["UnseenUpdates"]

_LOOKS = frozenset((8, 64, 512, 4096))
"""Behind so many steps without an update, and behind the next one."""


class UnseenUpdates:
    """One per entered guard. Training thread."""

    def __init__(self, collector: Collector, unmanaged: Unmanaged) -> None:
        self._collector, self._unmanaged = collector, unmanaged
        self._num_steps = 0
        self.is_over = False
        """`at_step` has nothing left to do."""
        self._before: TensorsLook | None = None

    def at_step(self, *, is_inside: bool) -> None:
        """A step has ended. `is_inside`: with gradients, and without an update. Raises UnmanagedStateError."""
        if not is_inside:
            self.is_over = True
            return
        self._num_steps += 1
        if self._before is None and self._num_steps not in _LOOKS:
            return
        weights = [p for p in self._collector.parameters if p.grad is not None]
        if any(isinstance(each, DTensor) for each in weights):  # FSDP2 has them whole at times
            self.is_over = True
            return
        self._collector.devices.wait_for_update()  # a look reads from them
        before, now = self._before, TensorsLook.at(weights)
        self._before = now if before is None else None
        if before is not None and before.has_moved(now):
            self._unmanaged.certain(
                f"in {self._num_steps} steps no optimizer has stepped, there are gradients, and weights have changed "
                "without torch's knowledge (through .data, or by code in C++ or CUDA): each step looks like a part of "
                "one accumulation, and none can be saved",
                "Change weights under torch.no_grad() without .data (p.sub_(...)), or in a torch.optim.Optimizer",
            )
