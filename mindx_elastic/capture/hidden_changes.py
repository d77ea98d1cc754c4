"""Weights that the training changes without torch's knowledge: ``p.data.mul_(...)``, code in C++ or CUDA.

No version counter moves and no optimizer steps, so the update gate takes the state for that of the last boundary when
it is not: a momentum encoder (MoCo, BYOL, DINO) that follows by ``.data`` in each forward has moved on when a peer
dies in the backward. Copies of all such weights at each boundary would cost their memory, so a few elements of each
parameter are compared:

=============================  ========================================================================================
after close boundaries         between the boundary and the first update after it: see `close_looks`
once something was found, or   elements are kept at every boundary
where no optimizer is named
at an epoch's end              elements are kept: code after it may exchange the weights for averaged ones
wherever elements are kept     the reader compares first: a state that has changed is not a boundary, as with
                               changes that are counted. A peer may die before the first update has shown anything
=============================  ========================================================================================

Most steps of a program that has none of this cost one comparison: whether there is a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindx_elastic.capture.close_looks import is_close
from mindx_elastic.capture.graph_replays import is_capturing
from mindx_elastic.capture.weight_samples import WeightSample, WeightSamples
from mindx_elastic.core.events import logger

__all__ = ["HiddenChanges"]


class HiddenChanges:
    """One per guard: those between a boundary and the next update. Training thread; `problem` in any."""

    def __init__(self, samples: WeightSamples, changes: Callable[[], str | None], *, are_likely: bool = False) -> None:
        """`changes`: what the version counters tell, as `UpdateGate.changed_since_boundary`. `are_likely`: the program
        updates without an optimizer, so no update shows them."""
        self._samples, self._changes = samples, changes
        self._are_likely = are_likely
        self.sample: Mapping[str, WeightSample] | None = None
        """As of the last boundary, where that was to be looked at."""
        self._boundaries = 0
        self.are_known = False
        """They were seen."""

    def watch(self) -> Mapping[str, WeightSample]:
        """Look at the boundary that was just copied as well. Returns the sample."""
        if self.sample is None:
            self.sample = self._samples.take()
        return self.sample

    def at_boundary(self, step: int) -> bool:
        """Boundary `step` has just been copied. Call it at close ones, and where there is a sample. Returns whether
        such changes were found just now, in a step in which no optimizer has stepped."""
        self._boundaries += 1
        is_due = self.are_known or self._are_likely or is_close(self._boundaries, step)
        before, self.sample = self.sample, self._samples.take() if is_due else None
        if self.are_known or before is None or self._samples.num_hidden(before, self.sample) == 0:
            return False
        self.are_known = True
        return True

    def before_update(self) -> bool:
        """The first optimizer after a boundary is about to step. Returns whether such changes were found just now."""
        if self.are_known or self.sample is None or is_capturing():
            return False
        num = 0 if self._changes() is not None else self._samples.num_hidden(self.sample)
        if num == 0:
            self.sample = None
            return False
        self.are_known = True
        logger.info(
            "%d parameters change in front of the step's update and without torch's knowledge (through .data, or by "
            "code in C++ or CUDA). A step that is cut off after that, by an exception or a killed peer, is not saved; "
            "periodic=... or snapshot_every=1 bounds what that costs",
            num,
        )
        return True

    def problem(self) -> str | None:
        """Why the live weights are not those of the last boundary, where a sample shows it; None: they may be."""
        sample = self.sample
        if sample is None or (num := self._samples.num_hidden(sample)) == 0:
            return None
        return f"{num} parameters were changed since the boundary without torch's knowledge (through .data, say)"
