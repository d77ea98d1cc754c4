"""PowerSGD whose state is named, by ``DIRECTORY [KILL]``: at step KILL, once, rank 0 is killed past the boundary and
rank 1 in front of it. The gradients are compressed from step 6 on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

import mindx_elastic as mx
from tests.jobs.kit import digest_of, say, wait_for


def main() -> None:
    directory, kill = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(network)
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=5, min_compression_rate=1)
    model.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = mx.Guard(model=model, optimizer=optimizer, stateful={"power": state}, directory=directory)
    killed = [directory.with_suffix(f".killed{each}") for each in (0, 1)]

    def end() -> None:
        killed[rank].touch()
        wait_for(killed[0])
        os.kill(os.getpid(), signal.SIGKILL)

    with guard:
        for step in guard.steps(12):
            optimizer.zero_grad()
            samples = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(samples).square().mean().backward()
            optimizer.step()
            if step == kill and rank == 1 and not killed[1].exists():
                end()
            guard.step_end()
            if step == kill and rank == 0 and not killed[0].exists():
                end()
    say(f"DONE {rank} {digest_of(network.parameters())} {guard.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
