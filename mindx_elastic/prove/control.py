"""The control file: what `prove`, `drill` and `audit` tell the guards of one run, and where these write what they see.

``MINDX_PROVE`` names it. A run is one start of the script, on all its ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from mindx_elastic.errors import UsageError

__all__ = ["Control", "PlannedStop", "read_control"]

_STEPS, _MOST_STEPS, _INTO_THE_NEXT_EPOCH = 30, 100, 5


@dataclass(frozen=True, kw_only=True)
class PlannedStop:
    """A stop at one boundary."""

    series: int
    """Which guard of the program, from 0, in the order in which they are entered."""
    step: int
    rank: int
    """The rank that gets it."""

    def __str__(self) -> str:
        return f"stopped after step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Control:
    """See the module."""

    folder: Path
    """For the witnesses of this run."""
    directories: Path
    """Holds the checkpoint directories in place of the user's own; the same for a stopped run and the resumed one."""
    steps: int = 0
    """Leave after so many boundaries of the process, in all its guards; 0: after `last`. -1: after 30, or
    as many as reach into the second epoch, if these are at most 100."""
    last: tuple[int, int] | None = None
    """Series and step of the last boundary; None: see `steps`."""
    alarm: PlannedStop | None = None
    fault: Mapping[str, Any] | None = None
    """What `drill` breaks; see `drill.faults`."""
    living: Path | None = None
    """What the ranks of a living job have kept of step `last`, which an audit compares with: see `memory.one_step`."""

    def directory_for(self, wanted: Path) -> Path:
        """The private folder in place of a directory that the program names."""
        real = os.path.realpath(wanted)
        return self.directories / f"{xxhash.xxh3_64_hexdigest(real.encode())}-{os.path.basename(real)}"[:120]

    def is_last(self, series: int, step: int, num_batches: int, *, passed: int) -> bool:
        """Whether the run ends at the boundary `step`, number `passed` of all guards in the process. `num_batches`: of
        an epoch; 0: unknown."""
        if self.last is not None:
            return (series, step) >= self.last
        if self.steps >= 0:
            return 0 < self.steps <= passed
        wanted = num_batches + _INTO_THE_NEXT_EPOCH if num_batches else _STEPS
        return passed >= (wanted if _STEPS < wanted <= _MOST_STEPS else _STEPS)

    def write(self, path: Path) -> Path:
        """Write it to `path`; returns that."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")
        return path


def read_control(path: Path) -> Control:
    """Read what `Control.write` has written. Raises UsageError: the variable was set by hand, or its run is over."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        content |= {name: Path(content[name]) for name in ("folder", "directories", "living") if content[name]}
        alarm, last = content.pop("alarm"), content.pop("last")
        return Control(**content, last=last and (last[0], last[1]), alarm=alarm and PlannedStop(**alarm))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"environment variable MINDX_PROVE={path} names no control file of mindx-elastic prove, which sets it by "
            f"itself: unset it ({error})"
        ) from error
