"""A DDP job of which one rank is slow: it sleeps in each step, at a place that is given.

``--where``: load (its data set sleeps), forward, after it; update, before it; after, behind it. ``--who``: the rank;
-1: all, in turn. Prints ``DONE rank step``.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx
from tests.jobs.kit import say


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--where", choices=("load", "forward", "update", "after"), default="forward")
    parser.add_argument("--who", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.04)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-norm", action="store_true")
    return parser.parse_args()


class Job:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.step = args, dist.get_rank(), 0

    def at(self, where: str) -> None:
        turn = self.args.who if self.args.who >= 0 else self.step % dist.get_world_size()
        if where == self.args.where and self.rank == turn:
            time.sleep(self.args.seconds)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, job: Job, size: int) -> None:
        self._job, self._size = job, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:
            self._job.at("load")
        return torch.full((8,), float(index % 7))


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(args)
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(16)] if args.batch_norm else []
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), *norm, nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = mx.data.ResumableLoader(
        Samples(job, 4 * args.steps * dist.get_world_size()), batch_size=4, shuffle=False, seed=0
    )
    guard = mx.Guard(model=model, optimizer=optimizer, loader=loader, directory=args.directory)
    with guard:
        for _ in guard.epochs(1):
            for batch in loader:
                loss = model(batch).pow(2).mean()
                job.at("forward")
                optimizer.zero_grad()
                loss.backward()
                job.at("update")
                optimizer.step()
                guard.step_end(loss=loss)
                job.step = guard.step
                job.at("after")
                if job.step >= args.steps:
                    break
    say(f"DONE {job.rank} {guard.step}")


if __name__ == "__main__":
    main()
