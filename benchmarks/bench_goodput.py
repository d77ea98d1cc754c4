"""Share of the undisturbed step rate that is left when a rank is killed again and again: ours beside torchrun.

    python benchmarks/bench_goodput.py [--ranks 2] [--minutes 5] [--every 20] [--methods spare,zygote,restart,torchrun]
    python benchmarks/bench_goodput.py --methods torchrun --intervals 10,20,40,80 --search-minutes 1

The job is that of bench_recovery.py. After `--warm` seconds one rank after the other is killed every `--every` seconds.
A step counts once, when it is done for the first time. The rate without kills is measured in the same run, before each
method, for three times `--every`.

torchrun writes a checkpoint every N steps. Which N is best depends on what a checkpoint costs and how often a rank
dies, so it is searched: a short run with kills for each of `--intervals`, and the one with the most new steps a second
is taken. With a single interval there is no search.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import harness
from bench_recovery import (
    METHODS,
    job,
    lines,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills (default 20)")
    parser.add_argument(
        "--warm", type=float, default=12.0, help="seconds of training before the first kill (default 12)"
    )
    parser.add_argument(
        "--intervals", default="5,10,20,40,80", help="torchrun's checkpoints, in steps; the best is searched"
    )
    parser.add_argument("--search-minutes", type=float, default=1.0, help="of each interval (default 1)")
    parser.add_argument("--methods", default=",".join(METHODS))
    harness.add_arguments(parser, rounds=1)
    args = parser.parse_args()
    args.mebibytes = 0
    intervals = [int(each) for each in args.intervals.split(",")]
    args.save_every = intervals[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = harness.Report(args)
    chosen = args.methods.split(",")
    every = dict.fromkeys(chosen, args.save_every)
    if "torchrun" in chosen:
        every["torchrun"] = best_interval(intervals, args)

    def sample(method: str) -> dict[str, float]:
        args.save_every = every[method]
        quiet, _ = rate(method, args, seconds=3 * args.every, kills=False)
        busy, kills = rate(method, args, seconds=60 * args.minutes, kills=True)
        return {"steps a second": busy, "without kills": quiet, "share": busy / quiet, "kills": kills}

    methods: dict[str, harness.Method] = {method: lambda method=method: sample(method) for method in chosen}  # type: ignore[misc]
    title = f"{args.ranks} ranks, a kill every {args.every:g} s for {args.minutes:g} minutes"
    report.add(harness.compare(title, methods, rounds=args.rounds), unit="steps a second")
    return report.end()


def best_interval(intervals: Sequence[int], args: argparse.Namespace) -> int:
    """The steps between two checkpoints with which torchrun makes the most new steps a second under kills."""
    if len(intervals) == 1:
        return intervals[0]
    found: dict[int, float] = {}
    for each in intervals:
        args.save_every = each
        found[each], kills = rate("torchrun", args, seconds=60 * args.search_minutes, kills=True)
        print(f"  torchrun, a checkpoint every {each:>4} steps: {found[each]:6.2f} a second, {kills} kills", flush=True)
    best = max(found, key=found.__getitem__)
    print(f"  torchrun goes on with a checkpoint every {best} steps", flush=True)
    return best


def rate(method: str, args: argparse.Namespace, *, seconds: float, kills: bool) -> tuple[float, int]:
    """New steps a second, and how often a rank was killed."""
    with job(method, args.ranks, args, max_restarts=1000) as (process, _):
        return follow(process, args, seconds, kills=kills)


def follow(
    process: subprocess.Popen[bytes], args: argparse.Namespace, seconds: float, *, kills: bool
) -> tuple[float, int]:
    pids: dict[int, int] = {}
    began: float | None = None
    first_step = newest = count = 0
    started = next_kill = 0.0
    for rank, step, pid, at in lines(process):
        pids[rank] = pid
        newest = max(newest, step)
        began = at if began is None else began
        if not started and at - began > args.warm:
            started, first_step, next_kill = at, newest, at + args.every / 2
        if started and at - started > seconds:
            return (newest - first_step) / (at - started), count
        if started and kills and at > next_kill:
            next_kill += args.every
            os.kill(pids[count % args.ranks], signal.SIGKILL)
            count += 1
    raise RuntimeError(f"the job has ended too early, after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
