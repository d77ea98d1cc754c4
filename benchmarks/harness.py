"""Alternated runs of several methods: medians with their spread, ratios in one run, targets, a table and JSON.

    compared = compare("a batch of 16", {"stock": one_round, "ours": another}, rounds=9)
    report = Report(parser.parse_args())  # prints command, machine, versions and load
    report.add(compared, base="stock", targets=[Target(method="ours", times_as_long=1.3)])
    sys.exit(report.end())                # writes --json and --plot; 1 under --strict where a target was missed

A method is called once a round and returns seconds, or a dict of figures of which each is a number. All methods run in
every round, in turn in one order and in the other, so that a machine that grows slower is slow for all of them. A ratio
is worked out in each round and told as the median of these: a round that some other program disturbed counts once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Figures = Mapping[str, float]
Method = Callable[[], "float | Figures"]
SECONDS = "seconds"


@dataclass(frozen=True)
class Spread:
    """One figure of one method over all rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def most(self) -> float:
        return max(self.values)

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.least, "max": self.most, "values": list(self.values)}


@dataclass(frozen=True)
class Comparison:
    """What the rounds of some methods gave."""

    title: str
    figures: Mapping[str, Mapping[str, Spread]]
    """Method, figure."""

    def spread(self, method: str, figure: str = SECONDS) -> Spread:
        return self.figures[method][figure]

    def times_as_long(self, method: str, base: str, figure: str = SECONDS) -> Spread:
        """Each round's figure of the method over that of the base."""
        pairs = zip(self.spread(method, figure).values, self.spread(base, figure).values, strict=True)
        return Spread(tuple(one / other for one, other in pairs))

    def more_than(self, method: str, base: str, figure: str = SECONDS) -> Spread:
        """Each round's figure of the method less that of the base."""
        pairs = zip(self.spread(method, figure).values, self.spread(base, figure).values, strict=True)
        return Spread(tuple(one - other for one, other in pairs))

    def times_as_fast(self, method: str, base: str, figure: str = SECONDS) -> Spread:
        return self.times_as_long(base, method, figure)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One of the four limits; the ratios are to `base`, or to the base that the report is given."""

    method: str
    figure: str = SECONDS
    at_most: float | None = None
    times_as_long: float | None = None
    """At most so many times what the base takes."""
    times_as_fast: float | None = None
    """At least."""
    at_most_more: float | None = None
    """At most so much more than the base has."""
    base: str | None = None

    def __post_init__(self) -> None:
        limits = (self.at_most, self.times_as_long, self.times_as_fast, self.at_most_more)
        if sum(limit is not None for limit in limits) != 1:
            raise ValueError(f"the target of {self.method!r} needs one limit")

    def judge(self, compared: Comparison, base: str | None) -> Verdict:
        base = self.base or base
        if self.at_most is not None:
            reached = compared.spread(self.method, self.figure).median
            return Verdict(self, f"<= {self.at_most:g}", reached, reached <= self.at_most)
        if base is None:
            raise ValueError(f"the target of {self.method!r} needs a base, and none was named")
        if self.at_most_more is not None:
            reached = compared.more_than(self.method, base, self.figure).median
            return Verdict(self, f"<= {base} + {self.at_most_more:g}", reached, reached <= self.at_most_more)
        if self.times_as_long is not None:
            reached = compared.times_as_long(self.method, base, self.figure).median
            words = f"<= {self.times_as_long:g} times {base}"
            return Verdict(self, words, reached, reached <= self.times_as_long)
        assert self.times_as_fast is not None
        reached = compared.times_as_fast(self.method, base, self.figure).median
        words = f">= {self.times_as_fast:g} times as fast as {base}"
        return Verdict(self, words, reached, reached >= self.times_as_fast)


@dataclass(frozen=True)
class Verdict:
    target: Target
    wanted: str
    reached: float
    met: bool

    def as_dict(self) -> dict[str, Any]:
        found = {"method": self.target.method, "figure": self.target.figure}
        return {**found, "wanted": self.wanted, "reached": self.reached, "met": self.met}


def compare(title: str, methods: Mapping[str, Method], *, rounds: int, warm_up: int = 0) -> Comparison:
    """Run every method `rounds` times, alternating; `warm_up` rounds before these are thrown away."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    names = list(methods)
    for number in range(-warm_up, rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            result = methods[name]()
            told = result if isinstance(result, Mapping) else {SECONDS: result}
            if number < 0:
                continue
            if number > 0 and set(told) != set(found[name]):
                raise ValueError(f"{name!r} gave {sorted(told)} in round {number}, and {sorted(found[name])} before")
            for figure, value in told.items():
                found[name].setdefault(figure, []).append(float(value))
    spreads = {name: {figure: Spread(tuple(each)) for figure, each in all_.items()} for name, all_ in found.items()}
    return Comparison(title, spreads)


def gathered(title: str, figures: Mapping[str, Mapping[str, float | Sequence[float]]]) -> Comparison:
    """What a benchmark has measured by itself: method, figure, its value in each round (or the only one)."""
    spreads = {
        method: {
            figure: Spread((float(found),) if isinstance(found, (int, float)) else tuple(map(float, found)))
            for figure, found in each.items()
        }
        for method, each in figures.items()
    }
    return Comparison(title, spreads)


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 7) -> None:
    """``--rounds``, ``--json``, ``--plot`` and ``--strict``."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"alternated rounds (default {rounds})")
    parser.add_argument("--json", type=Path, help="write all figures to this file, too")
    parser.add_argument("--plot", type=Path, help="draw all figures to this file (.svg, .png or .pdf), too")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a target is missed")


def setting(libraries: Sequence[str] = ()) -> dict[str, Any]:
    """The command, the machine, the versions of torch and `libraries`, and how busy the machine is."""
    cpu = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), cpu)
    cores = len(os.sched_getaffinity(0))
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{cores} x {cpu}, {platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", *libraries)},
        },
        "load": os.getloadavg()[0],
    }


@dataclass
class Report:
    """Prints each comparison as it comes, and keeps all of them for the files."""

    args: argparse.Namespace
    """What `add_arguments` has added."""
    libraries: Sequence[str] = ()
    """Whose versions are told besides torch's."""
    setting: dict[str, Any] = field(init=False)
    entries: list[dict[str, Any]] = field(default_factory=list)
    missed: int = 0

    def __post_init__(self) -> None:
        self.setting = setting(self.libraries)
        versions = ", ".join(f"{name} {version}" for name, version in self.setting["versions"].items())
        print(f"command   {self.setting['command']}")
        print(f"machine   {self.setting['machine']}, load {self.setting['load']:.1f}")
        print(f"versions  {versions}", flush=True)

    def add(
        self,
        compared: Comparison,
        *,
        base: str | None = None,
        targets: Sequence[Target] = (),
        scale: float = 1.0,
        unit: str = "s",
    ) -> list[Verdict]:
        """Print one table; figures are told times `scale` in `unit`, ratios as they are."""
        verdicts = [target.judge(compared, base) for target in targets]
        self.missed += sum(not verdict.met for verdict in verdicts)
        for line in _table(compared, base, scale, unit):
            print(line)
        for verdict in verdicts:
            what = f"{verdict.target.method}, {verdict.target.figure}"
            print(f"  {'met' if verdict.met else 'MISSED'}: {what} {verdict.wanted}: {verdict.reached:.3g}")
        sys.stdout.flush()
        methods = {
            name: {figure: spread.as_dict() for figure, spread in figures.items()}
            for name, figures in compared.figures.items()
        }
        told = [verdict.as_dict() for verdict in verdicts]
        entry = {"title": compared.title, "base": base, "methods": methods, "targets": told}
        self.entries.append({**entry, "scale": scale, "unit": unit})
        return verdicts

    def end(self) -> int:
        """Write the files, and return the exit code. Raises ModuleNotFoundError for --plot without matplotlib."""
        load = os.getloadavg()[0]
        print(f"load at the end {load:.1f}; {self.missed} targets missed")
        if self.args.json is not None:
            told = {**self.setting, "load at the end": load, "results": self.entries}
            self.args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        if self.args.plot is not None:
            plot(self.entries, f"{self.setting['command']}\n{self.setting['machine']}", self.args.plot)
        return 1 if self.missed and self.args.strict else 0


def plot(entries: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw what `Report` has kept: for each comparison a bar for each figure of each method, from 0 to its median, with
    its least and most."""
    from matplotlib.figure import Figure  # no window, no global state

    bars = [
        [
            (name if figure == SECONDS else f"{name}, {figure}", spread)
            for name, figures in each["methods"].items()
            for figure, spread in figures.items()
        ]
        for each in entries
    ]
    drawn = Figure(figsize=(9.0, 1.0 + sum(0.6 + 0.3 * len(each) for each in bars)), layout="constrained")
    drawn.suptitle(title, fontsize=8)
    axes = drawn.subplots(len(entries), 1, squeeze=False, gridspec_kw={"height_ratios": [len(each) for each in bars]})
    for axis, entry, rows in zip(axes[:, 0], entries, bars, strict=True):
        medians, least, most = (
            [entry["scale"] * spread[key] for _, spread in rows] for key in ("median", "min", "max")
        )
        below = [middle - low for middle, low in zip(medians, least, strict=True)]
        above = [high - middle for middle, high in zip(medians, most, strict=True)]
        axis.barh([name for name, _ in rows], medians, xerr=[below, above], capsize=2)
        axis.invert_yaxis()
        axis.set_title(f"{entry['title']} ({entry['unit']})", fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
    drawn.savefig(path)


def _values(compared: Comparison, method: str, figure: str) -> tuple[float, ...]:
    """A zero, which no ratio can be made of, where the method has no such figure."""
    spread = compared.figures[method].get(figure)
    return (0.0,) if spread is None else spread.values


def _table(compared: Comparison, base: str | None, scale: float, unit: str) -> Iterator[str]:
    yield f"\n{compared.title} ({unit})"
    width = max(len(name) for name in compared.figures)
    labels = sorted({figure for figures in compared.figures.values() for figure in figures})
    column = max(len(label) for label in labels)
    ratios = f"   x {base}: median, min, max" if base is not None else ""
    yield f"  {'':<{width}} {'':<{column}} {'rounds':>6} {'median':>10} {'min':>10} {'max':>10}{ratios}"
    for name, figures in compared.figures.items():
        for figure, spread in figures.items():
            told = [f"{value * scale:>10.4g}" for value in (spread.median, spread.least, spread.most)]
            line = f"  {name:<{width}} {figure:<{column}} {len(spread.values):>6} {' '.join(told)}"
            if base is not None and name != base and all(_values(compared, base, figure)):
                ratio = compared.times_as_long(name, base, figure)
                line += f"{ratio.median:>16.3g} {ratio.least:>8.3g} {ratio.most:>8.3g}"
            yield line
