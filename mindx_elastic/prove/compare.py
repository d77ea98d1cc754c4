"""Compares what two runs have seen and made, step by step, and finds the first difference (pure).

What differs in a step comes in the order in which one causes the next (`_ORDER`). An option that differs at the
boundary was set before the update or after it; it comes before the weights, because it may be their cause.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mindx_elastic.core.printable import printable
from mindx_elastic.prove.records import ProcessRecord, Sample, WitnessedStep, split_kind

__all__ = [
    "Difference",
    "DifferingPart",
    "Reference",
    "VariableNotRestored",
    "compare_life",
    "compare_steps",
    "compare_variables",
    "earliest",
    "is_digest",
    "lost_variables",
    "pair_of",
    "root_of",
    "short_of",
    "unequal",
]

_LENGTH = "the length of "
_HASHED = re.compile(r"[0-9a-f]{16}")
_ORDER = (
    *(("place", "position"), ("place", "too many")),
    *(("entry", "weights"), ("entry", "option"), ("entry", "optimizer")),
    *(("begin", "stream"), ("end", "calls"), ("end", "batch")),
    *(("begin", "flag"), ("begin", "option"), ("begin", "weights")),
    *(("end", "scalar"), ("end", "option"), ("end", "weights"), ("end", "optimizer"), ("end", "stateful")),
    *(("end", "flag"), ("end", "stream"), ("exit", "exit")),
)


class DifferingPart(NamedTuple):
    """One kind of thing that differs at one place of a step."""

    where: str
    """``place``, ``entry``, ``begin``, ``end`` or ``exit``."""
    kind: str
    """``position``, ``too many``, or a kind of `records.Sample`."""
    names: tuple[str, ...] = ()
    """What differs, all of it."""
    first: str = ""
    """The value of the first name in the reference."""
    second: str = ""
    """The value in the other run."""

    @property
    def rank(self) -> int:
        """Smaller than that of its effects."""
        return _ORDER.index((self.where, self.kind))


@dataclass(frozen=True)
class VariableNotRestored:
    """A variable of the program that the resumed run did not get back."""

    name: str
    """``"passed" (train.py)``, ``the length of "rows" (train.py)``."""
    first: str
    """Its value in the reference, or the digest of that."""
    second: str
    """Its value in the resumed run."""

    def __str__(self) -> str:
        """``passed (5, now 0)``, ``rows (length 2, now 0)``; of a value that is a digest the name alone, of one in a
        container the container's."""
        if is_digest(self.first, self.second):
            return printable(self.whole, 120)
        return printable(f"{self.short} ({'length ' * self.is_length}{self.first}, now {self.second})", 120)

    @property
    def is_length(self) -> bool:
        return self.name.startswith(_LENGTH)

    @property
    def short(self) -> str:
        """The name alone."""
        return short_of(self.name)

    @property
    def whole(self) -> str:
        """``ema.shadow`` of ``ema.shadow['0.weight']``."""
        return self.short.partition("[")[0]

    def is_same_count(self, window: int) -> bool:
        """Whether it is a count that is off by a multiple of the accumulation window of so many steps: the update comes
        with the same batch of it (``if n % 3 == 0``)."""
        is_count = self.first.isdecimal() and self.second.isdecimal()
        return window > 1 and is_count and (int(self.first) - int(self.second)) % window == 0


def is_digest(*values: str) -> bool:
    """Whether one of them stands for a value that is not shown."""
    return any(map(_HASHED.fullmatch, values))


def root_of(name: str) -> str:
    """``self`` of ``"self.meter.n" (train.py)``."""
    return re.split(r"[.\[]", short_of(name))[0]


def short_of(name: str) -> str:
    """``self.meter.n``."""
    return name.partition('"')[2].rpartition('" (')[0] or name


class Difference(NamedTuple):
    """The first step of a process that differs."""

    life: ProcessRecord
    step: int
    parts: tuple[DifferingPart, ...]
    """In causal order; never empty."""
    lost: tuple[VariableNotRestored, ...] = ()
    """Variables that the process did not get back."""

    @property
    def is_fact(self) -> bool:
        """Only states of objects in ``stateful`` differ. Where no second run shows what varies by itself (wall times in
        a history), that is a fact and no verdict."""
        return all(part.kind == "stateful" for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The uninterrupted run, and what another uninterrupted run has shown to vary by itself."""

    lives: Sequence[ProcessRecord]
    varying: frozenset[str] = frozenset()
    """``kind|name`` of what differs in each run, such as times, and of streams that begin at random."""
    by_rank: Mapping[int, Mapping[tuple[int, int], WitnessedStep]] = field(init=False)
    """The steps, by series and number."""

    def __post_init__(self) -> None:
        by_rank: dict[int, dict[tuple[int, int], WitnessedStep]] = {}
        for life in self.lives:
            by_rank.setdefault(life.rank, {}).update({step.place: step for step in life.steps})
        object.__setattr__(self, "by_rank", by_rank)

    @property
    def has_ended(self) -> bool:
        """Whether the training came to its own end, before the proof's; that may be an exception that is caught, or
        ``sys.exit()``."""
        return bool(self.lives) and all(life.outcome not in ("", "ended") for life in self.lives)

    @property
    def common_steps(self) -> list[WitnessedStep]:
        """The steps that all ranks have done, in order, as one of them has seen them."""
        done = [set(steps) for steps in self.by_rank.values()]
        return [self.by_rank[min(self.by_rank)][place] for place in sorted(set.intersection(*done))] if done else []

    def places(self, rank: int = 0) -> list[tuple[int, int]]:
        """Series and number of each step, in order."""
        return sorted(self.by_rank.get(rank, {}))

    def step(self, life: ProcessRecord, number: int | None) -> WitnessedStep | None:
        """The step with this number, of the rank and guard of `life`."""
        return None if number is None else self.by_rank.get(life.rank, {}).get((life.series, number))

    def same(self, life: ProcessRecord) -> list[ProcessRecord]:
        """Its processes with the rank and guard of `life`."""
        return [one for one in self.lives if (one.rank, one.series) == (life.rank, life.series)]


def earliest(reference: Reference, lives: Iterable[ProcessRecord]) -> Difference | None:
    """The first difference of all processes; within a step what causes the others."""
    known = [found for life in lives if (found := compare_life(reference, life)) is not None]
    return min(known, key=lambda d: (d.life.series, d.step, d.parts[0].rank, d.life.rank), default=None)


def compare_life(reference: Reference, life: ProcessRecord) -> Difference | None:
    """The first step of `life` that is not as in the reference. Steps that the reference does not have are left out,
    unless it has come to its own end."""
    last = max((number for series, number in reference.places(life.rank) if series == life.series), default=0)
    entry = list(_at_entry(reference, life))
    lost = lost_variables(reference, life)
    for step in life.steps:
        one = reference.step(life, step.number)
        parts: list[DifferingPart] = entry if step is life.steps[0] and one is not None else []
        if one is not None:
            parts = sorted([*parts, *compare_steps(one, step, reference.varying)], key=lambda part: part.rank)
        elif reference.has_ended and step.number > last:
            more = "and more" * (life.outcome != "finished")
            parts = [
                DifferingPart(where="place", kind="too many", first=str(life.steps[-1].number - last), second=more)
            ]
        if parts:
            return Difference(life=life, step=step.number, parts=tuple(parts), lost=lost)
    parts = [] if life.steps else entry  # resumed at the very end: no step shows it
    parts = parts or list(_at_exit(reference, life))
    number = life.steps[-1].number if life.steps else life.resumed or 0
    return Difference(life=life, step=number, parts=tuple(parts), lost=lost) if parts else None


def compare_steps(one: WitnessedStep, other: WitnessedStep, varying: Collection[str] = ()) -> Iterator[DifferingPart]:
    """What differs between the same step of two runs."""
    if (one.epoch, one.step_in_epoch) != (other.epoch, other.step_in_epoch):
        places = [f"step {each.step_in_epoch} of epoch {each.epoch}" for each in (one, other)]
        yield DifferingPart(where="place", kind="position", first=places[0], second=places[1])
    if one.begin is not None and other.begin is not None:
        yield from _unequal("begin", one.begin, other.begin, varying)
    yield from _unequal("end", one.end, other.end, varying)


def _at_entry(reference: Reference, life: ProcessRecord) -> Iterator[DifferingPart]:
    """What the process had not as it must, when it entered the guard."""
    if life.resumed is None:
        wanted = [one.entered for one in reference.same(life) if one.resumed is None][:1]
    else:
        saved = reference.step(life, life.resumed)
        wanted = [] if saved is None else [each for each in (saved.behind, saved.end) if each is not None]
    found = [list(_unequal("entry", sample, life.entered, reference.varying)) for sample in wanted]
    yield from found[0] if found and all(found) else ()


def _at_exit(reference: Reference, life: ProcessRecord) -> Iterator[DifferingPart]:
    """The weights that the scripts end with, where both have come to their own end."""
    known = [one.exit for one in reference.same(life) if one.exit]
    if known and life.exit:
        yield from _unequal("exit", known[-1], life.exit, reference.varying)


def unequal(one: Sample, other: Sample) -> list[str]:
    """The keys of what differs."""
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def _unequal(where: str, one: Sample, other: Sample, varying: Collection[str]) -> Iterator[DifferingPart]:
    by_kind: dict[str, list[str]] = {}
    for key in unequal(one, other):
        if key not in varying:
            by_kind.setdefault(split_kind(key)[0], []).append(key)
    both = [key for key in by_kind.get("stream", ()) if key in one and key in other]  # one run may use no device
    by_kind["stream"] = sorted(both, key=lambda key: key != "stream|torch")
    for kind in (kind for place, kind in _ORDER if place == where):
        if keys := by_kind.get(kind):
            names = tuple(split_kind(key)[1] for key in keys)
            first, second = (sample.get(keys[0], "nothing") for sample in (one, other))
            yield DifferingPart(where=where, kind=kind, names=names, first=first, second=second)


# --- variables of the program ---


def lost_variables(reference: Reference, life: ProcessRecord) -> tuple[VariableNotRestored, ...]:
    """Variables of the program that had other values as the first step of a resumed `life` began than as that step
    began in the reference; where the reference has no such step, when the guard was entered than at the boundary that
    was resumed. Of equal steps, too: they may count much later, or after the training only. What the reference itself
    does not change in its training is left out: it may well say that this run was resumed."""
    first = life.steps[0] if life.steps else None
    one = None if first is None else reference.step(life, first.number)
    saved = reference.step(life, life.resumed)
    if life.resumed is None or (one is None and saved is None):
        return ()
    ours, theirs = saved.end if saved is not None else {}, life.entered
    if one is not None and first is not None:
        ours, theirs = pair_of(one, first)
    start = reference.step(life, 1)
    begun: Sample = {} if start is None or start is one else start.begin or start.end
    left_out = {key for key in ours if key in reference.varying or begun.get(key) == ours[key]}
    return tuple(lost for lost in compare_variables(ours, theirs)[0] if f"variable|{lost.name}" not in left_out)


def pair_of(one: WitnessedStep, other: WitnessedStep) -> tuple[Sample, Sample]:
    """Two steps as they begin, or as they end where one of them has had no forward: what differs there may be an
    effect."""
    if one.begin is not None and other.begin is not None:
        return one.begin, other.begin
    return one.end, other.end


def compare_variables(one: Sample, other: Sample) -> tuple[list[VariableNotRestored], int]:
    """Variables of the program that both processes have and that differ, and how many are equal."""
    names = {split_kind(key)[1]: key for key in one if key.startswith("variable|")}
    # What is a container in one is None in the other, where it has not been made yet.
    pairs = {n: (one[key], other.get(key, other.get(key.replace(_LENGTH, "")))) for n, key in names.items()}
    found = [VariableNotRestored(n, a, b) for n, (a, b) in pairs.items() if b is not None and a != b]
    return found, sum(a == b for a, b in pairs.values())
