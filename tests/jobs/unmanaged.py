"""A training of several ranks that draws from a generator of its own: ``unmanaged.py DIRECTORY WHO STEPS``.

WHO: ``all`` ranks draw from it, only rank ``1``, or ``none``.
Prints ``READY rank pid resumed_from`` and ``DONE rank steps``.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mindx_elastic import Guard


def main() -> None:
    directory, who, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net: nn.Module = nn.Linear(3, 3)
    if dist.is_initialized():
        net = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.Adam(net.parameters())
    rng = np.random.default_rng(rank)
    with Guard(directory=directory, model=net, optimizer=opt) as guard:
        os.write(1, f"READY {rank} {os.getpid()} {guard.resumed_from_step}\n".encode())
        for _ in range(guard.position.step, steps):
            noise = float(rng.normal()) if who == "all" or who == str(rank) else 0.0
            opt.zero_grad()
            (net(torch.randn(4, 3)) + noise).square().mean().backward()
            opt.step()
            guard.step_end()
    os.write(1, f"DONE {rank} {steps}\n".encode())


if __name__ == "__main__":
    main()
