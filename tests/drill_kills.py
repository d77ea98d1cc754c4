"""Kills jobs under `mindx-elastic run` at random moments, again and again, and insists on the uninterrupted weights.

    python -m tests.drill_kills [--rounds 20] [--seed 0]

A round is one job. Drawn from the seed: its number of ranks and its way of training, and two to four faults: SIGKILL to
one rank, to all ranks, to the agent (the same command is then given again), SIGSTOP to a rank (found as a hang, or
after the training as one that does not end). The drill keeps a ledger of its own from the lines that the job prints
after each step: no step that every rank had passed may be done again. Every round is printed; the first one that
differs stops the drill with all outputs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.harness import Job, run_job, start_agent, unignore_signals
from tests.watchdog import Stalled, Watchdog

EPOCHS, SIZE, BATCH = 6, 90, 5
FSDP_STEPS = 80
GRACE = ("--grace", "20")
WAYS: list[tuple[str, int, tuple[object, ...]]] = [
    ("loop.py", 1, ()),
    ("loop.py", 1, ("--num-workers", 1)),
    ("loop.py", 2, ()),
    ("loop.py", 2, ("--accumulate", 2)),
    ("loop.py", 3, ()),
    ("loop.py", 4, ()),
    ("fsdp.py", 2, ()),
    ("fsdp.py", 4, ()),
]


def passed(job: Job) -> dict[int, int]:
    """The last step that each rank has passed in the attempt that runs, from the PASSED lines."""
    steps: dict[int, int] = {}
    for line in job.lines:
        if match := re.search(r"READY (\d+) \d+ (\w+)", line):
            steps[int(match[1])] = 0 if match[2] == "None" else int(match[2])
        elif match := re.search(r"PASSED (\d+) (\d+)", line):
            steps[int(match[1])] = int(match[2])
    return steps


class Round:
    """One job and what is done to it."""

    def __init__(self, seed: int, folder: Path, reference: dict[object, Job]) -> None:
        self.rng = random.Random(seed)
        self.script, self.ranks, args = self.rng.choice(WAYS)
        sharded = self.script == "fsdp.py"
        self.steps = FSDP_STEPS if sharded else EPOCHS * SIZE // (BATCH * self.ranks)
        self.args = ("--steps", FSDP_STEPS) if sharded else (*args, "--epochs", EPOCHS, "--say-passed")
        # Without a replica only a snapshot of every step loses nothing; with one, nothing is lost without any.
        self.replicated = self.ranks > 1 and not sharded
        self.every = self.rng.choice(["1", "auto", "0"]) if self.replicated else "1"
        self.key = (self.script, self.ranks, self.args)
        self.folder, self.reference = folder, reference
        self.done: list[str] = []
        self.outputs: list[str] = []
        self.faults = self.rng.randint(2, 4)

    def run(self) -> str:
        if self.key not in self.reference:
            place = self.folder / f"reference-{len(self.reference)}"
            self.reference[self.key] = run_job(self.script, place, *self.args, ranks=self.ranks)
        expected = self.reference[self.key].hashes()
        directory = Path(tempfile.mkdtemp(dir=self.folder))
        for _ in range(6):
            with ExitStack() as stack:
                job = stack.enter_context(self.start(directory))
                again = self.hurt(job)
                code = job.wait()
                self.outputs.append(job.report())
                self.check_ledger(job)
            cut_off = {int(match[1]) for match in job.matches(r"rank (\d+) has not ended .* after its training")}
            # A rank that was stopped just behind its guard may not have come to its last line.
            if len(job.hashes()) == self.ranks or (code == 0 and {*job.hashes(), *cut_off} == set(range(self.ranks))):
                break  # finished, if only just
            assert again, self.tell(f"exit code {code}")
        assert job.hashes().items() <= expected.items(), self.tell(
            f"other weights: {job.hashes()}, expected {expected}"
        )
        return f"{self.script} {self.ranks} ranks, snapshots {self.every}: {'; '.join(self.done)}"

    def start(self, directory: Path):  # type: ignore[no-untyped-def]
        options = ["--standalone", "--max-restarts", "20", "--crash-loop", "0", "--hang-timeout", "2", *GRACE]
        options += ["--exit-timeout", "5"]
        options += ["--snapshot-every", self.every]
        run_dir = directory / "run"
        env = {"MINDX_ARENA_DIR": str(self.arenas(directory))}
        return start_agent(
            self.script, directory, *self.args, ranks=self.ranks, options=options, env=env, run_dir=run_dir
        )

    @staticmethod
    def arenas(directory: Path) -> Path:
        place = Path("/dev/shm") / f"drill-{os.getpid()}-{directory.name}"
        place.mkdir(exist_ok=True)
        return place

    def hurt(self, job: Job) -> bool:
        """Do what is left to be done; True when the agent itself was killed and must be started again."""
        while self.faults > 0:
            self.faults -= 1
            wanted = self.rng.randrange(1, self.steps)
            if not self.wait_until(job, wanted, self.ranks):
                return False
            attempts = len(job.matches(r"READY 0 "))
            time.sleep(self.rng.random() * 0.02)  # anywhere in a step: the point of a drill, not an order of events
            target = self.choose()
            pids = job.pids()
            before = passed(job)
            try:
                if target == "agent":
                    os.kill(job.process.pid, signal.SIGKILL)
                elif target == "all":
                    for pid in pids.values():
                        os.kill(pid, signal.SIGSTOP)  # so that nobody sees another one die
                    for pid in pids.values():
                        os.kill(pid, signal.SIGKILL)
                else:
                    number = signal.SIGSTOP if target == "stop" else signal.SIGKILL
                    os.kill(pids[self.rng.randrange(self.ranks)], number)
            except ProcessLookupError:
                return False
            self.done.append(f"{target} at {min(before.values())}")
            if target == "agent":
                self.wait_for_orphans(pids)
                return True
            if self.rng.random() < 0.9:  # else the next one comes while this one is dealt with
                try:
                    job.wait_for(r"READY 0 ", count=attempts + 1)
                except Stalled:
                    raise
                except AssertionError:
                    return False  # it has ended
        return False

    def choose(self) -> str:
        targets = ["one", "one", "agent"]
        if self.every == "1":
            targets.append("all")
        if self.ranks > 1:
            targets.append("stop")
        return self.rng.choice(targets)

    @staticmethod
    def wait_until(job: Job, step: int, ranks: int) -> bool:
        """Until every rank has passed `step`; False when the job ended first."""
        watchdog = Watchdog(job.process.pid)
        while True:
            steps = passed(job)
            if job.hashes() or job.process.poll() is not None:
                return False
            if len(steps) == ranks and min(steps.values()) >= step:
                return True
            try:
                watchdog.check(len(job.lines))
            except Stalled as error:
                raise Stalled(f"step {step} was not reached: {error}\n{job.report()}") from None
            time.sleep(0.002)

    @staticmethod
    def wait_for_orphans(pids: dict[int, int]) -> None:
        end = time.monotonic() + 300
        while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
            assert time.monotonic() < end, f"workers {pids} outlive their agent"
            time.sleep(0.01)

    def check_ledger(self, job: Job) -> None:
        """No step that every rank had passed may be gone on from below."""
        steps: dict[int, int] = {}
        floor = getattr(self, "_floor", 0)
        for line in job.lines:
            if match := re.search(r"READY (\d+) \d+ (\w+)", line):
                resumed = 0 if match[2] == "None" else int(match[2])
                if len(steps) == self.ranks:
                    floor, steps = max(floor, min(steps.values())), {}
                assert resumed >= floor, self.tell(f"rank {match[1]} goes on from {resumed}, all had passed {floor}")
            elif match := re.search(r"PASSED (\d+) (\d+)", line):
                steps[int(match[1])] = int(match[2])
        if len(steps) == self.ranks:
            floor = max(floor, min(steps.values()))
        self._floor = floor

    def tell(self, problem: str) -> str:
        return f"{problem} after {self.done} ({self.ranks} ranks, snapshots {self.every})\n" + "\n\n".join(self.outputs)


def tidy(place: Path, what: str) -> None:
    """A finished job leaves nothing in shared memory; only an agent that was killed cannot remove its own folder."""
    left = [path for path in place.rglob("*") if path.is_file() and "agent-" not in path.parent.name]
    if left:
        sys.exit(f"{what}: left in shared memory: {left}")
    command = [sys.executable, "-m", "mindx_elastic.cli.main", "clean", "--base", str(place)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    left = list(place.rglob("*"))
    if left:
        sys.exit(f"{what}: `mindx-elastic clean` has left {left}")
    place.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    unignore_signals()
    reference: dict[object, Job] = {}
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            seed = args.seed * 1_000_003 + number
            one = Round(seed, Path(folder), reference)
            try:
                print(f"round {number} (seed {seed}): {one.run()}", flush=True)
            except AssertionError as error:
                sys.exit(f"round {number} (seed {seed}) failed: {error}")
            faults += len(one.done)
            for place in Path("/dev/shm").glob(f"drill-{os.getpid()}-*"):
                tidy(place, f"round {number} (seed {seed})")
    print(f"{args.rounds} rounds with {faults} faults, all equal to their uninterrupted runs, no step lost")


if __name__ == "__main__":
    main()
