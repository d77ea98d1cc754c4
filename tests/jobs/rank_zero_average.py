"""Averages of the weights that rank 0 alone updates, a small and a large one, as many programs have them, by
``DIRECTORY [KILL]``: rank 0 is killed behind its step KILL, once. Each rank prints the sums of its own in the end."""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx


def main() -> None:
    directory, kill = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Linear(6, 4)
    model = nn.parallel.DistributedDataParallel(network)
    small, large = copy.deepcopy(network), nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = mx.Guard(model=model, optimizer=optimizer, stateful={"small": small, "large": large}, directory=directory)
    is_killed = directory.with_suffix(".killed")
    with guard:
        for step in guard.steps(8):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    small.weight.lerp_(network.weight, 0.1)
                    large.weight.add_(network.weight.mean())
            guard.step_end()
            if step == kill and dist.get_rank() == 0 and not is_killed.exists():
                is_killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    sums = [average.weight.double().sum().item() for average in (small, large)]
    os.write(1, f"AVERAGES {dist.get_rank()} {sums[0]!r} {sums[1]!r}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
