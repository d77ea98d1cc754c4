"""Saves by the clock: all ranks save the same step, without a round trip to the store at every step.

Rank 0 decides at *check steps* only, and each decision names the next check step: about half-way to the moment when
the save is due, by the speed measured so far. The first check is the first boundary of this process, so all ranks know
every check step, and the others read one key of the store there: about ten short reads for each save.

Rejected, because the ranks' clocks differ and they must not disagree by one step: a clock on every rank (no step would
be complete); a collective or a store read every step; rank 0 naming a step in the future (a rank that reads it too late
has already passed that step).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mindx_elastic.agreement.connect import connect_store, current_seal
from mindx_elastic.agreement.sealed import Seal
from mindx_elastic.agreement.validation import whole_number
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.guard.save_interval import SaveInterval

__all__ = ["SaveClock", "next_check", "open_clock"]

_TIMEOUT = timedelta(minutes=10)
_KEEP = 1000
_CHANGE = 0.2
_MOST_STEPS = 100_000  # between two looks at the clock
_clocks = itertools.count()


def next_check(step: int, *, remaining_s: float, step_s: float) -> int:
    """The step at which to look at the clock again: half-way to the save, at least one step later. Pure."""
    if step_s <= 0:
        return step + 1
    return step + max(1, min(_MOST_STEPS, int(remaining_s / 2 / step_s)))


class SaveClock:
    """Says every `seconds` that a save is due, or as often as the interval says that rank 0 measures. `due` belongs to
    the training thread; the same calls on all ranks.

    `store`: None in a job of one rank. A store that fails ends the saving by time with one warning.
    """

    def __init__(
        self,
        seconds: float | SaveInterval,
        *,
        rank: int = 0,
        store: Any = None,
        now: Callable[[], float] = time.monotonic,
        seal: Seal | None = None,
        name: str = "clock",
        on_change: Callable[[SaveInterval], None] = lambda interval: None,
    ) -> None:
        """`seal`: of the job's exchange, None: nothing is sealed. `name` tells the clocks of a job apart. `on_change`
        is told of a measured interval when it is another than before."""
        self._seal, self._name = Seal(None, "", rank) if seal is None else seal, name
        self._rank, self._now, self._on_change = rank, now, on_change
        self._measured = seconds if isinstance(seconds, SaveInterval) else None
        self._fixed_s = 0.0 if isinstance(seconds, SaveInterval) else float(seconds)
        self._told = self._seconds
        self._store = store
        self._last_save = self._last_check = now()
        self._last_step: int | None = None
        self._check_at = 0
        self._checks = 0
        self._broken = False

    @property
    def _seconds(self) -> float:
        return self._fixed_s if self._measured is None else self._measured.seconds

    def due(self, step: int) -> bool:
        """Whether boundary `step` is to be saved."""
        if self._rank == 0 and self._measured is not None and not self._broken:
            self._measure(self._measured)
        if step < self._check_at or self._broken:
            return False
        if self._rank == 0:
            due, self._check_at = self._decide(step)
            self._publish(step, due)
            return due
        return self._read(step)

    def _measure(self, interval: SaveInterval) -> None:
        interval.passed(self._now())
        if abs(self._seconds - self._told) > _CHANGE * self._told:
            self._told = self._seconds
            self._on_change(interval)

    def _decide(self, step: int) -> tuple[bool, int]:
        now = self._now()
        steps = 0 if self._last_step is None else step - self._last_step
        step_s = (now - self._last_check) / steps if steps else 0.0
        self._last_check, self._last_step = now, step
        due = now - self._last_save >= self._seconds
        if self._measured is not None:
            due = due and self._measured.is_ready
            if due:
                self._measured.saves()
        if due:
            self._last_save = now
        remaining_s = self._seconds - (now - self._last_save)
        if self._store is None:
            return due, step + 1  # alone, a look at the clock costs nothing
        return due, next_check(step, remaining_s=remaining_s, step_s=step_s)

    def _publish(self, step: int, due: bool) -> None:
        if self._store is None:
            return
        try:
            key, said = str(self._checks), f"{step} {int(due)} {self._check_at}"
            self._store.set(key, self._seal.close(f"{self._name}/{key}", said))
            if self._checks >= _KEEP:  # old keys must not pile up; no rank lags by so many checks
                self._store.delete_key(str(self._checks - _KEEP))
        except Exception as error:
            self._give_up(error)
        self._checks += 1

    def _read(self, step: int) -> bool:
        assert self._store is not None
        try:
            self._store.wait([str(self._checks)], _TIMEOUT)
            key = str(self._checks)
            text = self._seal.open(f"{self._name}/{key}", self._store.get(key), author=0, limit=100)
            said, due, check_at = (whole_number(word, 0, 1 << 53) for word in text.split(" "))
            if said != step:
                raise ValueError(f"rank 0 looked at the clock at step {said}, rank {self._rank} at step {step}")
            if due > 1 or not step < check_at <= step + _MOST_STEPS:
                raise ValueError(f"{printable(text)!r} is not a message of rank 0")
            self._check_at = check_at
        except Exception as error:
            self._give_up(error)
            return False
        self._checks += 1
        return bool(due)

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        logger.warning("rank %d no longer saves by the clock: %s", self._rank, error)


def open_clock(
    seconds: float | SaveInterval,
    rank: int,
    world_size: int,
    name: str = "",
    *,
    on_change: Callable[[SaveInterval], None] = lambda interval: None,
) -> SaveClock | None:
    """A clock for this job; None when `seconds` is 0. With several ranks all of them open the same clocks in order.
    `name`: instead of its number in that order, where processes of different ages meet. `on_change`: see `SaveClock`.
    """
    if not seconds:
        return None
    if world_size == 1:
        return SaveClock(seconds, on_change=on_change)
    name = f"clock/{name or next(_clocks)}"
    store = connect_store(RankInfo.from_env(), name)
    return SaveClock(seconds, rank=rank, store=store, seal=current_seal(), name=name, on_change=on_change)
