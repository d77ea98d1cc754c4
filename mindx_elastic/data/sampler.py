"""Which samples make up which batch: a function of (seed, epoch, position), entered at any position in O(1).

The order of an epoch does not depend on the number of ranks: step k takes the global slice ``[k*W*B,
(k+1)*W*B)`` of the order and rank r the r-th part of it. So a position is one number, the samples that all
ranks together have consumed, and an epoch begun by 4 ranks can be finished by 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler

from mindx_elastic.data.permutation import Permutation, mix, mix_array
from mindx_elastic.data.position import Cursor

__all__ = ["EpochPlan", "Key", "ResumableBatchSampler", "rank_and_world_size"]

Key: TypeAlias = Any  # (seed of the sample, index) when augmentation is seeded, else the bare index

_BLOCK = 4096  # positions worked out at once: large enough for numpy, small enough to start fast
_ORDER, _SAMPLE = 1, 2  # keep the order's and the augmentation's hashes apart


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else from torch.distributed when it is initialised, else (0, 1)."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


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
    fill: bool = False
    """All ranks get as many samples in the last step, some of them twice, as ``DistributedSampler(drop_last=False)``
    gives them; else the remainder is split as evenly as it goes."""
    step: int = field(init=False)
    """Samples of a full step over all ranks."""
    full: int = field(init=False)
    """Number of full steps."""
    tail: tuple[int, ...] = field(init=False)
    """Samples of each shorter step after the full ones."""

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

    @property
    def num_batches(self) -> int:
        return self.full + len(self.tail)

    @property
    def padding(self) -> int:
        """Samples handed out twice in the last step."""
        return max(0, self._end(self.num_batches) - self.num_samples)

    def consumed(self, batches: int) -> int:
        """Samples of the epoch that all ranks together have consumed after `batches` steps of this plan."""
        return min(self.num_samples, self._end(batches))

    def _end(self, batches: int) -> int:
        return self.start + min(batches, self.full) * self.step + sum(self.tail[: max(0, batches - self.full)])

    def share(self, batch: int, rank: int) -> tuple[int, int]:
        """Positions [begin, end) of `rank` in step `batch`; positions past the end wrap around to the epoch's start."""
        first = self._end(batch)
        size, more = divmod(self._end(batch + 1) - first, self.world_size)
        begin = first + rank * size + min(rank, more)
        return begin, begin + size + (rank < more)


class ResumableBatchSampler(Sampler[list[Key]]):
    """Yields this rank's batches from the cursor's position on; each `iter` reads the position anew.

    A batch is a list of keys: ``(seed of the sample, index)``, or bare indices when `seeded` is False. The seed is a
    hash of (seed, epoch, index): it follows the sample to whichever worker or rank loads it. `whole_rounds` leaves out
    what does not divide by the world size, as ``DistributedSampler(drop_last=True)`` does; `filled_rounds`: see
    `EpochPlan.fill`.
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
        seeded: bool = True,
        whole_rounds: bool = False,
    ) -> None:
        self.dataset = dataset
        self.cursor = cursor
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.ranks = ranks
        self.seeded = seeded
        self.whole_rounds = whole_rounds
        self.filled_rounds = False
        self._length: tuple[tuple[Any, ...], int] = ((), 0)  # what it was worked out from, and it

    def set_epoch(self, epoch: int) -> None:
        self.cursor.set_epoch(epoch)

    def plan(self, start: int = 0, *, finished: bool = False) -> EpochPlan:
        """The steps that are left when `start` samples of the epoch are consumed."""
        world_size = self.ranks()[1]
        size = len(self.dataset)
        if self.whole_rounds:
            size -= size % world_size
        start = size if finished else start
        return EpochPlan(size, self.batch_size, world_size, self.drop_last, start, fill=self.filled_rounds)

    def __len__(self) -> int:
        """Batches of a whole epoch for one rank. Asked at every boundary: worked out again only when it can differ."""
        facts = (len(self.dataset), self.batch_size, self.ranks()[1], self.drop_last, self.whole_rounds)
        if facts != self._length[0]:
            self._length = facts, self.plan().num_batches
        return self._length[1]

    def __iter__(self) -> Iterator[list[Key]]:
        # Not a generator: torch may want the first batch long after `iter`, when the cursor has moved.
        cursor = self.cursor
        plan = self.plan(cursor.samples, finished=cursor.finished)
        return self._batches(plan, self.ranks()[0], cursor.epoch)

    def _batches(self, plan: EpochPlan, rank: int, epoch: int) -> Iterator[list[Key]]:
        size = len(self.dataset)
        order = Permutation(size, mix(self.seed, epoch, _ORDER)) if self.shuffle else None
        prefix = mix(self.seed, epoch, _SAMPLE)
        width = plan.batch_size
        steps_at_once = max(1, _BLOCK // width)
        own = plan.start + rank * width + np.arange(width, dtype=np.int64)
        for first in range(0, plan.full, steps_at_once):
            steps = np.arange(first, min(first + steps_at_once, plan.full), dtype=np.int64)
            yield from self._keys(steps[:, None] * plan.step + own, order, prefix)
        for batch in range(plan.full, plan.num_batches):
            positions = np.arange(*plan.share(batch, rank), dtype=np.int64) % plan.num_samples
            yield from self._keys(positions[None, :], order, prefix)

    def _keys(self, positions: npt.NDArray[np.int64], order: Permutation | None, prefix: int) -> Iterator[list[Key]]:
        indices = positions if order is None else order(positions)
        if not self.seeded:
            yield from indices.tolist()
            return
        seeds = mix_array(prefix, indices.astype(np.uint64))
        for seed_row, index_row in zip(seeds, indices, strict=True):
            yield list(zip(seed_row.tolist(), index_row.tolist(), strict=True))
