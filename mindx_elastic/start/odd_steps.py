"""Steps whose loss, or gradient norm, was no number: which files a start does not use because of them.

A guard that is to go back from such a step (``Guard(odd=...)``) writes a record next to the checkpoints, one file a
rank, before its process ends. Other ranks may have kept that step meanwhile, in memory or by a periodic save, and their
weights are no numbers either: that attempt's files of it, and of later steps, are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from mindx_elastic.core.events import logger
from mindx_elastic.core.fields import Text, Words, read_text
from mindx_elastic.core.moment import Moment
from mindx_elastic.core.owners import Owners, open_trusted
from mindx_elastic.errors import MindxError

__all__ = ["ODD_STEPS", "OddStep", "OddSteps", "odd_step_of", "odd_steps_path", "read_odd_steps", "without_odd_steps"]

ODD_STEPS = "odd_steps_rank_"
"""What the names of the records begin with."""
_MOST_BYTES = 1 << 20
_REASON = re.compile(r"exception: OddStepError: step (\d{1,18})\b")


@dataclass(frozen=True)
class OddStep:
    """One of them."""

    run_id: Annotated[str, Text(200)]
    attempt: int
    step: int
    rank: int
    what: Annotated[str, Words(200)]
    verdict: Literal["open", "own", "other"]
    """Whether it came out as odd when it was made again: not known yet, yes, no."""

    def __str__(self) -> str:
        return f"step {self.step} was odd on rank {self.rank} ({self.what}); {ODD_STEPS}{self.rank}.json says so"

    def spoils(self, moment: Moment) -> bool:
        """Whether a state of `moment` may have come of it. Of a first step all have: there is nothing else to use."""
        is_after = moment[2] >= self.step > 1
        return moment[0] == self.run_id and moment[1] <= self.attempt and is_after


@dataclass(frozen=True)
class OddSteps:
    """A rank's file."""

    steps: list[OddStep] = field(default_factory=list)
    """The oldest first."""

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def odd_step_of(reason: str) -> int | None:
    """The step that a stop for this reason goes back from: no rank is to save it. None: it has another reason."""
    found = _REASON.match(reason)
    return None if found is None else int(found[1])


def odd_steps_path(directory: Path, rank: int) -> Path:
    return directory / f"{ODD_STEPS}{rank}.json"


def read_odd_steps(path: Path, owners: Owners | None) -> OddSteps:
    """Those in the file; one that cannot be read is told and has none."""
    try:
        with open(open_trusted(path, owners), "rb") as file:
            return read_text(OddSteps, file.read(_MOST_BYTES + 1), _MOST_BYTES)
    except FileNotFoundError:
        return OddSteps()
    except (MindxError, OSError, ValueError) as error:
        logger.warning("%s is not used: %s. Files of steps whose loss was no number may be resumed from", path, error)
        return OddSteps()


def without_odd_steps(moments: Iterable[Moment], odd: Sequence[OddStep]) -> dict[Moment, OddStep]:
    """The moments that are not to be used, and because of which step."""
    found = {moment: next((each for each in odd if each.spoils(moment)), None) for moment in set(moments)}
    return {moment: each for moment, each in found.items() if each is not None}
