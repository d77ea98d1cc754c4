"""A guarded loop of one rank for the tests of the directory's lock.

Prints ``READY pid resumed_from``, ``BLOCKED`` when a save has begun that waits for the file GO, and ``DONE step``.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import mindx_elastic as mx
from mindx_elastic.guard import saver as saving
from tests.jobs.kit import say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prefix", default="job")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hold", action="store_true", help="do not go on after the last step")
    parser.add_argument("--fork", action="store_true", help="leave a forked child behind")
    parser.add_argument("--slow-save", type=Path, metavar="GO", help="a dying save waits for this file")
    parser.add_argument("--walk", action="store_true", help="open and close every file of the directory")
    args = parser.parse_args()
    if args.slow_save is not None:
        write = saving.write_checkpoint  # type: ignore[attr-defined]

        def wait_then_write(*arguments: Any, **more: Any) -> Any:
            say("BLOCKED")
            while not args.slow_save.exists():
                time.sleep(0.01)
            return write(*arguments, **more)

        saving.write_checkpoint = wait_then_write  # type: ignore[attr-defined]
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.Guard(model=model, optimizer=optimizer, directory=args.directory, prefix=args.prefix) as guard:
        if args.fork and os.fork() == 0:
            say(f"CHILD {os.getpid()}")
            time.sleep(600)
            os._exit(0)
        if args.walk:
            for path in args.directory.rglob("*"):
                if path.is_file():
                    path.read_bytes()
        say(f"READY {os.getpid()} {guard.resumed_from_step}")
        while guard.position.step < args.steps or args.hold:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step_end()
            time.sleep(0.01)
    say(f"DONE {guard.position.step}")


if __name__ == "__main__":
    main()
