"""What each trainer loses at a SIGTERM by its own means, and with the integration: the same jobs, the same stop.

    python benchmarks/bench_trainers.py [--only lightning]

Each job runs without a stop, is stopped behind the same step, and started again by the same command.
"again" are the steps that were done twice; "equal" says whether all that the job has written of its training (losses or
weights of each step, learning rates, means, log histories, the weights' hash) is that of the job that was not stopped,
once what was done twice is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness

ROOT = Path(__file__).parents[1]
HANGS_S = 240.0
"""A stopped job that has not ended after so long hangs: it is killed then, as a platform would."""
STOP = ["--stop-at", "7"]
EVERY_5 = ["save_strategy=steps", "save_steps=5"]
_PID = re.compile(r"^((?:STEP|MEAN|VALUE) \S+ \S+) \d+ ")


@dataclass(frozen=True)
class Kind:
    library: str
    name: str
    ranks: int
    options: Sequence[str]
    """Of both means."""
    own: Sequence[str]
    """Of the library's own."""
    stop: Sequence[str] = tuple(STOP)


def _hf(*settings: str) -> list[str]:
    return ["--set", *EVERY_5, *settings]


KINDS = [
    Kind("lightning", "plain", 1, [], ["--own"]),
    Kind("lightning", "validation in mid-epoch", 1, ["--validate", "0.5"], ["--own"]),
    Kind("lightning", "accumulation, 2 workers", 1, ["--accumulate", "3", "--workers", "2"], ["--own"]),
    Kind("lightning", "2 ranks", 2, [], ["--own"], ["--stop-at", "3", "--stop-rank", "1"]),
    Kind("transformers", "plain", 1, _hf(), ["--own"]),
    Kind("transformers", "evaluation every 4", 1, _hf("eval_strategy=steps", "eval_steps=4"), ["--own"]),
    Kind("transformers", "accumulation", 1, _hf("gradient_accumulation_steps=2"), ["--own"]),
    Kind("transformers", "2 workers", 1, _hf("dataloader_num_workers=2"), ["--own"]),
    Kind("accelerate", "plain", 1, [], ["--own", "5"]),
    Kind("accelerate", "accumulation", 1, ["--accumulate", "3"], ["--own", "5"]),
    Kind("accelerate", "2 ranks", 2, [], ["--own", "5"], ["--stop-at", "4", "--stop-rank", "1"]),
]


@dataclass(frozen=True)
class Run:
    code: int | None
    """None: it hung."""
    lines: Sequence[str]


def run(kind: Kind, folder: Path, options: Sequence[str]) -> Run:
    script = [str(ROOT / "tests" / "jobs" / f"integrations_{kind.library}.py"), str(folder), *kind.options, *options]
    if kind.library == "transformers" and "--own" in options:  # behind --set, which takes all that follows
        script = [script[0], script[1], "--own", *(o for o in [*options, *kind.options] if o != "--own")]
    elif kind.library == "transformers":
        script = [script[0], script[1], *options, *kind.options]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={kind.ranks}", "--max-restarts=0"]
    command = [sys.executable, *(launcher if kind.ranks > 1 else []), *script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=HANGS_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        for child in Path("/proc").glob("[0-9]*/environ"):  # torch's workers lead sessions of their own
            _kill_if_of(child, str(folder))
        output, _ = process.communicate()
        code = None
    lines = [_PID.sub(r"\1 ", line) for line in output.splitlines()]
    return Run(code, [line for line in lines if re.match("STEP|MEAN|VALUE|EVAL|LOG|HASH", line)])


def _kill_if_of(environ: Path, folder: str) -> None:
    try:
        if folder.encode() in environ.with_name("cmdline").read_bytes():
            os.kill(int(environ.parent.name), 9)
    except (OSError, ValueError):
        pass


def steps(lines: Sequence[str]) -> set[str]:
    return {" ".join(line.split()[:3]) for line in lines if line.startswith("STEP")}


def measure(kind: Kind, own: bool, base: Path) -> tuple[str, ...]:
    options = list(kind.own) if own else []
    straight = run(kind, base / "straight", options)
    stopped = run(kind, base / "stopped", [*options, *kind.stop])
    again = run(kind, base / "stopped", options)
    shutil.rmtree(base, ignore_errors=True)
    twice = len({step.split()[1] for step in steps(stopped.lines) & steps(again.lines)})
    last = [line for line in again.lines if line.startswith("HASH")]
    weights = bool(last) and last == [line for line in straight.lines if line.startswith("HASH")]
    done = {line for line in stopped.lines if " ".join(line.split()[:3]) not in steps(again.lines)}
    lines = bool(last) and {*done, *again.lines} == {*straight.lines}
    code = "hangs" if stopped.code is None else str(stopped.code)
    means = "own" if own else "mindx_elastic"
    result = "no end" if not last else "yes" if lines else "weights only" if weights else "no"
    return (kind.library, kind.name, str(kind.ranks), means, code, str(twice), result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted({kind.library for kind in KINDS}))
    args = parser.parse_args()
    told = harness.setting(("lightning", "transformers", "accelerate"))
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    print(f"{told['command']}\n{told['machine']}\n{versions}")
    row = "{:13} {:24} {:>5} {:14} {:>9} {:>6} {}"
    print(row.format("library", "job", "ranks", "means", "exit code", "again", "equal"), flush=True)
    for kind in KINDS:
        for own in (True, False):
            if args.only in (None, kind.library):
                with tempfile.TemporaryDirectory() as folder:
                    print(row.format(*measure(kind, own, Path(folder) / "job")), flush=True)


if __name__ == "__main__":
    main()
