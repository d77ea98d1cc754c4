"""Plays many schedules of a simulation, or tells the story of one.

    python -m tests.simulation stops --schedules 100000 --first 0 --jobs 2
    python -m tests.simulation cluster --seed 4711         # its story, with the fewest faults that show it

Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import import_module

from tests.simulation.schedules import play_all, shrink, tell

NAMES = "stops", "agents", "in_place", "cluster", "files"
_AT_ONCE = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulation", choices=NAMES)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--until-wrong", action="store_true", help="end where one is")
    options = parser.parse_args()
    if options.seed is not None:
        module = import_module(f"tests.simulation.{options.simulation}")
        plan = module.plan_of(options.seed)
        if module.play(plan).wrong:
            plan = shrink(plan, lambda smaller: bool(module.play(smaller).wrong))
        print(tell(plan, getattr(module, "play_told", module.play)))
        return 0
    began = time.monotonic()
    seeds = range(options.first, options.first + options.schedules)
    parts = [seeds[start : start + _AT_ONCE] for start in range(0, len(seeds), _AT_ONCE)]
    total: Counter[str] = Counter()
    failed = 0
    play = functools.partial(play_all, options.simulation)
    with ExitStack() as stack:
        played: Iterable[tuple[Counter[str], list[tuple[int, list[str]]]]] = map(play, parts)
        if options.jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(options.jobs))
            played = pool.imap_unordered(play, parts)
        for counts, wrong in played:
            total += counts
            failed += len(wrong)
            for seed, texts in wrong:
                print(f"seed {seed}: {'; '.join(texts)}", flush=True)
            if failed and options.until_wrong:
                break
    took = time.monotonic() - began
    for name, number in sorted(total.items()):
        print(f"{name}: {number:,}")
    print(f"{total['schedules'] / took:.0f} schedules a second, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
