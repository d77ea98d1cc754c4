"""A training job for the tests of pauses: DDP, dropout, loader workers, an evaluation.

Prints ``READY rank pid resumed_from``, ``HOLD rank step``, ``EVAL rank epoch`` and ``DONE rank sha256 step``.
``--hold-at 3,7`` keeps each rank in the middle of these steps until the gate has a limit (a pause, a stop), so that
it always takes effect there.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx
from tests.jobs.kit import say
from tests.jobs.loop import Pictures, build_network, weights_hash


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=60)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--hold-at", default="", help="steps of the first attempt, separated by commas")
    parser.add_argument("--eval", default="", help="poll or plain: in an evaluation after each epoch until a file `go`")
    parser.add_argument("--run", action="store_true", help="guard.run(train), which a recovery in place needs")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    network = build_network()
    wrapped: nn.Module = network
    if world_size > 1:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = mx.data.ResumableLoader(
        Pictures(args.size), batch_size=5, shuffle=True, seed=3, num_workers=args.num_workers
    )
    guard = mx.Guard(model=wrapped, optimizer=optimizer, loader=loader, directory=args.directory, prefix="paused")
    holds = {int(step) for step in args.hold_at.split(",") if step}

    def train() -> None:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        fresh = guard.resumed_from_step is None
        for epoch in guard.epochs(args.epochs):
            for x, y, _ in loader:
                step = guard.position.step + 1
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if fresh and step in holds:
                    say(f"HOLD {rank} {step}")
                    guard.stopper.step_gate.wait_for_limit(300)
                guard.step_end()
                say(f"PASSED {rank} {step}")
            if args.eval and fresh:
                with guard.outside_step():
                    say(f"EVAL {rank} {epoch}")
                    while not Path("go").exists():
                        if args.eval == "poll":
                            guard.poll()
                        time.sleep(0.005)

    if args.run:
        guard.run(train)
    else:
        with guard:
            train()
    say(f"DONE {rank} {weights_hash(network)} {guard.position.step}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
