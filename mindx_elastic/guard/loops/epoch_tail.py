"""The end of an epoch: where the job stops, for the code after its inner loop (the *tail*) belongs to it.

Such code reads what the inner loop has set, and a run that is resumed at the last boundary of an epoch comes to it
without a batch. So that boundary is copied as any other, for an exception or a deadline; but the usual stop, snapshots
and periodic saves wait until the tail has run. The boundary is then copied again, with the news that nothing is left of
its epoch, and a resumed run begins with the next one. A kill does not wait, and neither does a stop in
`guard.outside_step`: the boundary in front of the tail has the values that the epoch has set (`tail_values`).

==========================================  ============================================================================
the last batch of an epoch is known         the stop
==========================================  ============================================================================
with it (the loader knows its length, or    waits for the end of the tail
the epoch is a loop over `guard.steps`)
when the next one is asked for              waits for that; if there is a batch, the job stops at the boundary before it
==========================================  ============================================================================

A second pass within the epoch, or a break out of both loops, ends the wait as well: at the next boundary, or at the end
of the block.

A boundary that is copied again keeps the small state in front of the tail as well, until the next one: a rank that was
killed in its tail resumes in front of it, and the tail may have collectives. Then all ranks go back (`tail_side`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.copying import same_tree
from mindx_elastic.capture.hidden_changes import HiddenChanges
from mindx_elastic.capture.loop_tail import CHANGES_WEIGHTS, FRONT, OVER, VALUES, without_end
from mindx_elastic.capture.weight_samples import WeightSample, WeightSamples
from mindx_elastic.core.events import logger
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.loops.tail_values import EpochValues, put_back_values

__all__ = ["EpochTail"]


class EpochTail:
    """One per guard. Training thread only."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders
        self.is_pending = False
        """The last boundary is the last one of its epoch, and its tail has yet to run."""
        self.layer_waits = False
        """The layer above, which keeps the loop itself, has such code of the program's."""
        self._epoch_values: EpochValues | None = None
        self._values: Mapping[str, Any] = {}  # of the resumed boundary
        self._kept_values: Mapping[str, Any] = {}  # of the last boundary, as far as it ends its epoch
        self._has_told = self._has_kept = False
        self.may_go_on = False
        """The epoch of the last boundary may have ended with it, which only the next batch tells."""

    def enter(
        self,
        collector: Collector,
        *,
        is_alone: bool,
        hidden: HiddenChanges,
        stop: Callable[[], None],
        after: Callable[[], None],
        keep_again: Callable[[bool], None],
    ) -> None:
        """`is_alone`: there are no other ranks. `hidden`: watches the weights. `stop`: stops the job at the last
        boundary, after code that has fetched a batch. `after`: the tail has run, copy its boundary again. `keep_again`:
        the boundary was kept somewhere without what its tail reads; is told whether the end was foreseen, so that
        snapshots and saves wait for the tail."""
        self._collector, self._samples = collector, WeightSamples(collector)
        self.is_alone, self._hidden = is_alone, hidden
        self._stop, self._after, self._keep_again = stop, after, keep_again
        self.is_pending = False
        self._weights_in_front: Mapping[str, WeightSample] = {}
        collector.before_keeping = self.before_keeping
        self._loaders.at_unforeseen_end(self._is_at_end)

    def resume(self) -> None:
        """The epoch of the resumed boundary comes once more, or none."""
        self._values = self._collector.loop.get(VALUES) or {}

    def begin_loop(self, values: EpochValues | None) -> None:
        """A loop over epochs begins. `values`: what finds the changes; None: the layer above keeps the loop."""
        self._epoch_values = values

    def at_boundary(self, frame: FrameType, *, ends: bool | None = None) -> None:
        """A boundary within an epoch has been copied. `ends`: whether its step is the last one, where a loop over
        ``guard.steps(n)`` makes the epoch; None: the first loader does."""
        self.is_pending = self.may_go_on = self._has_kept = False
        self._values = self._kept_values = {}
        at_end, is_foreseen = self._loaders.at_end_of_epoch() if ends is None else (ends, True)
        waits = self._epoch_values is not None or self.layer_waits
        self.may_go_on = not is_foreseen and waits
        if at_end and waits:
            self._wait()
            self._keep_values(frame)

    def before_keeping(self) -> None:
        """The boundary is to be kept, and may turn out to be the last of its epoch."""
        if self.may_go_on and not self.is_pending and not self._has_kept:
            self._has_kept = True
            self._keep_values(sys._getframe(1))

    def _keep_values(self, frame: FrameType) -> bool:
        """Returns whether the boundary has got other values than it had."""
        if self._epoch_values is None or not (values := self._epoch_values.changed(frame)):
            return False
        before, self._kept_values = self._kept_values, values
        self._collector.add_to_boundary({VALUES: values})
        return not same_tree(before, values)

    def _wait(self) -> None:
        if not self.is_pending:
            self.is_pending = True
            # The tail may exchange the weights for averaged ones, and no boundary has these.
            self._weights_in_front = self._hidden.watch()

    def pass_step(self) -> None:
        """Another step has ended, or the tail, or another epoch begins."""
        self.is_pending = self.may_go_on = False

    def holds_stop(self) -> bool:
        """Call it at a boundary where the job is to stop. Whether it goes on for now."""
        if not self.is_pending and self.may_go_on:
            self.before_keeping()
            self._wait()
            self._loaders.at_next_batch(self._at_batch)
        if self.is_pending and not self._has_told:
            self._has_told = True
            logger.info(
                "at an epoch's end the job stops after the code that follows the loop over the batches, or, where the "
                "data goes on, at the next batch, as far as the time allows"
            )
        return self.is_pending

    def _at_batch(self) -> None:
        """There is another batch: the boundary was not the last of its epoch."""
        if self.is_pending:
            self.is_pending = False
            self._stop()

    def see_last_step(self, frame: FrameType) -> None:
        """A loop over ``guard.steps(n)`` that makes the epoch is over: code after `step_end` may have counted the last
        step."""
        if self.is_pending:
            self._keep_values(frame)

    def _is_at_end(self) -> None:
        """There is no other batch, and the boundary was the last of its epoch."""
        is_unforeseen = self.may_go_on
        if is_unforeseen:
            self._wait()
        if self._values:
            self.put_back(sys._getframe(1))
        # Code after `step_end` may have counted the last step, or bound the loss that a function with `step_end` gives.
        is_other = self._keep_values(sys._getframe(1))
        if is_unforeseen or (is_other and self.is_pending):
            self._keep_again(not is_unforeseen)

    def put_back(self, frame: FrameType) -> None:
        """The values of the resumed boundary are needed now."""
        values, self._values = self._values, {}
        if values:
            put_back_values(frame, values)

    # --- what a checkpoint says ---

    def pass_tail(self, epoch: int, *, pass_boundary: Callable[[], None] | None = None, is_left: bool = False) -> None:
        """The tail has run: nothing is left of `epoch`, and its last boundary is here. `pass_boundary`: its last step
        was no boundary before; else that is copied again. `is_left`: the tail has ended the training."""
        self.pass_step()
        collector = self._collector
        if collector.is_other_model():  # made ready for an export: the boundary stays as it was before
            logger.info(
                "the code after the loop over the batches has made another model, so the state is kept as it was "
                "before that code: a program that is started again runs it once more, without a batch"
            )
            return
        loop = without_end(collector.loop)
        found = self._epoch_values
        if found is not None and (values := found.changed(sys._getframe(1), outermost_only=True)):
            loop[VALUES] = values
        if not self.is_alone and pass_boundary is None:
            sample, self._weights_in_front = self._weights_in_front, {}
            changed = bool(self._samples.changed_since(sample))
            loop[FRONT] = {**collector.copy_of_small(), CHANGES_WEIGHTS: changed}
        collector.loop = {**loop, OVER: {"epoch": epoch, "move_on": self._loaders.at_rest(), "left": is_left}}
        (pass_boundary or self._after)()

    def is_over(self, epoch: int) -> bool:
        """Whether nothing is left of `epoch`."""
        return _over(self._collector.loop).get("epoch") == epoch > 0

    def was_left(self) -> bool:
        """Whether a tail has ended the training, which has nothing in front of that tail to come to it again."""
        return bool(_over(self._collector.loop).get("left"))

    def move_on(self) -> None:
        """A resumed run begins after that epoch: so do the loaders that had ended theirs."""
        self._loaders.move_on(_over(self._collector.loop).get("move_on") or ())


def _over(loop: Mapping[str, Any]) -> Mapping[str, Any]:
    found = loop.get(OVER)
    return found if isinstance(found, Mapping) else {}
