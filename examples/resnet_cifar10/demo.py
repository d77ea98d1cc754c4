"""Shows the promise: a run that is stopped in mid-epoch and started again ends with the weights of one never stopped.

1. trains the example on two ranks, without interruption
2. trains it again in another folder and sends SIGTERM to one rank in the second epoch
3. runs the command of 2 once more

Then it compares. Exits 0 when everything is as promised and 1 when something is not. Needs no network; `make demo`
runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

TRAIN = Path(__file__).with_name("train.py")
RANKS, EPOCHS, BATCH, STEPS_PER_EPOCH = 2, 3, 32, 10
FLAGS = {
    "--epochs": EPOCHS,
    "--batch-size": BATCH,
    "--limit-train": RANKS * BATCH * STEPS_PER_EPOCH,
    "--num-workers": 1,
    "--log-steps": 1,
}
SIGNALLED_RANK = RANKS - 1  # any would do
STOP_AT = (2, 4)  # epoch and step in it: in the middle of both
SHOW_EVERY = 5  # step lines that the demo repeats
SILENT_S = 300.0  # without a line; a run says one at least each second, and one that hangs breaks the promise too

PID_LINE = re.compile(r"rank (\d+) of \d+: pid (\d+)")
STEP_LINE = re.compile(r"epoch: (\d+) step: (\d+), loss")
TORCHRUN_REPORT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")


TORCHRUN_LOG = re.compile(r"^[EW]\d{4} ", re.MULTILINE)  # from here on torchrun speaks about its workers


class BrokenPromise(Exception):
    """Something is not as the README says; the message tells what."""


@dataclass
class Run:
    """What one torchrun printed and left behind."""

    folder: Path
    stderr_file: Path
    exit_code: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(epoch, step in it) of every step that rank 0 has reported."""
    result: dict[str, Any] = field(default_factory=dict)
    """The last line's JSON."""
    signalled_at: float | None = None
    stderr: str = ""

    def read_line(self, line: str) -> None:
        """Take what the demo needs from one line of the training's stdout."""
        if match := PID_LINE.match(line):
            self.pids[int(match[1])] = int(match[2])
        elif match := STEP_LINE.match(line):
            self.steps.append((int(match[1]), int(match[2])))
        elif line.startswith("{"):
            self.result = json.loads(line)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of one kind in the folder's ``events.jsonl``, oldest first."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def expect(self, holds: bool, problem: str) -> None:
        """Raise BrokenPromise with the end of the run's stderr unless `holds`."""
        if not holds:
            of_workers = TORCHRUN_LOG.split(self.stderr, maxsplit=1)[0]
            tail = "\n".join(of_workers.strip().splitlines()[-15:])
            raise BrokenPromise(f"{problem}; see {self.stderr_file}, which says:\n{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Stop a training in mid-epoch, resume it, compare the weights.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the runs (demo-output)")
    output: Path = parser.parse_args().output
    console = Console(highlight=False, soft_wrap=True)
    try:
        return demonstrate(console, output)
    except BrokenPromise as error:
        console.print(Text(f"\nnot as promised: {error}", style="bold red"))
        return 1


def demonstrate(console: Console, output: Path) -> int:
    plain, stopped = output / "uninterrupted", output / "interrupted"
    for folder in (plain, stopped):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    console.print(f"[bold]1/3  train on {RANKS} ranks, uninterrupted[/]")
    reference = launch(console, plain)
    reference.expect(reference.exit_code == 0 and bool(reference.result), "the training did not end well")

    epoch, step = STOP_AT
    console.print(
        f"\n[bold]2/3  the same in another folder; SIGTERM to rank {SIGNALLED_RANK} in epoch {epoch} at step {step}[/]"
    )
    first = launch(console, stopped, interrupt=True)
    seconds = show_breakpoint(console, first)

    console.print("\n[bold]3/3  the same command again[/]")
    second = launch(console, stopped)
    second.expect(second.exit_code == 0 and bool(second.result), "the resumed training did not end well")
    return show_result(console, reference, first, second, seconds)


def launch(console: Console, folder: Path, *, interrupt: bool = False) -> Run:
    """Run the training under torchrun and show what it says; with `interrupt` send SIGTERM once it has come so far.

    Nothing is timed: the moment of the signal follows from the training's own output.
    """
    flags = [str(part) for pair in FLAGS.items() for part in pair]
    # --local-addr: a container's host name need not resolve, and torchrun would try for minutes.
    command = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(RANKS)]
    command += [os.path.relpath(TRAIN), "--train-url", str(folder), *flags]
    console.print(Text(f"$ torchrun {shlex.join(command)}", style="cyan"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    run = Run(folder, folder / f"stderr-{len(list(folder.glob('stderr-*.txt'))) + 1}.txt")
    with open(run.stderr_file, "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        watchdog = Watchdog(process)
        try:
            assert process.stdout is not None  # a pipe was asked for
            follow(console, run, watchdog.lines(process.stdout), interrupt=interrupt)
            run.exit_code = process.wait()
        finally:
            watchdog.stop()
            end(process)
        errors.seek(0)
        run.stderr = errors.read()
    for line in run.stderr.splitlines():
        if line.startswith("[mindx_elastic"):
            console.print(Text(f"  {line}"))
    return run


class Watchdog:
    """Ends a run that has said nothing for `SILENT_S`, however long it takes as long as it says something."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._begin()

    def _begin(self) -> None:
        self._timer = threading.Timer(SILENT_S, self._process.terminate)  # torchrun passes it on to its workers
        self._timer.daemon = True
        self._timer.start()

    def lines(self, stdout: IO[str]) -> Iterator[str]:
        for line in stdout:
            self._timer.cancel()
            self._begin()
            yield line

    def stop(self) -> None:
        self._timer.cancel()


def follow(console: Console, run: Run, stdout: Iterable[str], *, interrupt: bool) -> None:
    """Read the training's lines until it closes its stdout; send the signal when the step to stop at is reported."""
    for line in stdout:
        run.read_line(line)
        is_step = STEP_LINE.match(line) is not None
        signal_now = interrupt and run.signalled_at is None and is_step and run.steps[-1] >= STOP_AT
        if not is_step or signal_now or run.steps[-1][1] % SHOW_EVERY == 0:
            console.print(Text(f"  {line.rstrip()}", style="dim"))
        if signal_now:
            run.expect(SIGNALLED_RANK in run.pids, f"rank {SIGNALLED_RANK} has not told its pid")
            run.signalled_at = time.time()
            os.kill(run.pids[SIGNALLED_RANK], signal.SIGTERM)
            console.print(f"[cyan]$ kill -TERM {run.pids[SIGNALLED_RANK]}[/]")


def loopback() -> str:
    """Name of the loopback interface, so that gloo need not find out the machine's own address."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def end(process: subprocess.Popen[str]) -> None:
    """Make sure that torchrun is gone, whatever went wrong."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def show_breakpoint(console: Console, run: Run) -> float:
    """Show what the stop left behind; returns the seconds from the signal until the last rank's file was durable."""
    if run.signalled_at is None or run.result:
        run.expect(False, "the training was not stopped in the middle")
        return 0.0  # not reached
    saves = [event for event in run.events("save") if event["outcome"] == "saved"]
    ranks, steps = {event["rank"] for event in saves}, {event["step"] for event in saves}
    run.expect(ranks == set(range(RANKS)) and len(steps) == 1, f"ranks {ranks} have saved, the steps {steps}")
    console.print("  left behind:")
    for path in sorted(run.folder.glob("rank_*/*_breakpoint.safetensors")):
        console.print(f"    {path}  {path.stat().st_size / 1e6:.2f} MB")
    codes = worker_codes(run)
    reported = {int(rank): int(code) for rank, code in TORCHRUN_REPORT.findall(run.stderr)}
    console.print(f"  exit codes as the workers recorded them: {codes}")
    console.print(f"  as torchrun reports them: {dict(sorted(reported.items()))}")
    if -signal.SIGTERM in reported.values():
        # As soon as one worker has left, torchrun ends the others; one that was just leaving is then said to be killed.
        console.print("  (-15: torchrun's own SIGTERM met a worker that had saved and was on its way out)")
    console.print(f"  of torchrun itself: {run.exit_code} (torchrun says 1 whatever its workers say)")
    return float(max(event["time"] for event in saves)) - run.signalled_at


def worker_codes(run: Run) -> dict[int, int]:
    """Exit code by rank, from ``events.jsonl``."""
    return dict(sorted((int(event["rank"]), int(event["outcome"])) for event in run.events("exit")))


def show_result(console: Console, reference: Run, first: Run, second: Run, seconds: float) -> int:
    """The table and the verdict: 0 when every promise was kept, else 1."""
    hashes = [run.result["weights_sha256"] for run in (reference, second)]
    accuracies = [run.result["test_accuracy"] for run in (reference, second)]
    saved = second.result["resumed_from_step"]
    # What rank 0 had reported when it left could have been kept, but for the one step that a stop plays on, to compare.
    lost = max(0, len(first.steps) - saved - 1)
    is_verified = f"verified: step {saved + 1} is the one of the stopped process" in second.stderr
    codes = worker_codes(first)
    in_middle = saved % STEPS_PER_EPOCH > 0
    rows = [
        ("weights, uninterrupted", hashes[0][:24], None),
        ("weights, stopped and resumed", hashes[1][:24], None),
        ("equal?", "yes" if hashes[0] == hashes[1] else "no", hashes[0] == hashes[1]),
        ("test accuracy", " and ".join(map(str, accuracies)), accuracies[0] == accuracies[1]),
        ("stopped after step", f"{saved} of {reference.result['step']}, in mid-epoch", in_middle),
        ("steps lost", str(lost), lost == 0),
        ("steps done twice or never", *told(first.steps[:saved] + second.steps, reference.steps)),
        ("the next step, made by both", "the same" if is_verified else "not compared", is_verified),
        ("seconds from signal to durable", f"{seconds:.2f}", 0 <= seconds < 30),
        ("exit codes of the workers", str(codes), codes == dict.fromkeys(range(RANKS), 128 + signal.SIGTERM)),
        ("exit code of the resumed run", str(second.exit_code), second.exit_code == 0),
    ]
    table = Table(box=box.SIMPLE_HEAD, title="stopped and resumed, against never stopped", title_justify="left")
    for heading in ("", "measured", "as promised"):
        table.add_column(heading)
    for name, value, kept in rows:
        table.add_row(name, value, "" if kept is None else "[green]yes[/]" if kept else "[bold red]NO[/]")
    console.print()
    console.print(table)
    return 0 if all(kept is not False for _, _, kept in rows) else 1


def told(both: list[tuple[int, int]], reference: list[tuple[int, int]]) -> tuple[str, bool]:
    """Steps that the two halves together have too many or too few, as text, and whether there are none."""
    wrong = sorted({step for step in {*both, *reference} if both.count(step) != reference.count(step)})
    return ", ".join(f"epoch {epoch} step {step}" for epoch, step in wrong) or "none", not wrong


if __name__ == "__main__":
    sys.exit(main())
