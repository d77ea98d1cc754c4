"""A momentum encoder that follows by ``.data``, as people write MoCo, under DDP if there are several ranks.

``momentum.py DIRECTORY [--behind] [--kill STEP:RANK|STEP!RANK]``. `--behind`: the encoder follows behind the update and
not in front of it. `--kill`, on a fresh start: once both ranks have followed; with ``!`` an exception behind the update
in its place. Prints ``READY rank pid resumed_from`` and ``DONE rank sha256 step``.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mindx_elastic as mx
from tests.jobs.kit import digest_of, kill_here, say, wait_for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--behind", action="store_true")
    parser.add_argument("--kill", default="")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.ModuleDict({"query": nn.Linear(6, 4)})
    network["key"] = copy.deepcopy(network["query"]).requires_grad_(False)
    optimizer = torch.optim.SGD(network["query"].parameters(), lr=0.1, momentum=0.9)
    query: nn.Module = network["query"]
    if dist.is_initialized():
        query = nn.parallel.DistributedDataParallel(query)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6))
    loader = mx.data.ResumableLoader(data, batch_size=4, shuffle=True)
    guard = mx.Guard(model=[query, network["key"]], optimizer=optimizer, loader=loader, directory=args.directory)

    def follow() -> None:
        for key, new in zip(network["key"].parameters(), network["query"].parameters(), strict=True):
            key.data.mul_(0.9).add_(new.data, alpha=0.1)

    with guard:
        fresh = guard.resumed_from_step is None
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for _ in guard.epochs(2):
            for (x,) in loader:
                if not args.behind:
                    follow()
                loss = (query(x) - network["key"](x)).pow(2).mean() + query(x).mean()
                if fresh and args.kill.startswith(f"{guard.step + 1}:"):
                    followed = args.directory / "followed"  # the other rank has, too
                    if not args.kill.endswith(f":{rank}"):
                        followed.touch()
                    else:
                        wait_for(followed)
                        kill_here(rank)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if fresh and args.kill == f"{guard.step + 1}!{rank}":
                    raise ValueError("injected")
                if args.behind:
                    follow()
                guard.step_end(loss=loss)
    say(f"DONE {rank} {digest_of(network.parameters())} {guard.step}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
