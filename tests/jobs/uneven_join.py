"""Trains two ranks: ``DIRECTORY join|steps``. `join`: in DDP's join(); `steps`: each cycles through another length."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from mindx_elastic import Guard


def main() -> None:
    directory, how = sys.argv[1], sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    size = 20 if rank == 0 or how == "join" else 28
    loader = DataLoader(TensorDataset(torch.randn(size, 3)), 4)
    net = DistributedDataParallel(nn.Linear(3, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
        guard.step_end()

    with Guard(directory=directory, model=net, optimizer=opt, loader=loader) as guard:
        os.write(1, f"READY {rank} {os.getpid()}\n".encode())
        if how == "steps":
            batches = iter(loader)
            for _ in guard.steps(10):
                try:
                    (x,) = next(batches)
                except StopIteration:
                    batches = iter(loader)
                    (x,) = next(batches)
                step(x)
        else:
            for _ in guard.epochs(2):
                with net.join():
                    for (x,) in loader:
                        step(x)
    os.write(1, f"DONE {rank}\n".encode())


if __name__ == "__main__":
    main()
