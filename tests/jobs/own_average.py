"""Two averages of the weights. One is copied from the module before DDP gives all ranks the weights of rank 0, as DeiT
has it, so that its first ones are each rank's own; the other behind that. ``own_average.py DIRECTORY``."""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # the program's: other augmentation on each rank, and other first weights
    network = nn.Linear(6, 12000)  # larger than what each rank keeps of its own at each step
    before = copy.deepcopy(network).requires_grad_(False)
    model = nn.parallel.DistributedDataParallel(network)
    behind = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = mx.data.ResumableLoader(torch.utils.data.TensorDataset(torch.randn(16, 6)), batch_size=4)
    averages = {"before": before, "behind": behind}
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, stateful=averages, directory=sys.argv[1])
    with guard:
        for _ in guard.epochs(2):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for average in (before, behind):
                        for mine, new in zip(average.parameters(), network.parameters(), strict=True):
                            mine.lerp_(new, 0.1)
                guard.step_end(loss=loss)
    os.write(1, f"DONE {dist.get_rank()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
