"""Plays many schedules of one simulation or of all, or tells the story of one.

    python -m tests.simulation all --schedules 10000000 --jobs 2 --hours 8 --results benchmarks/results/simulation.md
    python -m tests.simulation stops --schedules 100000 --first 0 --jobs 2
    python -m tests.simulation cluster --seed 4711         # its story, with the fewest faults that show it

`all` plays each simulation for about the same time. Its figures are written again and again, so that a run that is
broken off has them, too. Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import torch

from tests.simulation.schedules import play_part, shrink, tell

SHARES = {"stops": 0.34, "cluster": 0.13, "agents": 0.12, "in_place": 0.15, "files": 0.26}
"""Of the schedules of `all`: each takes as much time as the others."""
_AT_ONCE, _WRITE_AGAIN_S = 50, 60.0


def parts(shares: dict[str, float], first: int, schedules: int) -> Iterator[tuple[str, range]]:
    """Few schedules of each simulation in turn, by their shares of so many."""
    began = dict.fromkeys(shares, first)
    ends = {name: first + round(schedules * share) for name, share in shares.items()}
    while due := [name for name in shares if began[name] < ends[name]]:
        name = min(due, key=lambda each: (began[each] - first) / shares[each])
        yield name, range(began[name], min(began[name] + _AT_ONCE, ends[name]))
        began[name] += _AT_ONCE


def results(totals: dict[str, Counter[str]], wrong: list[str], took_s: float, options: argparse.Namespace) -> str:
    """The figures, as a page."""
    command = f"python -m tests.simulation {options.simulation} --schedules {options.schedules} --first {options.first}"
    where = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    lines = [
        f"`{command} --jobs {options.jobs}`, {time.strftime('%F')}, {where}: {took_s / 3600:.2f} hours.",
        "",
        "| simulation | schedules | a CPU second | simulated hours | turns of threads or calls | messages |",
        "|---|---|---|---|---|---|",
    ]
    for name, total in totals.items():
        rate, events = total["schedules"] / max(1, total["cpu_ms"]) * 1000, total["switches"] + total["calls"]
        lines.append(
            f"| {name} | {total['schedules']:,} | {rate:.0f} | {total['seconds'] / 3600:,.1f} | {events:,} | "
            f"{total['messages']:,} |"
        )
    for name, total in totals.items():
        faults = {kind[7:]: number for kind, number in sorted(total.items()) if kind.startswith("fault: ")}
        lines += ["", f"Faults of {name}: " + ", ".join(f"{kind} {number:,}" for kind, number in faults.items())]
    all_ = sum(total["schedules"] for total in totals.values())
    return "\n".join([*lines, "", f"{all_:,} schedules, {len(wrong)} wrong", *wrong]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulation", choices=("all", *SHARES))
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--hours", type=float, default=float("inf"), help="end after so long")
    parser.add_argument("--results", type=Path, help="a file for the figures")
    parser.add_argument("--until-wrong", action="store_true", help="end where one is")
    options = parser.parse_args()
    if options.seed is not None:
        module = import_module(f"tests.simulation.{options.simulation}")
        plan = module.plan_of(options.seed)
        if module.play(plan).wrong:
            plan = shrink(plan, lambda smaller: bool(module.play(smaller).wrong))
        print(tell(plan, getattr(module, "play_told", module.play)))
        return 0
    began = written = time.monotonic()
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failed: list[str] = []
    todo = parts(SHARES if options.simulation == "all" else {options.simulation: 1.0}, options.first, options.schedules)
    with ExitStack() as stack:
        played: Iterable[tuple[str, Counter[str], list[tuple[int, list[str]]]]] = map(play_part, todo)
        if options.jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(options.jobs))
            played = pool.imap_unordered(play_part, todo)
        for name, counts, wrong in played:
            totals[name] += counts
            for seed, texts in wrong:
                failed.append(f"{name}, seed {seed}: {'; '.join(texts)}")
                print(failed[-1], flush=True)
            now = time.monotonic()
            if options.results is not None and now > written + _WRITE_AGAIN_S:
                written = now
                options.results.write_text(results(totals, failed, now - began, options), encoding="utf-8")
            if (failed and options.until_wrong) or now > began + 3600 * options.hours:
                break
    text = results(totals, failed, time.monotonic() - began, options)
    if options.results is not None:
        options.results.write_text(text, encoding="utf-8")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
