"""Refuses a loop that never asks where it stands: after a resume it starts over, however far the training was.

What happens decides, wherever the loop is: in a function of the program, or in a trainer of a library.

==============================================================  ========================================================
the program has not asked the guard, and                        refused
==============================================================  ========================================================
no loader keeps a place (or one without an end does)            at the second boundary: the first one may be what asks
a named loader does                                             when a second pass over it begins: one goes on by itself
it asks within an epoch, with no loader, but after a step of it  told, when that epoch is resumed in its middle
it asks in front of a loop there that counts all the same        told, when the resumed epoch makes as many steps as a
                                                                whole one
an object of the program in ``stateful`` may have the count     never; the first steps of a resumed run show it
==============================================================  ========================================================

So it is within an epoch of ``guard.epochs()``, where ``guard.steps()`` does not count the steps. The state of the last
boundary is whole, and only the loop is at fault: it is saved, and the corrected program goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler

from mindx_elastic.guard.loops.followed_loader import FollowedLoader
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["OwnLoop"]

_COUNTS = ", for it counts by itself"
_ASK = (
    "Loop over guard.epochs(number) or guard.steps(number), or begin with guard.step. A program that keeps its count "
    "in an object of stateful= reads guard.step once before the loop. Where a trainer of a library keeps the loop, "
    'write Guard(stateful={"trainer": trainer}, ...), or mx.attributes(trainer, "epoch", ...) with its counters if it '
    "has no state_dict, or give it what is left, by guard.position.epoch"
)
_ASK_INSIDE = (
    "Write for step in guard.steps(number, start=0): there, inside the loop over guard.epochs(); for a list of "
    "batches, batches = mx.data.from_loader(batches) and Guard(loader=batches, ...); for several passes, loop over "
    "guard.epochs(epochs * passes), with one pass in each"
)


class OwnLoop:
    """One per guard. Training thread."""

    def __init__(self, targets: Mapping[str, object]) -> None:
        """`targets`: what the guard keeps."""
        self.may_know = any(_may_count(name, target) for name, target in targets.items())
        """An object of the program that is kept may have the count."""

    def refuse(self, unmanaged: Unmanaged) -> None:
        """The program has not asked, and its loop goes on. Raises UnmanagedStateError."""
        unmanaged.certain(
            f"the loop starts over after a resume{_COUNTS}: the program has not asked the guard where it stands",
            _ASK,
            saves=True,
        )

    def refuse_inside(self, unmanaged: Unmanaged) -> None:
        """The same within an epoch. Raises UnmanagedStateError."""
        unmanaged.certain(
            "the loop inside of guard.epochs() starts over when its epoch is resumed in the middle" + _COUNTS,
            _ASK_INSIDE,
            saves=True,
        )

    def tell_of_epoch(self, unmanaged: Unmanaged) -> None:
        """A resumed run has done a step of its epoch's rest before it asked, to log or to end the loop, or all the
        steps of the epoch once more."""
        if not self.may_know:
            unmanaged.risk(
                f"the loop inside of guard.epochs() has started the resumed epoch over{_COUNTS}", _ASK_INSIDE
            )


def _may_count(name: str, target: object) -> bool:
    if name.startswith(("model", "optimizer", "lr_scheduler", "scaler")):
        return False
    known = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.Generator, FollowedLoader)
    library = type(target).__module__.partition(".")[0]
    return not isinstance(target, known) and library not in ("torch", "numpy", "random", "mindx_elastic")
