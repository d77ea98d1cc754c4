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
import time
from collections.abc import Callable
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
