"""DDP over a data set that the program sets: ``set_data.py DIRECTORY [WORKERS KILL STEP WHERE]``.

The augmentation is switched off at the head of epoch 2 and a level goes up at the end of each epoch; an epoch has five
steps. Rank KILL kills itself with SIGKILL, once, at STEP: in front of its boundary (``step``) or behind the
end of its epoch (``tail``). Prints ``READY rank pid resumed_from``, ``KILLED rank`` and ``DONE rank sha256``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mindx_elastic as mx
from tests.jobs.kit import digest_of, kill_here, say


class Pictures(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.mosaic, self.level = torch.randn(120, 4), True, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        x = self.x[index] + 0.1 * self.level * torch.randn(4)
        return x + self.x[int(torch.randint(120, ()))] if self.mosaic else x


def main() -> None:
    directory, workers, victim, last, where = [*sys.argv[1:], *("0", "-1", "0", "")[len(sys.argv) - 2 :]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Pictures()
    loader: DataLoader[Any] = DataLoader(
        data, 24 // world_size, sampler=DistributedSampler(data), num_workers=int(workers)
    )
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=directory)
    killed = Path(f"{directory}-killed")

    def die(step: int, here: str) -> None:
        if (rank, step, here) == (int(victim), int(last), where) and not killed.exists():
            killed.touch()
            kill_here(rank)

    def train() -> None:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for epoch in guard.epochs(4):
            if epoch == 2:
                data.mosaic = False
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                die(guard.step + 1, "step")
                guard.step_end()
            data.level += 1
            die(guard.step, "tail")
        say(f"DONE {rank} {digest_of(model.state_dict().values())} {data.mosaic} {data.level}")

    guard.run(train)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
