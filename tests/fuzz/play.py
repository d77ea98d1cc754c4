"""Runs programs made by chance, stops them by chance: does each end with the numbers of its run without a stop?

    python -m tests.fuzz.play [--first 0] [--programs 200] [--ranks 1] [--jobs 2] [--keep FOLDER] [--system SYSTEM]
    python -m tests.fuzz.play --show 17          prints the program of a seed, and its faults

A seed is

* equal: the digests are those of the run without a death
* told: they are others, or there are none, and the package has said so. To be read: everything is named
* WRONG: they are others in silence, or the program did not come to a good end, has lost more steps than promised, or
  has left a process or memory behind

The last line counts the faults, too, and the seeds whose faults were never reached: those say nothing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.fork_server import clean_environment
from tests.fuzz.systems import SYSTEMS, run_cluster, write_for
from tests.fuzz.write import Program, write
from tests.watchdog import Stalled, finish

__all__ = ["Outcome", "play"]

_MOST_RUNS = 6
_TOLD = re.compile(r"not bit for bit|differ|not got back|changed inside|mindx_elastic\.errors\.\w+: ")
"""What says that numbers may be others, or refuses to go on. Errors that are not the package's own say neither: most of
them are the fault itself."""


@dataclass
class Outcome:
    seed: int
    verdict: str
    features: tuple[str, ...]
    num_fired: int = 0
    said: list[str] = field(default_factory=list)


def _run(program: Program, folder: Path, name: str, fault: str = "") -> tuple[int, str]:
    """Exit code and output of a run with the checkpoints `name`. Raises Stalled where it hangs."""
    (folder / name).mkdir(exist_ok=True)
    env = clean_environment() | {"OMP_NUM_THREADS": "1", "FAULT_KIT": str(folder / "site-packages")}
    env |= {
        "FAULTS": fault,
        "FAULT_RANK": str(program.seed % (program.cluster or 2) if program.agent or program.cluster else 0),
        "FAULT_MARKS": str(folder / name),
        "PLAYER": str(os.getpid()),
        "MINDX_ARENA_DIR": str(folder / "memory"),
    }
    env |= {"MS_ENABLE_TFT": "{TTP:1}", "MS_ENABLE_GRACEFUL_EXIT": "1"}
    for variable, file in ("FLAG_FILE", "checkpoints/graceful_exit.json"), ("MINDX_FAULT_DIR", "mounted"):
        env[variable] = env["MINDX_RESET_DIR"] = str(folder / name / file)
    (folder / name / "mounted").mkdir(exist_ok=True)
    if program.cluster:
        (folder / name / "train.py").write_text(program.text)
        return run_cluster(folder / name, env, program.cluster)
    command = [str(folder / "program.py"), str(folder / name / "checkpoints")]
    if program.agent:
        agent = [str(Path(sys.executable).with_name(program.agent[0])), *program.agent[1:]]
        if program.agent[0] == "torchrun":
            env["MINDX_SNAPSHOT_EVERY"] = program.snapshots
        else:
            agent += ["--run-dir", str(folder / name / "run")]
        command = [*agent, *command]
    done = finish([sys.executable, *command], env=env, fresh=False)
    return done.returncode, done.stdout + done.stderr + _wait_for_left(folder / name)


def _wait_for_left(marks: Path, most_s: float = 60.0) -> str:
    """Wait until no process of a run is left; a line for each that stays."""
    since = time.monotonic()
    while True:
        left = []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"FAULT_MARKS={marks}\0".encode() in (each / "environ").read_bytes():
                    left.append(f"LEFT {each.name} {(each / 'cmdline').read_bytes()!r}\n")
        if not left or time.monotonic() - since > most_s:
            return "".join(left)
        time.sleep(0.2)


def _may_lose(program: Program, fault: str) -> float:
    """Steps that docs/guarantees.md allows a run with these faults to lose; infinite where it says none."""
    # What a stop makes behind its boundary, only to leave its witness, is made again.
    again = "overlap=False" not in program.text and ("SIGTERM" in fault or "SIGINT" in fault or "@agent" in fault)
    kills = [whom for whom in re.findall(r"SIGKILL(@\w+)?", fault) if whom != "@agent"]
    if not kills or (program.has_replicas and len(kills) == 1 and kills != ["@all"]):
        return again
    return int(program.snapshots) + again if program.snapshots in "13" else math.inf


def _results(output: str) -> list[str]:
    """Each once: a rank that had ended before another one's death ends again in the job's next attempt."""
    return sorted({*re.findall(r"RESULT \d+ \w+ [0-9a-f]{12}", output)})


def program_of(seed: int, ranks: int, system: str) -> Program:
    """`system`: one of `SYSTEMS`; "": a loop with the plain guard."""
    return write(seed, ranks, tft=system == "tft") if system in ("", "tft") else write_for(system, seed, ranks)


def play(seed: int, ranks: int = 1, keep: Path | None = None, system: str = "") -> Outcome:
    """Run a seed's program without a death, and with its deaths. `keep`: where the files of one that is not equal stay;
    None: nowhere."""
    program = program_of(seed, ranks, system)
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{seed}-", dir=keep))
    outcome = Outcome(seed, "WRONG", program.features)
    try:
        (folder / "site-packages").mkdir()
        (folder / "memory").mkdir()
        shutil.copy(Path(__file__).with_name("fault_kit.py"), folder / "site-packages")
        (folder / "program.py").write_text(program.text)
        code, base = _run(program, folder, "base")
        (folder / "base.txt").write_text(base)
        if code or not (expected := _results(base)):
            outcome.said = [f"without a death it ends with {code}: {base[-800:]}"]
            return outcome
        output, faults, before, broken = "", [*program.faults], 0.0, False
        for number in range(_MOST_RUNS if not program.cluster else 1):
            fault = ",".join(faults) if program.cluster else faults.pop(0) if faults else ""
            code, output = _run(program, folder, "stopped", fault)
            (folder / f"run-{number}.txt").write_text(output)
            fired = re.findall(r"FAULT (\S+)", output)
            outcome.num_fired += len(fired)
            here = _may_lose(program, fault) if fired else 0.0
            before, allowed = here, max(before, here)  # a start loses what the run before it had
            outcome.said.append(f"run {number}: code {code}, {' '.join(fired) or 'no fault'}")
            outcome.said += [line for line in output.splitlines() if _TOLD.search(line) and line not in base]
            lost = [line for line in re.findall(r"LOST .*", output) if int(line.split()[1]) > allowed]
            left = re.findall(r"LEFT .*", output)
            outcome.said += [f"{line}, allowed {allowed}" for line in lost] + left
            broken = broken or bool(lost or left)
            if not faults and _results(output):
                break
            if "start with MINDX_FAULT_DIR" in output:  # the remedy that the refusal names
                shutil.rmtree(folder / "stopped" / "mounted")
        if not program.agent and not program.cluster and _results(output):  # finished: a start finds nothing to do
            code, output = _run(program, folder, "stopped")
            (folder / "again.txt").write_text(output)
            outcome.said.append(f"again: code {code}")
        if program.agent and _results(output) == expected and (memory := [*(folder / "memory").iterdir()]):
            outcome.said.append(f"left in memory: {memory}")
        elif broken:
            pass
        elif _results(output) == expected and (not code or program.cluster):
            outcome.verdict = "equal"
        else:
            outcome.said += [line for line in _results(output) if line not in expected]
            outcome.verdict = "told" if any(_TOLD.search(line) for line in outcome.said) else "WRONG"
        return outcome
    except Stalled as error:
        outcome.said.append(str(error))
        return outcome
    finally:
        if keep is None or outcome.verdict == "equal":
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--system", choices=("", *SYSTEMS), default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--show", type=int)
    args = parser.parse_args()
    if args.show is not None:
        program = program_of(args.show, args.ranks, args.system)
        print(program.text, "#", *program.features, *program.faults, *program.agent)
        return 0
    counts: Counter[str] = Counter()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        seeds = range(args.first, args.first + args.programs)
        one = partial(play, ranks=args.ranks, keep=args.keep, system=args.system)
        waiting = [pool.submit(one, seed) for seed in seeds]
        for each in concurrent.futures.as_completed(waiting):
            outcome = each.result()
            counts += Counter({outcome.verdict: 1, "faults": outcome.num_fired, "no fault": not outcome.num_fired})
            if outcome.verdict != "equal":
                print(f"seed {outcome.seed}: {outcome.verdict}", *outcome.features)
                print(*outcome.said, sep="\n    ", flush=True)
    print(dict(counts))
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
