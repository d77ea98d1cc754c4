"""Names what the code between a boundary and the next batch moves: a run that is stopped at that boundary goes on
without it. Looked at after a few boundaries, and after evaluations, whose results such code may note."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindx_elastic.capture.collector import Collector
from mindx_elastic.capture.rng import capture_rng, moved_streams
from mindx_elastic.capture.weight_samples import WeightSample, WeightSamples
from mindx_elastic.core.printable import listed
from mindx_elastic.guard.loops.resumed_state import moved_since
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """One per entered guard. Training thread."""

    def __init__(
        self,
        collector: Collector,
        unmanaged: Unmanaged,
        samples: WeightSamples,
        is_clean: Callable[[], bool],
        *,
        is_resumed: bool,
    ) -> None:
        """`is_clean`: as `UpdateGate.is_clean`. `is_resumed`: the run goes on from a boundary. It looks after other
        steps than the first process did, and what that process was not refused for (a sample that is drawn every
        thousandth step) must not keep the run from going on."""
        self._collector, self._unmanaged, self._samples = collector, unmanaged, samples
        self._is_clean = is_clean
        self._certain = unmanaged.risk if is_resumed else unmanaged.certain
        self.is_watching = False
        self._weights: Mapping[str, WeightSample] = {}
        self.drawn: tuple[list[str], dict[str, Any]] | None = None
        """The streams that had moved at the last look, and how all were then; for `judge_drawn`."""

    def watch(self, sample: Mapping[str, WeightSample] | None) -> None:
        """Watch from the boundary that was just copied. `sample`: of its weights, where one was taken."""
        self.is_watching = True
        if sample is None:
            sample = self._samples.take() if self._is_clean() else {}
        self._weights = sample

    def leave(self) -> None:
        """What follows belongs to no boundary yet."""
        self.is_watching = False

    def look(self) -> None:
        """The next step begins. Raises UnmanagedStateError."""
        if not self.is_watching:
            return
        self.is_watching = False
        moved, others = moved_since(self._collector)
        now = capture_rng(self._collector.rng)
        if drawn := moved_streams(self._collector.rng, now):
            self.drawn = drawn, now
        sample, self._weights = self._weights, {}
        # Also where no counter has moved (`.data`). Weights that were exchanged and put back are the same.
        moved += self._samples.changed_since(sample)
        for names, tell in ((moved, self._certain), (others, self._unmanaged.risk)):
            if names:
                tell(*_moves(listed(names, 3)))

    def judge_drawn(self, drawn: list[str], then: dict[str, Any]) -> None:
        """A step has ended. Numbers that were drawn in front of it to print something do no harm where no step draws
        from that stream. Raises UnmanagedStateError."""
        self.drawn = None
        steps = moved_streams(then, self._collector.rng)
        if used := [name for name in drawn if name in steps]:
            self._certain(*_moves(f"a random stream ({listed(used, 3)})"))


def _moves(names: str) -> tuple[str, str]:
    what = (
        f"{names} moves after guard.step_end() and before the next batch, and a run that is stopped at that step goes "
        "on without it"
    )
    return what, (
        "Do it before guard.step_end(), or at the head of the loop for the step before; what only draws random numbers "
        "belongs into `with guard.outside_step():`"
    )
