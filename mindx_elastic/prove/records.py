"""Reads the witnesses of one run: per rank and process what was entered, each step, and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["MOST_FORWARDS", "Life", "Sample", "Step", "Streams", "parse_life", "read_lives"]

Sample = Mapping[str, str]
"""``kind|name`` -> digest. Kinds: weights, option, flag, optimizer, stateful, and variable, which decides nothing."""
Streams = Mapping[str, str]
"""Name of a random stream -> digest of its state."""
MOST_FORWARDS = 8
"""Of each named module, noted in a step."""
_FILE = re.compile(r"rank_(\d+)\.(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank. None: it was not looked at, or did not take place."""

    series: int
    number: int
    epoch: int = 0
    step_in_epoch: int = 0
    num_batches: int = 0
    cut: bool = True
    """A checkpoint can be taken at its boundary."""
    forward: Streams | None = None
    """At the first forward in training mode."""
    given: Sample | None = None
    """Weights, options and flags at the first forward."""
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What the named modules were given, in order."""
    scalars: Sample = field(default_factory=dict)
    streams: Streams = field(default_factory=dict)
    """At the boundary."""
    end: Sample = field(default_factory=dict)
    """At the boundary."""
    behind: Sample | None = None
    """Behind the code that has followed it at its epoch's end, which a checkpoint of it may have, too."""
    clock: float = 0.0
    """`time.monotonic` of the machine when its boundary was noted."""

    @property
    def place(self) -> tuple[int, int]:
        """Series and number."""
        return self.series, self.number


@dataclass
class Life:
    """One process in one guard."""

    rank: int
    series: int
    directory: str = ""
    prefix: str = ""
    resumed: int | None = None
    """Step of the checkpoint that it went on from."""
    epoch: int = 0
    world_size: int = 1
    entered: Sample = field(default_factory=dict)
    """Everything, once the state was back."""
    steps: list[Step] = field(default_factory=list)
    outcome: str = ""
    """``finished``, ``ended`` by the proof, or the exception that left the block; empty: it was killed."""
    notes: tuple[str, ...] = ()
    """What the guard itself has found against an exact resume."""
    exit: Sample = field(default_factory=dict)
    """The weights when the script ended, as ``exit|name``; empty: it did not come to its own end."""
    alarm: int | None = None
    """The boundary at which it was stopped."""
    pid: int = 0
    clock: float = 0.0
    """`time.monotonic` of the machine when it had entered."""


def read_lives(folder: Path) -> list[Life]:
    """All that the processes of a run have written so far, in the order in which they began."""
    lives: list[Life] = []
    files = [(int(m[2]), int(m[1]), path) for path in folder.glob("rank_*.jsonl") if (m := _FILE.fullmatch(path.name))]
    for _, rank, path in sorted(files):
        found = parse_life(rank, path.read_text(encoding="utf-8").splitlines(keepends=True))
        lives += [] if found is None else [found]
    return lives


def parse_life(rank: int, lines: Iterable[str]) -> Life | None:
    """What one file says. A last line that was cut off is left out; None: there is not even a first one."""
    life: Life | None = None
    known: dict[str, str] = {}
    for line in _whole(lines):
        event = json.loads(line)
        kind = event["event"]
        if kind == "enter":
            _apply(known, event["end"])
            names = ("series", "directory", "prefix", "resumed", "epoch", "world_size")
            life = Life(rank=rank, entered=dict(known), **{name: event[name] for name in names})
            life.pid, life.clock = (event.get(name, 0) for name in ("pid", "clock"))
        elif life is None:
            return None
        elif kind == "step":
            life.steps.append(_step(event, known))
        elif kind == "tail" and life.steps:
            _apply(known, event["end"])
            life.steps[-1] = replace(life.steps[-1], behind=dict(known))
        elif kind == "alarm":
            life.alarm = event["step"]
        elif kind == "exit":
            life.exit = event["weights"]
        elif kind == "leave":
            life.outcome, life.notes = event["outcome"], tuple(event["notes"])
    return life


def _whole(lines: Iterable[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith("\n"))


def _apply(known: dict[str, str], changes: Mapping[str, Any]) -> None:
    for name in changes["gone"]:
        known.pop(name, None)
    known.update(changes["changed"])


def _step(event: Mapping[str, Any], known: dict[str, str]) -> Step:
    given = forward = None
    if event["forward"] is not None:
        _apply(known, event["forward"]["sample"])
        given = {k: v for k, v in known.items() if k.partition("|")[0] in ("weights", "option", "flag", "variable")}
        forward = event["forward"]["streams"]
    _apply(known, event["end"])
    return Step(
        series=event["series"],
        number=event["step"],
        epoch=event["epoch"],
        step_in_epoch=event["step_in_epoch"],
        num_batches=event["num_batches"],
        cut=event["cut"],
        forward=forward,
        given=given,
        inputs={name: tuple(each) for name, each in event["inputs"].items()},
        scalars={f"scalar|{name}": value for name, value in event["scalars"].items()},
        streams=event["streams"],
        end=dict(known),
        clock=event.get("clock", 0.0),
    )
