"""What a process has seen and made of its steps: as it is compared, and as one line of JSON for each event."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = [
    "MOST_FORWARDS",
    "ProcessRecord",
    "Sample",
    "WitnessedStep",
    "of_kinds",
    "parse_life",
    "read_lives",
    "split_kind",
]

Sample = Mapping[str, str]
"""``kind|name`` -> the value where it is short, else a digest. Kinds: stream, calls, batch, weights, option, flag,
scalar, optimizer, stateful, exit; and variable, which decides nothing."""
MOST_FORWARDS = 8
"""Forwards of each named module that are noted in a step."""
_FILE = re.compile(r"rank_(\d+)\.(\d+)\.jsonl")


def split_kind(key: str) -> tuple[str, str]:
    """``kind|name`` -> both."""
    kind, _, name = key.partition("|")
    return kind, name


def of_kinds(sample: Sample, *kinds: str) -> dict[str, str]:
    """What a sample has of these kinds."""
    return {key: value for key, value in sample.items() if split_kind(key)[0] in kinds}


@dataclass(frozen=True, kw_only=True)
class WitnessedStep:
    """One step of one rank."""

    series: int = 0
    number: int
    epoch: int = 0
    step_in_epoch: int = 0
    cut: bool = True
    """A checkpoint can be taken at its boundary."""
    begin: Sample | None = None
    """At the first forward in training mode; None: there was none."""
    end: Sample = field(default_factory=dict)
    """At the boundary; and what the named modules were given until then."""
    behind: Sample | None = None
    """After the code that has followed it at its epoch's end, which a checkpoint of it may have, too."""
    clock: float = 0.0
    """`time.monotonic` of the machine when its boundary was noted."""

    @property
    def place(self) -> tuple[int, int]:
        """Series and number."""
        return self.series, self.number


@dataclass(kw_only=True)
class ProcessRecord:
    """One process in one guard."""

    rank: int
    series: int = 0
    """Which guard of the program, from 0, in the order in which they are entered."""
    directory: str = ""
    resumed: int | None = None
    """Step of the checkpoint that it went on from."""
    entered: Sample = field(default_factory=dict)
    """Everything, once the state was back."""
    steps: list[WitnessedStep] = field(default_factory=list)
    outcome: str = ""
    """``finished``, ``ended`` by the proof, or the exception that left the block; empty: it was killed."""
    notes: Sequence[str] = ()
    """What the guard itself has found against an exact resume."""
    exit: Sample = field(default_factory=dict)
    """The weights when the script ended, as ``exit|name``; empty: it did not come to its own end."""
    unlike: Sequence[Sequence[Any]] | None = None
    """What an audit has found otherwise than the living job: see `audited.Unlike`; None: it did not get so far."""
    alarm: int | None = None
    """The boundary at which it was stopped."""
    pid: int = 0
    clock: float = 0.0
    """`time.monotonic` of the machine when it had entered."""

    def add(self, step: WitnessedStep) -> None:
        """A step is over. One whose boundary is known late, once the loop has gone on, is noted twice: it has the
        forwards of its first note, and the state of the second."""
        if self.steps and self.steps[-1].place == step.place:
            first = self.steps.pop()
            end = {**of_kinds(first.end, "calls", "batch", "scalar"), **step.end}
            step = replace(step, begin=first.begin or step.begin, end=end)
        self.steps.append(step)


def read_lives(folder: Path) -> list[ProcessRecord]:
    """All that the processes of a run have written so far, in the order in which they began."""
    files = [(int(m[2]), int(m[1]), path) for path in folder.glob("rank_*.jsonl") if (m := _FILE.fullmatch(path.name))]
    found = [parse_life(path.read_text(encoding="utf-8").splitlines(keepends=True)) for *_, path in sorted(files)]
    return [life for life in found if life is not None]


def parse_life(lines: Iterable[str]) -> ProcessRecord | None:
    """What one file says: ``enter`` with the fields of `ProcessRecord`, each ``step`` with those of `WitnessedStep`,
    ``tail`` with what comes after the last one, ``now`` with fields of `ProcessRecord` that are known later. A last
    line that was cut off is left out; None: there is not even a first one."""
    life: ProcessRecord | None = None
    for line in lines:
        if not line.endswith("\n"):
            break
        content: dict[str, Any] = json.loads(line)
        event = content.pop("event")
        if event == "enter":
            life = ProcessRecord(**content)
        elif life is None:
            return None
        elif event == "step":
            life.add(WitnessedStep(**content))
        elif event == "tail":
            life.steps[-1:] = [replace(step, behind=content["behind"]) for step in life.steps[-1:]]
        else:
            for name, value in content.items():
                setattr(life, name, value)
    return life
