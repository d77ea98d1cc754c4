"""Many schedules of a simulation, by their seeds, and the story of one: what all simulations here share."""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from mindx_elastic.core.events import logger

__all__ = ["Played", "main", "quiet", "shrink", "tell"]

PlanT = TypeVar("PlanT", bound=Any)


class Played(Protocol):
    """What a schedule came to."""

    story: list[tuple[float, str]]
    """What happened, for people, and when."""
    wrong: list[str]
    """Empty: all that must hold does."""


def shrink(plan: PlanT, is_wrong: Callable[[PlanT], bool]) -> PlanT:
    """The same failure with the fewest `plan.faults` that still show it."""
    found = True
    while found:
        found = False
        for number in range(len(plan.faults)):
            smaller = replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
            if is_wrong(smaller):
                plan, found = smaller, True
                break
    return plan


@contextmanager
def quiet() -> Iterator[None]:
    """Thousands of schedules would be logged."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def tell(plan: PlanT, play: Callable[[PlanT], Any]) -> str:
    """The story of one schedule."""
    outcome: Played = play(plan)
    lines = [f"{when - 1000:9.4f} s  {text}" for when, text in outcome.story]
    return "\n".join([str(plan), *lines, *(f"WRONG: {text}" for text in outcome.wrong)])


def _play_all(
    plan_of: Callable[[int], Any], play: Callable[[Any], Any], count: Callable[[Any], Counter[str]], seeds: range
) -> tuple[Counter[str], list[tuple[int, list[str]]]]:
    gc.freeze()  # torch's objects need not be looked at each time that those of a world are collected
    counts: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        outcome = play(plan_of(seed))
        counts["schedules"] += 1
        counts += count(outcome)
        if outcome.wrong:
            failed.append((seed, outcome.wrong))
    return counts, failed


def main(
    arguments: Sequence[str],
    *,
    about: str | None,
    plan_of: Callable[[int], Any],
    play: Callable[[Any], Any],
    count: Callable[[Any], Counter[str]],
    play_told: Callable[[Any], Any] | None = None,
) -> int:
    """The command line of a simulation; 1: something was wrong. The first three functions are found by name in their
    module, for the processes that play the schedules import it. `play_told`: as `play`, with a longer story."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="tell the story of this one, with the fewest faults that show it")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        plan = plan_of(options.seed)
        if play(plan).wrong:
            plan = shrink(plan, lambda smaller: bool(play(smaller).wrong))
        print(tell(plan, play_told or play))
        return 0
    began = time.monotonic()
    seeds = range(options.first, options.first + options.schedules)
    parts = [seeds[start : start + 50] for start in range(0, len(seeds), 50)]
    total: Counter[str] = Counter()
    failed = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for counts, wrong in pool.imap_unordered(functools.partial(_play_all, plan_of, play, count), parts):
            total += counts
            failed += wrong
            for seed, texts in wrong:
                print(f"seed {seed}: {'; '.join(texts)}", flush=True)
    took = time.monotonic() - began
    for name, number in sorted(total.items()):
        print(f"{name}: {number:,}")
    print(f"{total['schedules'] / took:.0f} schedules a second, {len(failed)} wrong")
    return 1 if failed else 0
