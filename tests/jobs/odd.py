"""A training of which one step's loss is no number on the last rank: in the first process only, or whenever the step is
made.

Prints ``RESUMED rank step`` and ``DONE rank sha256 losses``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx
from tests.jobs.kit import digest_of, say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--odd", choices=("back", "stop", "ignore"), default="back")
    parser.add_argument("--at", type=int, default=6)
    parser.add_argument("--always", action="store_true", help="the program itself makes it so")
    parser.add_argument("--catch", action="store_true", help="the program catches what its guard raises")
    parser.add_argument("--scalar", choices=("loss", "grad_norm"), default="loss")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    if size > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))
    loader = mx.data.ResumableLoader(data, batch_size=4, shuffle=True, seed=0)
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=args.directory, odd=args.odd)
    with guard:
        resumed = guard.resumed_from_step
        say(f"RESUMED {rank} {resumed}")
        for _ in guard.epochs(1):
            for (x,) in loader:
                is_hit = guard.step + 1 == args.at and rank == size - 1 and (args.always or resumed is None)
                loss = model(x).pow(2).mean()
                optimizer.zero_grad()
                (loss * float("nan") if is_hit else loss).backward()
                if args.always:  # of the program's own loss only this one step is odd
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.nan_to_num_()
                optimizer.step()
                odd = torch.full((), float("nan" if is_hit else 1.0))
                named = {"loss": loss * odd} if args.scalar == "loss" else {"loss": loss, "grad_norm": odd}
                try:
                    guard.step_end(**named)
                except ArithmeticError:
                    if not args.catch:
                        raise
                if guard.step == 12:
                    break
    say(f"DONE {rank} {digest_of([*model.parameters(), *model.buffers()])}")


if __name__ == "__main__":
    main()
