"""Compares what two runs have seen and made, step by step, and finds the first difference (pure).

A step's witnesses are compared in the order in which one causes the next: where the step is, what the start put back,
random streams, the batch, flags and learning rates, weights at the forward; then the boundary: scalars, weights,
optimizers, other objects, flags, streams. An option that differs at the boundary was set before the update or after it;
it comes before the weights, because it may be their cause.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindx_elastic.core.printable import printable
from mindx_elastic.prove.records import Life, Sample, Step, Streams

__all__ = [
    "Difference",
    "Lost",
    "Part",
    "Reference",
    "compare_life",
    "compare_steps",
    "compare_variables",
    "lost_variables",
    "root_of",
    "split_kinds",
]

_HASHED = re.compile(r"[0-9a-f]{16}")

_AT_ENTRY = ("weights", "option", "optimizer")
_AT_FORWARD = ("flag", "option", "weights")
_AT_END = ("scalar", "option", "weights", "optimizer", "stateful", "flag")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of thing that differs at one place of a step."""

    where: str
    """``position``, ``entry``, ``batch``, ``forward``, ``boundary`` or ``exit``."""
    kind: str
    """``position``, ``stream``, ``batch``, ``calls``, or a kind of `records.Sample`."""
    names: tuple[str, ...] = ()
    """What differs, all of it."""
    first: str = ""
    """The value of the first name in the reference."""
    second: str = ""
    """The value in the other run."""


@dataclass(frozen=True)
class Lost:
    """A variable of the program that the resumed run did not get back."""

    name: str
    """``"passed" (train.py)``, ``the length of "rows" (train.py)``."""
    first: str
    """Its value in the reference, or the digest of that."""
    second: str
    """In the resumed run."""

    def __str__(self) -> str:
        """``passed (5, now 0)``, ``rows (length 2, now 0)``; of a value that is a digest the name alone, of one in a
        container the container's."""
        if _HASHED.fullmatch(self.first) or _HASHED.fullmatch(self.second):
            return printable(self.whole, 120)
        return printable(f"{self.short} ({'length ' * self.is_length}{self.first}, now {self.second})", 120)

    @property
    def is_length(self) -> bool:
        return self.name.startswith("the length of ")

    @property
    def short(self) -> str:
        """The name alone."""
        return _short(self.name)

    @property
    def whole(self) -> str:
        """``ema.shadow`` of ``ema.shadow['0.weight']``."""
        return self.short.partition("[")[0]

    def is_same_count(self, window: int) -> bool:
        """Whether it is a count that is off by a multiple of the accumulation window of so many steps: the update comes
        with the same batch of it (``if n % 3 == 0``)."""
        is_count = self.first.isdecimal() and self.second.isdecimal()
        return window > 1 and is_count and (int(self.first) - int(self.second)) % window == 0


def root_of(name: str) -> str:
    """``self`` of ``"self.meter.n" (train.py)``."""
    return re.split(r"[.\[]", _short(name))[0]


def _short(name: str) -> str:
    return name.partition('"')[2].rpartition('" (')[0] or name


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step of a process that differs."""

    rank: int
    series: int
    step: int
    resumed: int | None
    """The step that the process went on from."""
    parts: tuple[Part, ...]
    """In causal order; never empty."""
    one: Step | None = None
    """The step in the reference; None: it does not exist there."""
    other: Step | None = None
    lost: tuple[Lost, ...] = ()
    """Variables that had other values as the step began."""

    @property
    def is_fact(self) -> bool:
        """Only states of objects in ``stateful`` differ. Where no second run shows what varies by itself (wall times in
        a history), that is a fact and no verdict."""
        return all(part.kind == "stateful" for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The uninterrupted run, and what another uninterrupted run has shown to vary by itself."""

    lives: Sequence[Life]
    unseeded: frozenset[str] = frozenset()
    """Streams that begin at random in each process."""
    varying: frozenset[str] = frozenset()
    """Scalars, parts of stateful objects and variables (``kind|name``) that differ in each run, such as times."""
    by_rank: Mapping[int, Mapping[tuple[int, int], Step]] = field(init=False)

    def __post_init__(self) -> None:
        by_rank: dict[int, dict[tuple[int, int], Step]] = {}
        for life in self.lives:
            by_rank.setdefault(life.rank, {}).update({step.place: step for step in life.steps})
        object.__setattr__(self, "by_rank", by_rank)

    @property
    def has_ended(self) -> bool:
        """Whether the training came to its own end, before the proof's; that may be an exception that is caught, or
        ``sys.exit()``."""
        return bool(self.lives) and all(life.outcome not in ("", "ended") for life in self.lives)

    def places(self, rank: int = 0) -> list[tuple[int, int]]:
        """Series and number of each step, in order."""
        return sorted(self.by_rank.get(rank, {}))


def compare_life(reference: Reference, life: Life) -> Difference | None:
    """The first step of `life` that is not as in the reference. Steps that the reference does not have are left out,
    unless it has come to its own end."""
    known = reference.by_rank.get(life.rank, {})
    last = max((number for series, number in known if series == life.series), default=0)
    entry = tuple(_at_entry(reference, life))

    def found(number: int, parts: tuple[Part, ...], one: Step | None = None, other: Step | None = None) -> Difference:
        lost = lost_variables(reference, life) if one is None or other is None else _lost(reference, life, one, other)
        return Difference(
            rank=life.rank, series=life.series, step=number, resumed=life.resumed,
            parts=parts, one=one, other=other, lost=lost,
        )  # fmt: skip

    for step in life.steps:
        if (one := known.get(step.place)) is not None:
            parts = list(compare_steps(one, step, unseeded=reference.unseeded, varying=reference.varying))
            if step is life.steps[0]:
                parts = sorted([*parts, *entry], key=lambda part: (part.kind != "position", part.where != "entry"))
            if parts:
                return found(step.number, tuple(parts), one, step)
        elif reference.has_ended and step.number > last:
            more = "and more" * (life.outcome != "finished")
            too_many = Part(where="position", kind="too many", first=str(life.steps[-1].number - last), second=more)
            return found(step.number, (too_many,), other=step)
    number = life.steps[-1].number if life.steps else life.resumed or 0
    if not life.steps and entry:  # resumed at the very end: nothing else would show it
        return found(number, entry)
    ends = tuple(_at_exit(reference, life))
    return found(number, ends) if ends else None


def lost_variables(reference: Reference, life: Life) -> tuple[Lost, ...]:
    """Variables of the program that had other values as the first step of a resumed `life` began than as that step
    began in the reference; where the reference has no such step, when the guard was entered than at the boundary that
    was resumed. Of equal steps, too: they may count much later, or behind the training only."""
    known = reference.by_rank.get(life.rank, {})
    one = known.get(life.steps[0].place) if life.steps else None
    if life.resumed is None or (one is None and (life.series, life.resumed) not in known):
        return ()
    if one is not None:
        return _lost(reference, life, one, life.steps[0])
    saved = known[life.series, life.resumed]
    return _lost(reference, life, saved, replace(saved, given=None, end=life.entered))


def _lost(reference: Reference, life: Life, one: Step, other: Step) -> tuple[Lost, ...]:
    """At the first forward: what differs at the boundary may be an effect. What the reference itself does not change in
    its training is left out: it may well say that this run was resumed."""
    ours, theirs = ((step.given or step.end) for step in (one if other.given else replace(one, given=None), other))
    first = reference.by_rank[life.rank].get((life.series, 1))
    begun = {} if first is None or first.number == one.number else first.given or first.end
    found, _ = compare_variables(ours, theirs)
    keys = (f"variable|{each.name}" for each in found)
    return tuple(
        each
        for each, key in zip(found, keys, strict=True)
        if key not in reference.varying and begun.get(key) != ours[key]
    )


def compare_variables(one: Sample, other: Sample) -> tuple[list[Lost], int]:
    """Variables of the program that both processes have and that differ, and how many are equal."""
    pairs = {key.partition("|")[2]: key for key in one if key.startswith("variable|") and key in other}
    found = [Lost(name, one[key], other[key]) for name, key in pairs.items() if one[key] != other[key]]
    return found, len(pairs) - len(found)


def _at_exit(reference: Reference, life: Life) -> Iterator[Part]:
    """The weights that the scripts end with, where both have come to their own end."""
    known = [one.exit for one in reference.lives if (one.rank, one.series) == (life.rank, life.series) and one.exit]
    if known and life.exit:
        yield from _unequal("exit", ("exit",), known[-1], life.exit, reference.varying)


def _at_entry(reference: Reference, life: Life) -> list[Part]:
    """What the process had not as it must, when it entered the guard."""
    if life.resumed is not None:
        saved = reference.by_rank.get(life.rank, {}).get((life.series, life.resumed))
        wanted = [] if saved is None else [saved.end] if saved.behind is None else [saved.behind, saved.end]
    else:
        begun = (
            one for one in reference.lives if (one.rank, one.series, one.resumed) == (life.rank, life.series, None)
        )
        wanted = [one.entered for one in begun][:1]
    found = [list(_unequal("entry", _AT_ENTRY, sample, life.entered, reference.varying)) for sample in wanted]
    return found[0] if all(found) and found else []


def compare_steps(
    one: Step, other: Step, *, unseeded: Collection[str] = (), varying: Collection[str] = ()
) -> Iterator[Part]:
    """What differs between the same step of two runs, in causal order."""
    if one.epoch != other.epoch or one.step_in_epoch != other.step_in_epoch:
        places = [f"step {s.step_in_epoch} of epoch {s.epoch}" for s in (one, other)]
        yield Part(where="position", kind="position", first=places[0], second=places[1])
    if one.forward and other.forward and (early := _streams("forward", one.forward, other.forward, unseeded)):
        yield early
    yield from _batch(one, other)
    if one.given is not None and other.given is not None:
        yield from _unequal("forward", _AT_FORWARD, one.given, other.given, varying)
    ends = [{**step.end, **step.scalars} for step in (one, other)]
    yield from _unequal("boundary", _AT_END, ends[0], ends[1], varying)
    late = _streams("boundary", one.streams, other.streams, unseeded)
    if late is not None:
        yield late


def split_kinds(key: str) -> tuple[str, str]:
    """``kind|name`` -> both."""
    kind, _, name = key.partition("|")
    return kind, name


def _streams(where: str, one: Streams, other: Streams, unseeded: Collection[str]) -> Part | None:
    names = [name for name in one if name in other and name not in unseeded and one[name] != other[name]]
    if not names:
        return None
    names.sort(key=lambda name: name != "torch")
    return Part(where=where, kind="stream", names=tuple(names), first=one[names[0]], second=other[names[0]])


def _batch(one: Step, other: Step) -> Iterator[Part]:
    """What the modules were given says it."""
    names = sorted({*one.inputs, *other.inputs})
    given = [(name, one.inputs.get(name, ()), other.inputs.get(name, ())) for name in names]
    for name, first, second in given:
        if len(first) != len(second):
            yield Part(where="batch", kind="calls", names=(name,), first=str(len(first)), second=str(len(second)))
            return
    for name, first, second in given:
        if first != second:
            yield Part(where="batch", kind="batch", names=(name,), first=" ".join(first), second=" ".join(second))
            return


def _unequal(where: str, kinds: Sequence[str], one: Sample, other: Sample, varying: Collection[str]) -> Iterator[Part]:
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for key in {**one, **other}:
        kind = split_kinds(key)[0]
        if kind in found and key not in varying and one.get(key) != other.get(key):
            found[kind].append(key)
    for kind in kinds:
        if keys := found[kind]:
            names = tuple(split_kinds(key)[1] for key in keys)
            values = [sample.get(keys[0], "nothing") for sample in (one, other)]
            yield Part(where=where, kind=kind, names=names, first=values[0], second=values[1])
