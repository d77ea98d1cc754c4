"""The faults that `mindx-elastic drill` can make: their names, what they take, what may be lost (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mindx_elastic.errors import UsageError

__all__ = ["KINDS", "NOTE", "PLACES", "Fault", "Kind", "describe_kinds", "parse_fault"]

NOTE = "fault.json"
"""The file in which a rank notes its fault before it happens: when, or why it was ``missed``."""

PLACES = ("boundary", "forward", "update")
"""After the step; at its first forward; after an ``optimizer.step()`` of it."""
_KEYS = {"rank": "R", "step": "N", "at": "PLACE", "guard": "G"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault."""

    name: str
    says: str
    """One line, for ``--list``."""
    places: tuple[str, ...] = ("boundary",)
    """Where it can happen; the first one is the default."""
    agent: bool = False
    """Only under ``mindx-elastic run``."""
    stops: bool = False
    """Every rank stops at a boundary and saves it: no step is lost."""
    workers: bool = False
    """Only where the loader has workers."""
    by_chance: bool = True
    """``--random`` draws it."""


_ALL = (
    Kind(
        name="kill",
        says="SIGKILL to one rank",
        places=PLACES,
    ),
    Kind(name="kill-all", says="SIGKILL to every rank, the drawn one last", agent=True),
    Kind(
        name="lose-node",
        says="SIGKILL to every rank and to mindx-elastic run, and shared memory is empty when it is started again",
        agent=True,
    ),
    Kind(
        name="terminate",
        says="the signal that the guard listens to (SIGTERM) to one rank",
        places=PLACES,
        stops=True,
    ),
    Kind(
        name="stop",
        says="SIGSTOP to one rank, which then hangs until the agent finds it (--hang-timeout)",
        agent=True,
        by_chance=False,
    ),
    Kind(
        name="exception",
        says="RuntimeError in the program of one rank",
        places=("forward", "update"),
    ),
    Kind(
        name="kill-worker",
        says="SIGKILL to one worker of a rank's loader",
        places=("boundary", "forward"),
        workers=True,
    ),
    Kind(name="kill-agent", says="SIGKILL to mindx-elastic run", places=("boundary", "forward"), agent=True),
    Kind(
        name="terminate-agent",
        says="SIGTERM to mindx-elastic run",
        places=("boundary", "forward"),
        agent=True,
        stops=True,
    ),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one run."""

    kind: str
    rank: int = 0
    step: int = 1
    """At its boundary, or inside of it."""
    at: str = "boundary"
    """One of `PLACES`."""
    guard: int = 0
    """Which guard of the program, from 0."""

    @property
    def about(self) -> Kind:
        return KINDS[self.kind]

    @property
    def boundaries_before(self) -> int:
        """How many boundaries have been passed when it happens."""
        return self.step if self.at == "boundary" else self.step - 1

    @property
    def needs_more(self) -> bool:
        """Whether it needs something that not every job has at every step: a worker, a stop."""
        return self.about.workers or self.about.stops

    def __str__(self) -> str:
        shown: list[str] = [f"rank={self.rank}", f"step={self.step}"]
        shown += [f"at={self.at}"] if len(self.about.places) > 1 else []
        shown += [f"guard={self.guard}"] if self.guard else []
        return f"{self.kind}:{','.join(shown)}"


def parse_fault(text: str) -> Fault:
    """``kill:rank=1,step=7,at=update`` -> the fault. Raises UsageError that names what is wrong, and what there is."""
    name, _, rest = text.partition(":")
    kind = KINDS.get(name.strip())
    if kind is None:
        near = get_close_matches(name, KINDS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"--fault {text}: no such fault{hint}; mindx-elastic drill --list names all")
    known = ["rank", "step", "guard", *(["at"] * (len(kind.places) > 1))]
    found: dict[str, Any] = {"at": kind.places[0]}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if key not in known or not equals:
            raise UsageError(f"--fault {text}: {part!r} is none of {', '.join(f'{k}={_KEYS[k]}' for k in known)}")
        found[key] = _value(text, kind, key, value)
    return Fault(kind=kind.name, **found)


def _value(text: str, kind: Kind, key: str, value: str) -> object:
    if key == "at":
        if value not in kind.places:
            raise UsageError(f"--fault {text}: at={value}: give {', '.join(kind.places)}")
        return value
    least = {"rank": 0, "guard": 0}.get(key, 1)
    if not value.isdecimal() or not least <= int(value) <= 10**9:
        raise UsageError(f"--fault {text}: {key}={value}: give a whole number from {least}")
    return int(value)


def describe_kinds() -> Sequence[tuple[str, str]]:
    """How each kind is written with its defaults, and what it does."""
    rows = []
    for kind in _ALL:
        parts = ["rank=R", "step=N"]
        parts += [f"at={'|'.join(kind.places)}"] if len(kind.places) > 1 else []
        needs = [
            *(["under mindx-elastic run"] if kind.agent else []),
            *(["loader with workers"] if kind.workers else []),
        ]
        says = f"{kind.says} ({', '.join(needs)})" if needs else kind.says
        rows.append((f"{kind.name}:{','.join(parts)}", says))
    return rows
