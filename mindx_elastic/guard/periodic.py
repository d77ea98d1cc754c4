"""When to save on the way: every so many steps, by the clock, or as often as one percent of the time allows.

`Guard(save_every=...)` and `ModelCheckpoint` give such a policy to the guard.

By the clock all ranks save the same step, without a round trip to the store at every step. Rank 0 decides at *check
steps* only, and each decision names the next check step: about half-way to the moment when the save is due, by the
speed measured so far. The first check is the first boundary of this process, so all ranks know every check step, and
the others read one key of the store there: about ten short reads for each save.

Rejected, because the ranks' clocks differ and they must not disagree by one step: a clock on every rank (no step would
be complete); a collective or a store read every step; rank 0 naming a step in the future (a rank that reads it too late
has already passed that step).
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mindx_elastic.agreement.connect import connect_store, current_seal
from mindx_elastic.agreement.sealed import Seal
from mindx_elastic.agreement.validation import whole_number
from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.core.printable import printable
from mindx_elastic.errors import UsageError

__all__ = ["AUTO", "PeriodicSave", "SaveClock", "SaveEvery", "next_check", "parse_save_every"]

AUTO = "auto"
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS = {"s": 1, "min": 60, "h": 3600}
LEAST_S = 60.0
"""Seconds between two saves of `AUTO` at least, and before the first one, which shows what a save costs."""
_SHARE = 0.01
"""The share of the time that saves of `AUTO` may take."""
_COSTS = 5
_CHANGE = 0.2  # of the interval, to be told
_TIMEOUT = timedelta(minutes=10)
_KEEP = 1000
_MOST_STEPS = 100_000  # between two looks at the clock
_clocks = itertools.count()


class SaveEvery(NamedTuple):
    """When to save; of the three one counts."""

    steps: int = 0
    """Updates between two saves."""
    seconds: float = 0.0
    """Seconds between two saves, by rank 0's clock."""
    adapts: bool = False
    """The seconds are measured: as few as one percent of the time pays for, and `LEAST_S` at least."""


def parse_save_every(value: object) -> SaveEvery | None:
    """What `Guard(save_every=...)` says; None: no periodic saves. Raises UsageError."""
    if value is None or (value == 0 and type(value) is int):
        return None
    if value == AUTO:
        return SaveEvery(adapts=True)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return SaveEvery(steps=value)
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise UsageError(f'save_every={value!r}: give a number of steps, a time ("90s", "10min", "1h") or "{AUTO}"')
    return SaveEvery(seconds=float(found[1]) * _UNITS[found[2]])


class PeriodicSave:
    """The policy: by steps a function of the position, else see `SaveClock`."""

    def __init__(
        self,
        prefix: str,
        directory: Path,
        every: SaveEvery,
        *,
        asynchronous: bool = True,
        keep_max: int | None = 2,
        keep_per_n_minutes: float | None = None,
        append_info: Sequence[object] = (),
        remove_redundancy: bool = False,
    ) -> None:
        """`asynchronous`: the training waits for a copy in host memory only. The others as in `CheckpointConfig`."""
        self.prefix, self.directory, self.every = prefix, directory, every
        self.asynchronous, self.remove_redundancy = asynchronous, remove_redundancy
        self.keep_max, self.keep_per_n_minutes = keep_max, keep_per_n_minutes
        self.append_info = append_info
        self.newest: Position | None = None
        """The boundary that was found due last."""
        self._clock: SaveClock | None = None

    def begin(self, ranks: RankInfo, tell: Callable[[int], None], *, name: str = "") -> None:
        """A guard is being entered, or is entered again: open the clock, if one decides. Main thread, all ranks
        together and for their policies in the same order, before the first step.

        tell: shows the seconds between two saves, where they are measured. name: of the policy in this entry, the same
        on all ranks; empty: all ranks' processes are as old, and count alike.
        """
        self.newest = self._clock = None
        seconds = None if self.every.adapts else self.every.seconds
        if seconds == 0:
            return
        if ranks.world_size == 1:
            self._clock = SaveClock(seconds, tell)
            return
        name = f"clock/{name or next(_clocks)}"
        store = connect_store(RankInfo.from_env(), name)
        self._clock = SaveClock(seconds, tell, rank=ranks.rank, store=store, seal=current_seal(), name=name)

    def due(self, position: Position) -> bool:
        if self._clock is not None:
            due = self._clock.due(position.step)
        else:
            due = self.every.steps > 0 and position.step % self.every.steps == 0
        if due:
            self.newest = position
        return due

    def note_cost(self, cost_s: float) -> None:
        """The training has waited so long for a save."""
        if self._clock is not None:
            self._clock.note_cost(cost_s)

    def name(self, position: Position) -> str:
        return f"{self.prefix}-{position.epoch}_{position.step_in_epoch}.safetensors"


def next_check(step: int, *, remaining_s: float, step_s: float) -> int:
    """The step at which to look at the clock again: half-way to the save, at least one step later. Pure."""
    if step_s <= 0:
        return step + 1
    return step + max(1, min(_MOST_STEPS, int(remaining_s / 2 / step_s)))


class SaveClock:
    """Says every `seconds` that a save is due, or as often as one percent of the time pays for, as rank 0 measures it.
    `due` belongs to the training thread; the same calls on all ranks.

    `store`: None in a job of one rank. A store that fails ends the saving by time with one warning.
    """

    def __init__(
        self,
        seconds: float | None,
        tell: Callable[[int], None] = lambda seconds: None,
        *,
        rank: int = 0,
        store: Any = None,
        now: Callable[[], float] = time.monotonic,
        seal: Seal | None = None,
        name: str = "clock",
    ) -> None:
        """`seconds`: None: they are measured. `tell`: is told of another interval than before. `seal`: of the job's
        exchange, None: nothing is sealed. `name` tells the clocks of a job apart."""
        self._seal, self._name = Seal(None, "", rank) if seal is None else seal, name
        self._rank, self._now, self._store = rank, now, store
        self._adapts, self._tell = seconds is None and rank == 0, tell
        self.seconds = self._told = LEAST_S if seconds is None else float(seconds)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._last_save = self._last_check = now()
        self._last_step: int | None = None
        self._check_at = 0
        self._checks = 0
        self._broken = False

    def due(self, step: int) -> bool:
        """Whether boundary `step` is to be saved."""
        if step < self._check_at or self._broken:
            return False
        try:
            return self._decide(step) if self._rank == 0 else self._read(step)
        except Exception as error:
            self._broken = True
            logger.warning("rank %d no longer saves by the clock: %s", self._rank, error)
            return False
        finally:
            self._checks += 1

    def note_cost(self, cost_s: float) -> None:
        """The training has waited so long for a save."""
        if not self._adapts:
            return
        self._costs.append(cost_s)
        cost_s = median(self._costs)
        self.seconds = max(cost_s / _SHARE - cost_s, LEAST_S)
        if abs(self.seconds - self._told) > _CHANGE * self._told or len(self._costs) == 1:
            self._told = self.seconds
            logger.info("a checkpoint every %.0f s: one costs %.2f s of the training", self.seconds, cost_s)
            self._tell(round(self.seconds))

    def _decide(self, step: int) -> bool:
        now = self._now()
        steps = 0 if self._last_step is None else step - self._last_step
        step_s = (now - self._last_check) / steps if steps else 0.0
        self._last_check, self._last_step = now, step
        due = now - self._last_save >= self.seconds
        if due:
            self._last_save = now
        if self._store is not None:  # alone, a look at the clock costs nothing
            self._check_at = next_check(step, remaining_s=self.seconds - (now - self._last_save), step_s=step_s)
            self._publish(f"{step} {int(due)} {self._check_at}")
        return due

    def _publish(self, decision: str) -> None:
        key = str(self._checks)
        self._store.set(key, self._seal.close(f"{self._name}/{key}", decision))
        if self._checks >= _KEEP:  # old keys must not pile up; no rank lags by so many checks
            self._store.delete_key(str(self._checks - _KEEP))

    def _read(self, step: int) -> bool:
        key = str(self._checks)
        self._store.wait([key], _TIMEOUT)
        text = self._seal.open(f"{self._name}/{key}", self._store.get(key), author=0, limit=100)
        said, due, check_at = (whole_number(word, 0, 1 << 53) for word in text.split(" "))
        if said != step:
            raise ValueError(f"rank 0 looked at the clock at step {said}, rank {self._rank} at step {step}")
        if due > 1 or not step < check_at <= step + _MOST_STEPS:
            raise ValueError(f"{printable(text)!r} is not a message of rank 0")
        self._check_at = check_at
        return bool(due)
