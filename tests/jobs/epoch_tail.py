"""DDP, and code behind each epoch that reads its last loss and has a collective: ``epoch_tail.py DIRECTORY [options]``.

Prints ``READY rank pid resumed_from``, ``LOSS rank epoch sum_over_ranks`` and ``DONE rank sha256 learning_rate``.
``--kill``: that rank of a fresh start kills itself with SIGKILL in the code behind epoch 2, and says ``KILLED rank``:
in front of the collective; with ``--late`` behind it, when all others are in the next epoch already. ``--stream``: the
loader does not know its length.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import mindx_elastic as mx
from tests.jobs.kit import digest_of, kill_here, say, wait_for


class Stream(IterableDataset[Any]):
    """A rank's share, whose length nobody knows."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(dist.get_rank(), len(self.data), dist.get_world_size()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    marks = args.directory
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, others = dist.get_rank(), [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24 * dist.get_world_size(), 4), torch.arange(24 * dist.get_world_size()) % 2)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net)
    torch.manual_seed(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    loader: DataLoader[Any] = DataLoader(data, 8, sampler=DistributedSampler(data))
    if args.stream:
        loader = DataLoader(Stream(data), 8)

    guard = mx.Guard(model=model, optimizer=opt, lr_scheduler=plan, loader=loader, directory=args.directory)

    def train() -> None:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for epoch in guard.epochs(4):
            for x, y in loader:
                Path(f"{marks}-in-{epoch}-{rank}").touch()
                opt.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                guard.step_end()
            Path(f"{marks}-{epoch}-{rank}").touch()
            is_victim = (epoch, rank) == (2, args.kill) and not os.path.exists(f"{marks}-killed")
            if is_victim and not args.late:
                wait_for(*(f"{marks}-2-{other}" for other in others))  # all have passed the boundary
                kill(rank)
            total = loss.detach().clone()
            dist.all_reduce(total)
            say(f"LOSS {rank} {epoch} {float(total).hex()}")
            plan.step(float(total) + epoch)
            torch.rand(rank + 1)  # a stream of each rank's own
            if is_victim and args.late:
                wait_for(*(f"{marks}-in-3-{other}" for other in others))
                kill(rank)

    def kill(rank: int) -> None:
        Path(f"{marks}-killed").touch()
        kill_here(rank)

    guard.run(train)
    digest = digest_of([*net.state_dict().values(), torch.get_rng_state()])
    say(f"DONE {rank} {digest} {opt.param_groups[0]['lr']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
