"""A loop over guard.steps with evaluations on the training's own loader: ``stepping.py directory [--stop STEP RANK]``.

Prints ``READY rank pid resumed_from`` and ``DONE rank sha256 step``. ``--stop``: that rank sends a real SIGTERM to
itself in the evaluation after that step. Under torchrun the ranks train with DDP.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import mindx_elastic as mx

STEPS = 13


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--stop", type=int, nargs=2, default=(-1, -1))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
    torch.manual_seed(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(160.0).reshape(40, 4) / 160)
    loader = mx.data.ResumableLoader(data, 4, shuffle=True, seed=1)
    guard = mx.Guard(model=model, optimizer=opt, loader=loader, directory=args.directory)
    with guard:
        os.write(1, f"READY {rank} {os.getpid()} {guard.resumed_from_step}\n".encode())
        torch.rand(1 + rank)
        batches = iter(loader)
        for step in guard.steps(STEPS):
            if guard.step and guard.step % 2 == 0:
                with guard.outside_step(), torch.no_grad():
                    model.eval()
                    for number, (x,) in enumerate(loader):
                        if (guard.step, rank) == tuple(args.stop) and number == 1:
                            os.kill(os.getpid(), signal.SIGTERM)
                        model.module(x)
                        guard.poll()
                    model.train()
            try:
                (x,) = next(batches)
            except StopIteration:
                batches = iter(loader)
                (x,) = next(batches)
            model(x + torch.rand(1)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            guard.step_end(step=step)
        drawn = torch.rand(2)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()] + [drawn])
    os.write(1, f"DONE {rank} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()} {guard.step}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
