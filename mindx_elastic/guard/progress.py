"""Notes losses of rank 0 on its status page for the agent, which keeps them for `mindx-elastic report`.

At most one in `_GAP_NS` is noted: the agent looks twice a second, and a fast loop pays a look at the clock and a
compare. Nothing waits for a device: of a loss on a GPU a copy to the host is begun, and a later boundary notes it once
that is done.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import StatusPage

__all__ = ["Progress"]

_GAP_NS = 10**8


class Progress:
    """One per process. Training thread."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._due_ns = 0
        self._step = -1
        self._is_broken = False
        self._host: Tensor | None = None
        self._copied: Any = None
        self._copy_of: tuple[int, int] | None = None
        """Step and time of the loss that is on its way to the host."""

    def at_boundary(self, step: int, loss: object) -> None:
        """`loss`: what the program gave for this step; anything that is not a number counts as nothing."""
        if self._is_broken or (loss is None and self._copy_of is None):
            return
        try:
            now = time.monotonic_ns()
            if (self._copy_of is not None and not self._note_copied()) or now < self._due_ns or step == self._step:
                return
            self._step = step
            if type(loss) is Tensor and loss.is_cuda:
                self._begin_copy(step, now, loss)
            elif (value := _number(loss)) is not None:
                self._note(step, now, value)
        except Exception as error:  # of the device, or the program's own kind of number
            self._is_broken = True
            logger.warning(
                "the loss that step_end(loss=...) was given cannot be read for mindx-elastic report (%s: %s); the "
                "training is not changed by that",
                type(error).__name__,
                error,
            )

    def _note(self, step: int, clock_ns: int, loss: float) -> None:
        self._due_ns = clock_ns + _GAP_NS
        self._page.note_loss(step, clock_ns, loss)

    def _begin_copy(self, step: int, now: int, loss: Tensor) -> None:
        if not _is_one(loss):
            return
        if self._host is None:
            self._host = torch.zeros((), dtype=torch.float32, pin_memory=True, device="cpu")
            self._copied = torch.cuda.Event()
        with torch.cuda.device(loss.device):
            self._host.copy_(loss.detach().reshape(()), non_blocking=True)
            self._copied.record()
        self._copy_of = step, now

    def _note_copied(self) -> bool:
        """Whether the loss has come to the host."""
        assert self._copy_of is not None and self._host is not None
        if not self._copied.query():
            return False
        self._note(*self._copy_of, self._host.item())
        self._copy_of = None
        return True


def _number(loss: Any) -> float | None:
    kind: Any = type(loss)
    if kind is bool or not hasattr(kind, "__float__"):
        return None
    if issubclass(kind, Tensor) and not (kind is Tensor and loss.device.type == "cpu" and _is_one(loss)):
        return None
    return float(loss.item() if kind is Tensor else loss)


def _is_one(loss: Tensor) -> bool:
    return loss.numel() == 1 and not loss.is_complex()
