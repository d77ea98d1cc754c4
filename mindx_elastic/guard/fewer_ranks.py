"""What keeps the updates right while the job trains with fewer ranks than it is meant to have (``--min-nproc``).

Each rank stands in for several, one after the other, and accumulates over as many more batches (`Guard.accumulation`).
The loader hands out the batches that all ranks together would get, so an update is the mean over the same samples. A
step is an update's share of the whole job's: `step_end` inside of a longer window counts only as often as it would with
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindx_elastic.capture.collector import Collector
from mindx_elastic.config import RankInfo, ShrinkSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.status_page import StatusPage
from mindx_elastic.data import FunctionLoader, ReplayLoader, ResumableLoader
from mindx_elastic.data.sampler import shares_of, window_of
from mindx_elastic.guard.loops.loaders import Loaders
from mindx_elastic.guard.unmanaged import Unmanaged

__all__ = ["FewerRanks", "why_fixed"]

_ASK = (
    "Accumulate over `n = guard.accumulation()` batches for each update (`guard.accumulation(4)` where it is 4 with "
    "all ranks) and divide each loss by n, or start without --min-nproc"
)


class FewerRanks:
    """One per guard. Training thread."""

    def __init__(self) -> None:
        self._least_asked = self._divisor = 0  # of the windows with all ranks, as the program has asked; 0: it has not
        self._page = StatusPage()
        self._handed: dict[int, int] = {}  # batches handed out up to the last step, by optimizer
        self._calls = 0  # of `step_end` in the window
        self.is_shrunk = False
        """The job has fewer ranks than it is meant to have. Else there is nothing to do in a step."""
        self.has_left_out = False
        """`leaves_out` has said so last."""
        self._world_size = 1
        self._shares = 1  # ranks of the whole job that those that are there stand for

    def accumulation(self, batches: int) -> int:
        """Over how many batches this rank accumulates where it is `batches` with all ranks."""
        if batches != self._divisor:
            self._least_asked = min(self._least_asked or batches, batches)
            self._divisor = math.gcd(self._divisor, batches)
            self._page.set(accumulates=self._divisor)
        return window_of(batches, RankInfo.from_env().world_size)

    def enter(
        self,
        stack: ExitStack,
        unmanaged: Unmanaged,
        page: StatusPage,
        ranks: RankInfo,
        collector: Collector,
        loaders: Loaders,
    ) -> None:
        """The state is back, and no update gate is open yet."""
        world_size, settings = ranks.world_size, ShrinkSettings.from_env()
        self._page, self._unmanaged = page, unmanaged
        self._world_size, self._shares, self._calls = world_size, shares_of(world_size), 0
        self._handed.clear()
        self.has_left_out, self.is_shrunk = False, settings.is_shrunk(world_size)
        if settings.full_size:
            page.set(accumulates=self._divisor)
            page.set_text("fixed_size", why_fixed(world_size, loaders.by_name()))
        if not self.is_shrunk:
            return
        named = {id(optimizer) for optimizer in collector.optimizers()}

        def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if id(optimizer) in named:
                self._check_window(optimizer, loaders)

        stack.callback(register_optimizer_step_pre_hook(check).remove)
        if ranks.rank == 0:
            logger.warning(
                "%d of %d ranks train: they stand in for all of them, and accumulate over more batches: the global "
                "batch stays",
                world_size,
                settings.full_size,
            )

    def leaves_out(self, is_inside: Callable[[], bool]) -> bool:
        """Whether the step that has ended is none with all ranks: a part of a window that is longer now. `is_inside`:
        of an accumulation window."""
        shares, world_size = self._shares, self._world_size
        self.has_left_out = False
        if shares == world_size:
            return False
        self._calls += 1
        if not is_inside():
            self._calls = 0
        else:
            self.has_left_out = self._calls * world_size // shares == (self._calls - 1) * world_size // shares
        return self.has_left_out

    def _check_window(self, optimizer: torch.optim.Optimizer, loaders: Loaders) -> None:
        if not self._least_asked:
            self._unmanaged.certain(
                f"{self._world_size} ranks train in the place of {self._shares}, and the loop does "
                "not accumulate over more batches for it: its global batch would shrink",
                _ASK,
            )
            return
        first = loaders.counting
        if first is None:
            return
        taken = first.handed - self._handed.get(id(optimizer), 0)
        wanted = self._least_asked * self._shares // self._world_size
        self._handed[id(optimizer)] = first.handed
        if taken < wanted and not (first.cursor.is_at_end or first.fetches.exhausted):
            self._unmanaged.certain(
                f"an update has used {taken} batches, and with {self._world_size} ranks in the place of "
                f"{self._shares} it takes {wanted}: its global batch would shrink",
                _ASK,
            )


def why_fixed(world_size: int, loaders: Sequence[tuple[str, Any]]) -> str:
    """Why the program cannot go on with another number of ranks; empty: nothing is known against it."""
    for name, loader in loaders:
        if isinstance(loader, ReplayLoader):
            return f"{name} keeps its own order, which resumes with as many ranks only (use a ResumableLoader)"
        if isinstance(loader, FunctionLoader):
            return f"{name} makes the batches of each rank from its number"
        if not isinstance(loader, ResumableLoader):
            return f"{name} keeps its own position, one for each rank (use a ResumableLoader)"
        if loader.num_shares != world_size:
            return f"{name} is not shared out over all ranks (it has no DistributedSampler)"
    return ""
