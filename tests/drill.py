"""Random faults on the example and on three loops, alone and under the agent; one line a fault.

    python -m tests.drill [--faults 100] [--seed 0]
    python -m tests.drill --faults 1000 --seed 1 --log faults.txt
    python -m tests.drill --only words-2 --faults 50 --seed 7

Each setting is a loop, its number of ranks and options of the agent. The faults are shared among the settings by their
weights, and drawn as `mindx-elastic drill --random` draws them. Whatever is not exact is printed with its reason; the
line in the log says which setting and seed made it, so that the same faults can be had again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindx_elastic.drill.drill import GOOD, Drill, Driller, DrillResult
from mindx_elastic.drill.faults import parse_fault
from mindx_elastic.prove.runs import Command, Runs

HERE = Path(__file__).parent
WORDS, NETWORKS = str(HERE / "jobs" / "drilled_words.py"), str(HERE / "jobs" / "drilled_networks.py")
SHARDED = str(HERE / "jobs" / "fsdp.py")
EXAMPLE = str(HERE.parent / "examples" / "resnet_cifar10" / "train.py")
W = (WORDS, "out", "--size", "240")
TRAIN = (EXAMPLE, "--batch-size", "4", "--epochs", "2", "--train-url", "out")
IN_PLACE = ("--recover", "in-place", "--snapshot-every", "1", "--hang-timeout", "20")
AGAIN = ("--max-restarts", "99", "--snapshot-every", "1", "--hang-timeout", "20")


@dataclass(frozen=True)
class Setting:
    script: tuple[str, ...]
    ranks: int
    agent: tuple[str, ...] | None
    """Options of the agent; None: the script is started by itself."""
    weight: int
    steps: int
    faults: tuple[str, ...] = ()
    """Made besides the drawn ones, once a seed."""


SETTINGS = {
    "words-2": Setting((*W, "--num-workers", "1"), 2, IN_PLACE, 90, 48, ("stop:rank=1,step=20",)),
    "words-3": Setting(W, 3, IN_PLACE, 90, 48, ("stop:rank=2,step=20",)),
    "words-4": Setting(W, 4, IN_PLACE, 80, 48, ("stop:rank=3,step=20",)),
    "words-4-restart": Setting(W, 4, AGAIN, 60, 48, ("stop:rank=1,step=20",)),
    "networks-2": Setting((NETWORKS, "out"), 2, AGAIN, 90, 48, ("stop:step=20",)),
    "networks-3": Setting((NETWORKS, "out", "--num-workers", "1"), 3, AGAIN, 90, 48),
    "networks-4": Setting((NETWORKS, "out"), 4, IN_PLACE, 80, 48),
    "sharded-2": Setting((SHARDED, "out", "--steps", "48"), 2, AGAIN, 40, 48, ("stop:rank=1,step=20",)),
    "example-2": Setting((*TRAIN, "--limit-train", "200"), 2, AGAIN, 40, 32),
    "example-3": Setting((*TRAIN, "--limit-train", "300"), 3, IN_PLACE, 30, 32),
    "example-4": Setting((*TRAIN, "--limit-train", "400"), 4, AGAIN, 30, 32),
    "words-1-agent": Setting((*W, "--num-workers", "1"), 1, IN_PLACE, 60, 48, ("stop:step=20",)),
    "example-1-agent": Setting((*TRAIN, "--limit-train", "100"), 1, AGAIN, 30, 32),
    "words": Setting(W, 1, None, 60, 48),
    "words-workers": Setting((*W, "--num-workers", "1"), 1, None, 40, 48),
    "networks": Setting((NETWORKS, "out"), 1, None, 60, 48),
    "networks-workers": Setting((NETWORKS, "out", "--num-workers", "1"), 1, None, 40, 48),
    "example": Setting((*TRAIN, "--limit-train", "100"), 1, None, 30, 32),
}


def run_setting(name: str, number: int, seed: int, log: Path, timeout_s: float) -> Drill:
    """`number` faults by `seed`, and those of the setting."""
    setting, drill = SETTINGS[name], Drill()
    written = 0
    began = time.monotonic()

    def note(done: int, planned: int, what: str) -> None:
        nonlocal written
        written = write_lines(log, name, seed, drill.results, written)

    agent = None if setting.agent is None else ("--nproc-per-node", str(setting.ranks), *setting.agent)
    runs = Runs(Command(script=setting.script, agent=agent), timeout_s=timeout_s)
    with runs:
        Driller(
            runs,
            faults=[parse_fault(text) for text in setting.faults],
            number=number,
            seed=seed,
            steps=setting.steps,
            show=note,
            into=drill,
        ).drill()
    write_lines(log, name, seed, drill.results, written)
    for row in drill.proof.rows:
        if row.outcome != "equal":
            print(f"{name}: {row.name}: {row}", flush=True)
    counts = Counter(result.outcome for result in drill.results)
    print(f"{name}, seed {seed}: {dict(counts)}, in {time.monotonic() - began:.0f} s", flush=True)
    return drill


def write_lines(log: Path, name: str, seed: int, results: Sequence[DrillResult], written: int) -> int:
    with log.open("a", encoding="utf-8") as file:
        for result in results[written:]:
            codes = ",".join(map(str, result.codes))
            lost = "-" if result.lost is None else str(result.lost)
            file.write(f"{name} {seed} {result.fault} {codes} {lost} {result.outcome.replace(' ', '-')}\n")
            if result.outcome != "exact" and result.explained is not None:
                print(f"{name}, seed {seed}: {result.fault}: {result.outcome}: {result.explained.what[:600]}")
                if result.outcome not in GOOD:
                    print("\n".join(f"  | {line[:400]}" for line in [result.explained.cause, *result.lines]))
                sys.stdout.flush()
    return len(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--log", type=Path, default=Path(os.devnull))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a step or output: it hangs")
    args = parser.parse_args()
    os.chdir(HERE.parent)
    os.environ["PYTHONPATH"] = str(HERE.parent)  # the jobs import each other
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with what it has in memory removed
    whole = sum(SETTINGS[name].weight for name in args.only)
    bad = 0
    for name in args.only:
        number = -(-args.faults * SETTINGS[name].weight // whole)
        drill = run_setting(name, number, args.seed, args.log.absolute(), args.timeout)
        bad += drill.exit_code != 0
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
