"""A small guarded loop for the tests of the agent: one tensor a rank, no process group, so that it starts fast.

Prints ``READY rank pid resumed_from`` and ``DONE rank step``.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch

import mindx_elastic as mx
from tests.jobs.kit import say


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="steps after which to save")
    parser.add_argument("--kill-at", type=int, default=-1, help="be killed after this step, on a fresh start")
    parser.add_argument("--poison", type=int, default=-1, help="be killed whenever resumed from this step")
    parser.add_argument("--fail-at", type=int, default=-1, help="raise in this step, in every attempt")
    parser.add_argument("--spin-at", type=int, default=-1, help="never come back from this step, on a fresh start")
    parser.add_argument("--own-count", action="store_true", help="a count that is not kept decides the loss")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--own-name", action="store_true", help="each process gives the directory another name")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rank = int(os.environ["RANK"])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    directory = os.path.join(args.directory, str(rank)) if rank else args.directory
    directory += f"-{os.getpid()}" * args.own_name
    count = 0
    guard = mx.Guard(model=model, optimizer=optimizer, directory=directory, prefix="small")
    with guard:
        resumed = guard.resumed_from_step
        say(f"READY {rank} {os.getpid()} {resumed}")
        if resumed == args.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in range((resumed or 0) + 1, args.steps + 1):
            if step == args.fail_at:
                raise ValueError(f"a bad sample, seen at {time.time()}")
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
