"""Which samples make up which batch: a function of (seed, epoch, position), entered at any position in O(1).

The order of an epoch does not depend on the number of ranks: step k takes the global slice ``[k*W*B,
(k+1)*W*B)`` of the order and rank r the r-th part of it. So a position is one number, the samples that all
ranks together have consumed, and an epoch begun by 4 ranks can be finished by 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler

from mindx_elastic.config import RankInfo, ShrinkSettings
from mindx_elastic.data.permutation import Permutation, mix
from mindx_elastic.data.position import Cursor
from mindx_elastic.errors import UsageError

__all__ = ["BatchKey", "EpochPlan", "ResumableBatchSampler", "rank_and_world_size", "shares_of", "window_of"]

BatchKey: TypeAlias = "tuple[int, list[int]]"
"""The seed of a batch, and the indices of its samples."""

_BLOCK = 4096  # positions worked out at once: large enough for numpy, small enough to start fast
_ORDER, _BATCH = 1, 2  # keep the order's and the augmentation's hashes apart


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else from torch.distributed when it is initialised, else (0, 1)."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def shares_of(world_size: int) -> int:
    """Among how many ranks the samples are shared out where `world_size` are there: as many, unless those are all that
    are left of a job with more, and stand in for the others."""
    settings = ShrinkSettings.from_env()
    if not settings.full_size or world_size != RankInfo.from_env().world_size:
        return world_size
    return settings.shares(world_size)


def window_of(batches: int, world_size: int) -> int:
    """Over how many batches each of `world_size` ranks accumulates where it is `batches` with all ranks of the job.

    Raises UsageError where they cannot be shared out evenly."""
    shares = shares_of(world_size)
    if batches * shares % world_size:
        raise UsageError(
            f"the {batches * shares} batches of an update of {shares} ranks cannot be shared out evenly among "
            f"{world_size}; start with another number of ranks"
        )
    return batches * shares // world_size


@dataclass(frozen=True)
class EpochPlan:
    """The steps of an epoch from `start` on (samples already consumed), for `world_size` ranks. Pure arithmetic.

    All ranks get the same number of batches and none is empty. Without `drop_last` every sample comes exactly once: the
    remainder is split evenly over the ranks; if it has fewer samples than there are ranks, the last two steps are
    evened out. Where even that fails (`batch_size` 1, or fewer samples than ranks) `padding` samples are repeated.
    """

    num_samples: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    start: int = 0
    present: int = 0
    """So many of the `world_size` ranks are present, and take the batches of all in turn: batch k of rank r is number
    ``k * present + r`` of them. Where the last ones do not come out even, their samples are split again. 0: all ranks.
    """
    fill: bool = False
    """All ranks get as many samples in the last step, some of them twice, as ``DistributedSampler(drop_last=False)``
    gives them; else the remainder is split as evenly as it goes."""
    step: int = field(init=False)
    """Samples of a full step over all ranks."""
    full: int = field(init=False)
    """Number of full steps."""
    tail: tuple[int, ...] = field(init=False)
    """Samples of each shorter step after the full ones."""
    num_ranks: int = field(init=False)
    """The ranks that are present."""
    num_batches: int = field(init=False)
    """Batches that each rank takes."""
    even: int = field(init=False)
    """How many of them are batches of all ranks as they are."""
    again: tuple[int, int, int] = field(init=False)
    """Begin and end of the samples that are split again, and into how many batches of each rank."""

    def __post_init__(self) -> None:
        step = self.batch_size * self.world_size
        full, rest = divmod(max(0, self.num_samples - self.start), step)
        tail: tuple[int, ...] = ()
        if self.fill and rest:
            rest += -rest % self.world_size
            if rest == step or not self.drop_last:
                tail = (rest,)
        elif rest and not self.drop_last:
            if rest >= self.world_size:
                tail = (rest,)
            elif full and self.batch_size > 1:
                full -= 1
                tail = ((step + rest + 1) // 2, (step + rest) // 2)
            else:
                tail = (self.world_size,)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "full", full)
        object.__setattr__(self, "tail", tail)
        object.__setattr__(self, "num_ranks", self.present or self.world_size)
        self._share_out()

    def _share_out(self) -> None:
        """Work out the batches of the ranks that are there."""
        rounds, rest = divmod(self.num_steps * self.world_size, self.num_ranks)
        even, again = rounds - (rest > 0), (0, 0, 0)
        if rest:
            begin, end = self._part(even * self.num_ranks)[0], self._end(self.num_steps)
            again = begin, end, 2 if end - begin >= 2 * self.num_ranks else 1
        object.__setattr__(self, "even", even)
        object.__setattr__(self, "again", again)
        object.__setattr__(self, "num_batches", even + again[2])

    @property
    def num_steps(self) -> int:
        return self.full + len(self.tail)

    @property
    def padding(self) -> int:
        """Samples handed out twice in the last step."""
        return max(0, self._end(self.num_steps) - self.num_samples)

    def consumed(self, batches: int) -> int:
        """Samples of the epoch that all ranks together have consumed after `batches` batches of each."""
        if batches <= self.full and self.num_ranks == self.world_size:  # asked after every batch
            return self.start + batches * self.step
        if self.num_ranks == self.world_size:
            end = self._end(batches)
        else:
            end = self.share(batches, 0)[0] if batches < self.num_batches else self._end(self.num_steps)
        return min(self.num_samples, end)

    def batches_until(self, samples: int) -> int | None:
        """How many batches of each rank consume `samples` samples; None: no number does."""
        steps = min(max(0, samples - self.start) // self.step, self.full)
        for batches in range(max(0, steps * self.world_size // self.num_ranks - 1), self.num_batches + 1):
            if (consumed := self.consumed(batches)) >= samples:
                return batches if consumed == samples else None
        return None

    def _end(self, steps: int) -> int:
        return self.start + min(steps, self.full) * self.step + sum(self.tail[: max(0, steps - self.full)])

    def share(self, batch: int, rank: int) -> tuple[int, int]:
        """Positions [begin, end) of `rank` in its batch `batch`; positions past the end wrap around to the epoch's
        start."""
        if batch < self.even:
            return self._part(batch * self.num_ranks + rank)
        begin, end, rounds = self.again
        return _piece(begin, end, (batch - self.even) * self.num_ranks + rank, rounds * self.num_ranks)

    def _part(self, number: int) -> tuple[int, int]:
        """Positions of the batch `number` of those of all `world_size` ranks."""
        step, rank = divmod(number, self.world_size)
        return _piece(self._end(step), self._end(step + 1), rank, self.world_size)


def _piece(begin: int, end: int, number: int, count: int) -> tuple[int, int]:
    """Piece `number` of [begin, end) in `count` pieces, the larger ones first."""
    size, more = divmod(end - begin, count)
    first = begin + number * size + min(number, more)
    return first, first + size + (number < more)


class ResumableBatchSampler(Sampler[Any]):
    """Yields this rank's batches from the cursor's position on; each `iter` reads the position.

    A batch is a `BatchKey`. Its seed is a hash of (seed, epoch, first index): it follows the batch to whichever worker
    or rank loads it. `whole_rounds` leaves out what does not divide by the world size,
    as ``DistributedSampler(drop_last=True)`` does; `filled_rounds`: see `EpochPlan.fill`.
    """

    def __init__(
        self,
        dataset: Sized,
        cursor: Cursor,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        ranks: Callable[[], tuple[int, int]],
    ) -> None:
        self.dataset = dataset
        self.cursor = cursor
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.ranks = ranks
        self.whole_rounds = self.filled_rounds = False
        self.newest_plan: EpochPlan | None = None
        """Of the newest pass."""

    def set_epoch(self, epoch: int) -> None:
        self.cursor.set_epoch(epoch)

    def plan(self, start: int = 0, *, finished: bool = False, size: int | None = None) -> EpochPlan:
        """The steps that are left when `start` samples of the epoch are consumed. `size`: of another data set."""
        world_size = self.ranks()[1]
        size = len(self.dataset) if size is None else size
        shares = shares_of(world_size)
        if self.whole_rounds:
            size -= size % shares
        start = size if finished else start
        return EpochPlan(
            size, self.batch_size, shares, self.drop_last, start, present=world_size, fill=self.filled_rounds
        )

    def __len__(self) -> int:
        """Batches of a whole epoch for one rank."""
        return self.plan().num_batches

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: torch may want the first batch long after `iter`, when the cursor has moved.
        cursor = self.cursor
        self.newest_plan = plan = self.plan(cursor.samples, finished=cursor.finished)
        return self._batches(plan, self.ranks()[0], cursor.epoch)

    def _batches(self, plan: EpochPlan, rank: int, epoch: int) -> Iterator[BatchKey]:
        size = len(self.dataset)
        order = Permutation(size, mix(self.seed, epoch, _ORDER)) if self.shuffle else None
        prefix = mix(self.seed, epoch, _BATCH)
        for indices in chain.from_iterable(self._of_plan(plan, rank, order)):
            yield mix(prefix, indices[0]), indices

    def _of_plan(self, plan: EpochPlan, rank: int, order: Permutation | None) -> Iterator[list[list[int]]]:
        """The indices of the batches, many batches at once."""
        width = plan.batch_size
        steps_at_once = max(1, _BLOCK // width)
        own = plan.start + rank * width + np.arange(width, dtype=np.int64)
        full = min(plan.even, plan.full * plan.world_size // plan.num_ranks)
        for first in range(0, full, steps_at_once):
            batches = np.arange(first, min(first + steps_at_once, full), dtype=np.int64)
            yield _indices(batches[:, None] * (width * plan.num_ranks) + own, order)
        for batch in range(full, plan.num_batches):
            positions = np.arange(*plan.share(batch, rank), dtype=np.int64) % plan.num_samples
            yield _indices(positions[None, :], order)


def _indices(positions: npt.NDArray[np.int64], order: Permutation | None) -> list[list[int]]:
    indices: list[list[int]] = (positions if order is None else order(positions)).tolist()
    return indices
