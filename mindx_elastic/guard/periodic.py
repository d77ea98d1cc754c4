"""The periodic policy: saves every so many steps, by the clock, or as often as is measured to be worth it.

`Guard(save_every=...)` and `ModelCheckpoint` give one to the guard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.config import RankInfo
from mindx_elastic.core.events import logger
from mindx_elastic.core.position import Position
from mindx_elastic.errors import UsageError
from mindx_elastic.guard.save_clock import SaveClock, open_clock
from mindx_elastic.guard.save_interval import SaveInterval

__all__ = ["AUTO", "PeriodicSave", "SaveEvery", "parse_save_every"]

AUTO = "auto"
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class SaveEvery:
    """When to save; of the three one counts."""

    steps: int = 0
    """Updates between two saves."""
    seconds: float = 0.0
    """Seconds between two saves, by rank 0's clock."""
    adapts: bool = False
    """The interval is measured, see `save_interval`."""


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
    """By steps a function of the position, else see `save_clock`."""

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

    def begin(
        self, ranks: RankInfo, tell: Callable[[int], None], *, deaths: int, lived_s: float, name: str = ""
    ) -> None:
        """A guard is being entered, or is entered again: open the clock, if one decides. Main thread, all ranks
        together, before the first step.

        tell: shows the seconds between two saves, where they are measured. deaths, lived_s: as of `SaveInterval`. name:
        of the policy in this entry, the same on all ranks; empty: all ranks' processes are as old, and count alike.
        """

        def on_change(interval: SaveInterval) -> None:
            logger.info(
                "a checkpoint every %.0f s: one costs %.2f s, and the job is taken to die every %.1f h",
                *(interval.seconds, interval.cost_s or 0.0, interval.mtbf_s / 3600),
            )
            tell(round(interval.seconds))

        seconds = SaveInterval(deaths=deaths, lived_s=lived_s) if self.every.adapts else self.every.seconds
        self.newest, self._clock = None, open_clock(seconds, ranks.rank, ranks.world_size, name, on_change=on_change)

    def due(self, position: Position) -> bool:
        if self._clock is not None:
            due = self._clock.due(position.step)
        else:
            due = self.every.steps > 0 and position.step % self.every.steps == 0
        if due:
            self.newest = position
        return due

    def name(self, position: Position) -> str:
        return f"{self.prefix}-{position.epoch}_{position.step_in_epoch}.safetensors"
