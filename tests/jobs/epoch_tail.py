"""DDP, and code behind each epoch that needs its last loss: ``epoch_tail.py DIRECTORY [--kill RANK]``.

Prints ``READY rank pid resumed_from``, ``LOSS rank epoch sum_over_ranks`` and ``DONE rank sha256``. ``--kill``: that
rank of a fresh start kills itself with SIGKILL in the code behind epoch 2, and says ``KILLED rank``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mindx_elastic as mx


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--kill", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.arange(48) % 2)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)))
    torch.manual_seed(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    with mx.Guard(model=model, optimizer=opt, loader=loader, directory=args.directory) as guard:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for epoch in guard.epochs(3):
            for x, y in loader:
                opt.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                guard.step_end()
            Path(f"{args.directory}-{epoch}-{rank}").touch()
            if (epoch, rank, guard.resumed_from_step) == (2, args.kill, None):
                while not Path(f"{args.directory}-2-{1 - rank}").exists():  # both have passed the boundary
                    time.sleep(0.001)
                say(f"KILLED {rank}")
                os.kill(os.getpid(), signal.SIGKILL)
            total = loss.detach().clone()
            dist.all_reduce(total)
            say(f"LOSS {rank} {epoch} {float(total).hex()}")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    say(f"DONE {rank} {hashlib.sha256(weights).hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
