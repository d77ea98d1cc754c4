"""What may be looked at of one entered guard, at the last boundary."""

from __future__ import annotations

from collections.abc import Callable

from mindx_elastic.guard.loops.loops import Loops
from mindx_elastic.guard.opening import Opening
from mindx_elastic.guard.stopper import Stopper

__all__ = ["Observed"]


class Observed:
    """An observer reads it, and changes nothing."""

    def __init__(self, opening: Opening, stopper: Stopper, loops: Loops, is_outside: Callable[[], bool]) -> None:
        """`is_outside`: what happens now belongs to no step."""
        start = opening.start
        self.directory, self.prefix = opening.options.folder, opening.options.prefix
        self.run_id, self.ranks = start.run_id, stopper.ranks
        self.targets, self.collector = opening.targets, opening.collector
        self.position = loops.position
        """The last boundary passed."""
        self.resumed = start.step
        """Step of the checkpoint that this run went on from."""
        self.resumed_path = None if start.resumed is None else start.resumed.path
        self.was_not_kept = "" if start.resumed is None else start.resumed.checkpoint.info.not_kept
        """What `not_kept` had found in the stopped process: ``self.n, self.meter (4 attributes)``."""
        self.policies, self.stopper = opening.policies, stopper
        self.unmanaged = opening.unmanaged
        """Where a comparison notes what it has shown."""
        self.is_outside = is_outside
