"""Stops a job at random moments, again and again, and insists on the uninterrupted run's weights.

    python -m tests.drill [--rounds 20] [--seed 0]

A round is one job: its number of ranks, loader workers and accumulation, and for each interruption the signal, its
target, the step and a delay of some milliseconds inside the step are drawn from the seed. Every round is printed; the
first one that ends with other weights, trains a sample twice or never, or is told that a resumed step differs, stops
the drill with both outputs.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.harness import Job, events, run_job, start_job, unignore_signals
from tests.watchdog import Stalled

SIZE, BATCH, EPOCHS = 90, 5, 3
WAYS: list[tuple[int, tuple[object, ...]]] = [
    (1, ()),
    (1, ("--num-workers", 2)),
    (1, ("--accumulate", 3)),
    (2, ("--num-workers", 1)),
    (3, ()),
    (4, ("--accumulate", 2)),
]


def interrupt(job: Job, rng: random.Random, ranks: int) -> str:
    """Signal the job at a random moment; says what was done. Nothing, if the job was quicker."""
    steps = EPOCHS * SIZE // BATCH
    job.wait_for("READY", count=ranks)
    wanted = rng.randrange(1, steps)
    try:
        job.wait_for("SEEN", count=wanted)
    except Stalled:
        raise
    except AssertionError:
        return "finished first"
    time.sleep(rng.random() * 0.02)  # anywhere in a step: this is the point of a drill, not an order of events
    target = rng.choice(["one", "all", "launcher"])
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]) if ranks == 1 else signal.SIGTERM
    try:
        if target == "launcher" and ranks > 1:
            job.process.send_signal(number)
        else:
            for rank in range(ranks) if target == "all" else [rng.randrange(ranks)]:
                job.signal_rank(rank, number)
    except ProcessLookupError:
        return "finished first"
    return f"{number.name} to {target} after {wanted} batches"


def one_round(rng: random.Random, reference: dict[object, Job], folder: Path) -> str:
    """One job with up to three interruptions. Returns what was done; raises AssertionError when it ends differently."""
    ranks, args = rng.choice(WAYS)
    key = (ranks, args)
    if key not in reference:
        reference[key] = run_job("loop.py", folder / f"reference-{len(reference)}", *args, ranks=ranks)
    directory = Path(tempfile.mkdtemp(dir=folder))
    done, outputs = [], []
    seen: dict[int, list[int]] = {}
    for attempt in range(4):
        with start_job("loop.py", directory, *args, ranks=ranks) as job:
            if attempt < 3:
                done.append(interrupt(job, rng, ranks))
            job.wait()
        outputs.append(job.report())
        for epoch, indices in job.seen().items():
            seen.setdefault(epoch, []).extend(indices)
        if len(job.hashes()) == ranks:
            break
    everything = "\n\n".join(outputs)
    if job.hashes() != reference[key].hashes():
        raise AssertionError(f"other weights after {done}\n{everything}")
    if "--accumulate" not in args:  # a stop inside a window trains its first batches again, from the same state
        for epoch in range(1, EPOCHS + 1):
            assert sorted(seen.get(epoch, [])) == list(range(SIZE)), f"epoch {epoch} after {done}\n{everything}"
    saved = sorted({event["step"] for event in events(directory, "durable")})
    outcomes = Counter(event["outcome"] for event in events(directory, "compared"))
    assert outcomes.keys() <= {"verified"}, f"{outcomes} after {done}, and equal weights\n{everything}"
    what = f"{ranks} ranks {' '.join(map(str, args))}: {'; '.join(done)}; saved at {saved}"
    return f"{what}; {outcomes.total()} comparisons verified"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    unignore_signals()
    reference: dict[object, Job] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            seed = args.seed * 1_000_003 + number
            try:
                print(
                    f"round {number} (seed {seed}): {one_round(random.Random(seed), reference, Path(folder))}",
                    flush=True,
                )
            except AssertionError as error:
                sys.exit(f"round {number} (seed {seed}) failed: {error}")
    print(f"{args.rounds} rounds, all equal to their uninterrupted runs")


if __name__ == "__main__":
    main()
