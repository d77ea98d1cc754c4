"""A training job for the system tests whose ranks live on several "nodes": FSDP2, no replicas, a directory a node.

Same lines as ``loop.py``. ``--every N`` adds a periodic save every N steps, two of which are kept.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mindx_elastic as mx
from mindx_elastic.core.position import Position
from tests.jobs.fsdp import local_hash
from tests.jobs.kit import say
from tests.jobs.loop import hold

STEPS = 12


@dataclass
class Every:
    """A periodic policy."""

    directory: Path
    steps: int = 1
    asynchronous: bool = False
    append_info: Sequence[object] = ()
    keep_max: int | None = 2
    keep_per_n_minutes: float | None = None

    def due(self, position: Position) -> bool:
        return position.step % self.steps == 0

    def name(self, position: Position) -> str:
        return f"every-{position.epoch}_{position.step_in_epoch}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--every", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    network = nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.Dropout(0.1), nn.Linear(33, 5))
    fully_shard(network, mesh=mesh)
    torch.manual_seed(rank)  # each rank's own random numbers: nobody else's file will do
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    periodic = [Every(args.directory, args.every)] if args.every else []
    guard = mx.Guard(model=network, optimizer=optimizer, directory=args.directory, periodic=periodic)
    with guard:
        say(f"READY {rank} {os.getpid()} {guard.resumed_from_step}")
        for _ in guard.epochs(1):
            while guard.position.step < STEPS:
                network(torch.randn(4, 16)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                guard.step_end()
                if guard.position.step == args.hold_at and guard.resumed_from_step is None:
                    hold(guard, rank)
    say(f"DONE {rank} {local_hash(network)} {guard.position.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
