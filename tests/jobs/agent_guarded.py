"""A small guarded loop for the tests of the agent and of the directory's lock: one tensor a rank, no process group, so
that it starts fast.

Prints ``READY rank pid resumed_from``, ``CHILD pid``, ``BLOCKED`` when a save has begun that waits, and ``DONE rank
step``.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import mindx_elastic as mx
from mindx_elastic.guard import saver as saving
from tests.jobs.kit import say, wait_for


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="steps after which to save")
    parser.add_argument("--kill-at", type=int, default=-1, help="be killed after this step, on a fresh start")
    parser.add_argument("--spin-at", type=int, default=-1, help="never come back from this step, on a fresh start")
    parser.add_argument("--own-count", action="store_true", help="a count that is not kept decides the loss")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--own-name", action="store_true", help="each process gives the directory another name")
    parser.add_argument("--fork", action="store_true", help="leave a forked child behind")
    parser.add_argument("--walk", action="store_true", help="open and close every file of the directory")
    parser.add_argument("--slow-save", type=Path, metavar="GO", help="each save waits for this file")
    return parser.parse_args()


def slow_down_saves(go: Path) -> None:
    write = saving.write_checkpoint  # type: ignore[attr-defined]

    def wait_then_write(*arguments: Any, **more: Any) -> Any:
        say("BLOCKED")
        wait_for(go)
        return write(*arguments, **more)

    saving.write_checkpoint = wait_then_write  # type: ignore[attr-defined]


def main() -> None:
    args = parse()
    rank = int(os.environ.get("RANK", "0"))
    if args.slow_save is not None:
        slow_down_saves(args.slow_save)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    directory = os.path.join(args.directory, str(rank)) if rank else args.directory
    directory += f"-{os.getpid()}" * args.own_name
    count = 0
    guard = mx.Guard(model=model, optimizer=optimizer, directory=directory, prefix="small")
    with guard:
        resumed = guard.resumed_from_step
        if args.fork and os.fork() == 0:
            say(f"CHILD {os.getpid()}")
            time.sleep(600)
            os._exit(0)
        for path in Path(directory).rglob("*") if args.walk else ():
            if path.is_file():
                path.read_bytes()
        say(f"READY {rank} {os.getpid()} {resumed}")
        for step in range((resumed or 0) + 1, args.steps + 1):
            while step == args.spin_at and resumed is None:
                time.sleep(0.01)
            optimizer.zero_grad()
            count += 1
            loss = model(torch.ones(2, 4)).sum() * (count if args.own_count else 1)
            loss.backward()
            optimizer.step()
            guard.step_end(loss=loss)
            if step in args.save_at:
                guard.save()
            if step == args.kill_at and resumed is None:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(args.step_s)
    say(f"DONE {rank} {guard.position.step}")


if __name__ == "__main__":
    main()
