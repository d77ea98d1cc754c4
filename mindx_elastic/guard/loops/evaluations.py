"""What `Guard.outside_step` keeps: an evaluation leaves no trace in the training, and a stop inside saves the boundary.

========================  ==============================================================================================
random streams            put back afterwards: global ones, named generators, samplers' own
modes of the modules      put back afterwards
position of the loaders   put back afterwards: a named loader can be iterated, also in mid-epoch
weights                   an evaluation may exchange them (averaged ones) and put them back. Meanwhile nothing is
                          saved: a stop waits for the end of the block. Nor is it after an exception that leaves them
                        exchanged
buffers                   are not put back, for a program may want the change: named, unless they end as they began
========================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.rng import kept_rng
from mindx_elastic.capture.update_gate import UpdateGate
from mindx_elastic.capture.weight_samples import WeightSamples
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["Evaluations"]


class Evaluations:
    """One per entered guard. Training thread."""

    def __init__(self, collector: Collector, gate: UpdateGate, loaders: Loaders, unmanaged: Unmanaged) -> None:
        self._collector, self._gate, self._loaders, self._unmanaged = collector, gate, loaders, unmanaged
        self._samples = WeightSamples(collector)
        self._warned_of_buffers = False
        self.depth = 0
        """The number of such blocks that the program is inside: what happens there belongs to no step."""

    @contextmanager
    def block(self, step: int) -> Iterator[None]:
        """Around an evaluation after boundary `step`."""
        buffers = self._collector.look_at_buffers()
        with ExitStack() as stack:
            stack.enter_context(kept_rng())
            stack.enter_context(self._collector.kept_streams_and_flags())
            stack.enter_context(self._loaders.outside())
            for loader in self._loaders.named:
                if hasattr(loader, "set_aside"):
                    stack.enter_context(loader.set_aside())
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
        changed = [] if self._warned_of_buffers else self._collector.changed_buffers(buffers)
        if changed:
            self._warned_of_buffers = True
            self._unmanaged.risk(
                f"step {step}: {listed(changed, 3)} changed inside guard.outside_step(): no boundary has that, so a "
                "run that is stopped here goes on without it",
                "Call eval() on the model first",
            )

    @contextmanager
    def watched_weights(self) -> Iterator[None]:
        """Inside, `UpdateGate.hold` finds out when the weights are exchanged, also where that counts no version. Where
        an exception leaves them so, it goes on to find that out until the next boundary."""
        gate = self._gate
        if gate.others is not None or not gate.is_clean():
            yield
            return
        samples, sample = self._samples, self._samples.take()
        exchanged = "the weights are exchanged inside guard.outside_step()"
        gate.others = lambda: exchanged if samples.changed_since(sample) else None
        try:
            yield
        finally:
            if gate.others() is None:
                gate.others = None
                gate.accept_changes()
