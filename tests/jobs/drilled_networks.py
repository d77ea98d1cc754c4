"""Two networks against each other, for the long drill of faults: any number of ranks, or alone.

Two models with batch norm and dropout, two optimizers that do not step equally often, a stock DataLoader, noise of a
generator of its own and of numpy, a count of steps and not of epochs.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mindx_elastic as mx


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--num-workers", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    maker: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    critic: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(120, 8, generator=torch.Generator().manual_seed(1)))
    sampler: DistributedSampler[Any] | None = None
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        maker, critic = DistributedDataParallel(maker), DistributedDataParallel(critic, broadcast_buffers=False)
        sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    noise = torch.Generator().manual_seed(rank)
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-2, momentum=0.5)
    loader = DataLoader(
        data, batch_size=5, shuffle=sampler is None, sampler=sampler, drop_last=True, num_workers=args.num_workers
    )
    guard = mx.Guard(
        model=[maker, critic],
        optimizer=[of_maker, of_critic],
        stateful={"noise": noise},
        loader=loader,
        directory=args.directory,
        prefix="networks",
    )

    def train() -> None:
        epochs = -(-args.steps // len(loader))
        for epoch in guard.epochs(epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for (real,) in loader:
                made = maker(torch.randn(len(real), 4, generator=noise))
                of_critic.zero_grad()
                seen = real + 0.1 * torch.randn_like(real) + 0.1 * float(np.random.rand()) + 0.1 * random.random()
                loss = functional.softplus(-critic(seen)).mean() + functional.softplus(critic(made.detach())).mean()
                loss.backward()
                of_critic.step()
                if guard.step % 2 == 0:
                    of_maker.zero_grad()
                    functional.softplus(-critic(made)).mean().backward()
                    of_maker.step()
                guard.step_end(loss=loss)

    guard.run(train)
    os.write(1, f"DONE {sum(float(p.detach().sum()) for p in maker.parameters())!r}\n".encode())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
