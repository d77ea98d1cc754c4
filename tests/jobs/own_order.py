"""DDP, each rank with a sampler that draws from a generator of the rank's: ``own_order.py DIRECTORY [KILL STEP]``.

Prints ``READY rank pid resumed_from``, ``ORDER rank step samples`` after each step, and ``DONE rank sha256``. Rank KILL
of a fresh start kills itself with SIGKILL in the update of STEP, when all others have passed it, and says
``KILLED rank``. An epoch has three steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import mindx_elastic as mx
from tests.jobs.kit import digest_of, kill_here, say, wait_for

SIZE = 24


class Drawn(Sampler[int]):
    """Samples of the whole data set, drawn with numbers of the rank's own."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(SIZE, (len(self),), generator=self.generator).tolist())

    def __len__(self) -> int:
        return SIZE // 2


def main() -> None:
    directory, victim, last = sys.argv[1], *map(int, sys.argv[2:] or (-1, 0))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    others = [other for other in range(dist.get_world_size()) if other != rank]
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 4), torch.arange(SIZE) % 2, torch.arange(SIZE))
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net)
    torch.manual_seed(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: DataLoader[Any] = DataLoader(data, 4, sampler=Drawn(rank))
    guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=directory)

    def train() -> None:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for _ in guard.epochs(4):
            for x, y, numbers in loader:
                opt.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                step, killed = guard.step + 1, Path(f"{directory}-killed")
                if (rank, step) == (victim, last) and not killed.exists():
                    wait_for(*(f"{directory}-{step}-{other}" for other in others))
                    killed.touch()
                    kill_here(rank)
                opt.step()
                guard.step_end()
                Path(f"{directory}-{step}-{rank}").touch()
                say(f"ORDER {rank} {step} {numbers.tolist()}")

    guard.run(train)
    say(f"DONE {rank} {digest_of([*net.parameters(), torch.get_rng_state()])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
