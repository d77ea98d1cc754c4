"""Shows the promise: a run that is stopped in mid-epoch and started again ends with the weights of one never stopped.

1. trains the example on two ranks, without interruption
2. trains it again in another folder and sends SIGTERM to one rank in the second epoch
3. runs the command of 2 once more

Then it compares. Exits 0 when everything is as promised, 1 when something is not. Needs no network; `make demo` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

TRAIN = Path(__file__).with_name("train.py")
RANKS = 2
EPOCHS = 3
SIGNALLED_RANK = RANKS - 1  # any rank would do; rank 0 is the one that other designs depend on
STOP_AFTER = (2, 4)  # epoch and step in it; there are 10 steps in an epoch
FLAGS = ["--epochs", str(EPOCHS), "--batch-size", "32", "--limit-train", "640", "--num-workers", "1", "--log-steps", "2"]
TIMEOUT_S = 100.0  # for one run, which takes about 10 s; a run that hangs is a broken promise too

PID_LINE = re.compile(r"^rank (\d+) of \d+: pid (\d+)")
STEP_LINE = re.compile(r"^epoch: (\d+) step: (\d+)")
EXIT_LINE = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)")


class BrokenPromise(Exception):
    """Something is not as the README says; the message tells what."""


@dataclass
class Run:
    """What one torchrun printed and left behind."""

    exit_code: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    last_step: tuple[int, int] = (0, 0)
    result: dict[str, Any] = field(default_factory=dict)
    signalled_at: float = 0.0
    stderr: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Stop a training in mid-epoch, resume it, compare the weights.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the runs (default: demo-output)")
    output: Path = parser.parse_args().output
    console = Console(highlight=False)
    try:
        return demonstrate(console, output)
    except BrokenPromise as error:
        console.print(f"[bold red]not as promised:[/] {escape(str(error))}")
        return 1


def demonstrate(console: Console, output: Path) -> int:
    plain, stopped = output / "uninterrupted", output / "interrupted"
    for folder in (plain, stopped):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    title(console, f"1/3  {RANKS} ranks, {EPOCHS} epochs, not interrupted")
    reference = launch(console, plain)
    expect(reference.exit_code == 0, f"the uninterrupted run ended with {reference.exit_code}", reference)

    title(console, f"2/3  the same in another folder; SIGTERM to rank {SIGNALLED_RANK} in epoch {STOP_AFTER[0]}")
    first = launch(console, stopped, interrupt=True)
    codes = worker_exit_codes(stopped)
    seconds = show_breakpoint(console, stopped, first, codes)

    title(console, "3/3  the same command once more")
    second = launch(console, stopped)
    expect(second.exit_code == 0, f"the resumed run ended with {second.exit_code}", second)
    return show_result(console, stopped, reference, first, second, codes, seconds)


def title(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def launch(console: Console, folder: Path, *, interrupt: bool = False) -> Run:
    """Run the training under torchrun and print what it says; with `interrupt` send SIGTERM once it has come far enough.

    Nothing is timed: the moment of the signal follows from the training's own output.
    """
    # --local-addr: the host name of a container need not resolve, and torchrun would wait minutes for it.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    arguments = ["--nproc-per-node", str(RANKS), str(TRAIN), "--train-url", str(folder), *FLAGS]
    shown = ["torchrun", "--standalone", "--nproc-per-node", str(RANKS), TRAIN.name, "--train-url", str(folder), *FLAGS]
    console.print(f"[cyan]$ {escape(shlex.join(shown))}[/]", soft_wrap=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback(), "PYTHONUNBUFFERED": ""}
    run = Run()
    log = folder.parent / f"{folder.name}.stderr.txt"
    with open(log, "w+") as errors:
        process = subprocess.Popen(
            [*torchrun, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        watchdog = threading.Timer(TIMEOUT_S, end, [process])
        watchdog.start()
        try:
            assert process.stdout is not None  # a pipe was asked for
            for line in process.stdout:
                console.print(f"  {escape(line.rstrip())}", soft_wrap=True, style="dim")
                read_line(run, line)
                if interrupt and not run.signalled_at and run.last_step >= STOP_AFTER:
                    run.signalled_at = time.time()
                    os.kill(run.pids[SIGNALLED_RANK], signal.SIGTERM)
                    console.print(f"[cyan]$ kill -TERM {run.pids[SIGNALLED_RANK]}[/]   (rank {SIGNALLED_RANK})")
            run.exit_code = process.wait()
        finally:
            watchdog.cancel()
            end(process)
        errors.seek(0)
        run.stderr = errors.read()
    for line in run.stderr.splitlines():
        if line.startswith("[mindx_elastic"):
            console.print(f"  {escape(line)}", soft_wrap=True, style="dim")
    return run


def read_line(run: Run, line: str) -> None:
    """Take what the demo needs from one line of the training's stdout."""
    if match := PID_LINE.match(line):
        run.pids[int(match[1])] = int(match[2])
    elif match := STEP_LINE.match(line):
        run.last_step = (int(match[1]), int(match[2]))
    elif line.startswith("{"):
        run.result = json.loads(line)


def loopback() -> str:
    """Name of the loopback interface: gloo need not find out the machine's own address."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def end(process: subprocess.Popen[str]) -> None:
    """Make sure that torchrun and its workers are gone; torchrun passes SIGTERM on to them."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            process.kill()


def expect(holds: bool, problem: str, run: Run) -> None:
    """Raise BrokenPromise with the end of the run's stderr unless `holds`."""
    if not holds:
        tail = "\n".join(run.stderr.strip().splitlines()[-15:])
        raise BrokenPromise(f"{problem}; its last lines on stderr:\n{tail}")


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of one kind in the run's ``events.jsonl``, in order of time."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def show_stop(console: Console, folder: Path, run: Run) -> float:
    """Show what the stop left behind; returns the seconds from the signal to the last rank's durable file."""
    expect(run.signalled_at > 0, "the training ended before the signal was sent", run)
    expect(not run.result, "the training ran to its end in spite of the signal", run)
    saves = [event for event in events_of(folder, "save") if event["outcome"] == "saved"]
    expect({event["rank"] for event in saves} == set(range(RANKS)), "not every rank has saved", run)
    expect(len({event["step"] for event in saves}) == 1, "the ranks have saved different steps", run)
    codes = worker_codes(folder)
    expect(codes == dict.fromkeys(range(RANKS), 143), f"the workers' exit codes are {codes}, not 143 each", run)
    console.print("\nthe breakpoint, one file a rank:")
    for path in sorted(folder.glob("rank_*/*_breakpoint.safetensors")):
        console.print(f"  {path}  {path.stat().st_size / 1e6:.1f} MB", soft_wrap=True)
    console.print(f"exit codes of the workers: {sorted(codes.values())} (128 + SIGTERM, from events.jsonl)")
    console.print(f"exit code of torchrun: {run.exit_code} (torchrun says 1 whatever its workers say)")
    for rank, code in EXIT_LINE.findall(run.stderr):
        console.print(f"  torchrun's own report: rank {rank} exitcode {code}")
    return float(max(event["time"] for event in saves) - run.signalled_at)


def worker_codes(folder: Path) -> dict[int, int]:
    """Exit code by rank, as each worker recorded it when it left."""
    return {int(event["rank"]): int(event["outcome"]) for event in events_of(folder, "exit")}


def show_result(console: Console, folder: Path, reference: Run, resumed: Run, seconds: float) -> int:
    """The table and the verdict: 0 when every promise held, else 1."""
    saved = events_of(folder, "save")[0]["step"]
    # The newest boundary that was passed anywhere before the stop: what could have been kept at all.
    reached = max(event["step"] for event in events_of(folder, "exit"))
    lost = reached - resumed.result["resumed_from_step"]
    promises = [
        ("weights, never interrupted", reference.result["weights_sha256"][:16], True),
        ("weights, stopped and resumed", resumed.result["weights_sha256"][:16], True),
        ("equal", *said(reference.result["weights_sha256"] == resumed.result["weights_sha256"])),
        ("test accuracy of both", f"{reference.result['test_accuracy']}, {resumed.result['test_accuracy']}",
         reference.result["test_accuracy"] == resumed.result["test_accuracy"]),
    ]
