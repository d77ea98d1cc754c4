"""Where training stands: the counters that name a boundary."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Position"]


class Position(NamedTuple):  # one is made at each boundary: a frozen dataclass takes three times as long
    """One boundary, the moment after the update and before the next batch.

    All zero before the first boundary of a fresh run.
    """

    step: int = 0
    """Boundaries passed since the job's very first start, over all epochs and restarts."""
    epoch: int = 0
    """Epoch of this boundary, from 1."""
    step_in_epoch: int = 0
    """Boundaries passed inside `epoch`, from 1."""
    batch_num: int = 0
    """Batches per epoch on one rank where the loader knows it, else 0."""
