"""A training whose ranks hold different parts of the state (`fully_shard`; with ``--zero`` `ZeroRedundancyOptimizer`),
under ``mindx-elastic run --recover in-place``. Faults, lines and options as in ``in_place.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import mindx_elastic as mx
from tests.jobs.in_place import Faults
from tests.jobs.kit import say
from tests.jobs.loop import Pictures


class Block(nn.Module):
    """Two layers with something random in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(24, 48), nn.Linear(48, 24), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(self.drop(torch.relu(self.up(x))))
        return made


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.head(x)
        return made


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.network = Network()
        self.module: nn.Module = self.network
        if args.zero:
            self.module = nn.parallel.DistributedDataParallel(self.network)
        else:
            fully_shard(self.network)
        self.faults = Faults(args.fault, self.rank, args.directory)
        self.faults.watch_saves()
        self.network.blocks[1].register_full_backward_hook(lambda *_: self.faults.at(self.step, "mid"))
        self.network.blocks[1].register_forward_hook(lambda *_: self.faults.at(self.step, "inside"))
        parameters = self.module.parameters()
        self.optimizer: torch.optim.Optimizer
        if args.zero:
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.loader = mx.data.ResumableLoader(Pictures(64), batch_size=4, shuffle=True, seed=3)
        torch.manual_seed(77 + self.rank)
        random.seed(78 + self.rank)
        np.random.seed(79 + self.rank)
        self.guard = mx.Guard(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.loader,
            directory=args.directory / "ckpt",
            prefix="job",
        )

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return self.guard.step + 1

    def run(self) -> None:
        self.guard.run(self.train)
        say(f"DONE {self.rank} {self.digest()} {self.guard.step}")

    def train(self) -> None:
        say(f"READY {self.rank} {os.getpid()} {self.guard.resumed_from_step}")
        for epoch in self.guard.epochs(self.args.epochs):
            for x, y, index in self.loader:
                step = self.step
                say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {self.rank} {step}")
                self.faults.at(step, "start")
                loss = nn.functional.cross_entropy(self.module(x), y)
                self.faults.at(step, "forward")
                loss.backward()
                self.faults.at(step, "backward")
                self.optimizer.step()
                self.faults.at(step, "update")
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.guard.step_end(loss=loss)
                self.faults.at(step, "after")

    def digest(self) -> str:
        """Of this rank's parts of the weights and the optimizer, the schedule and the random streams."""
        digest = hashlib.sha256()
        for name, value in _tensors(self.module.state_dict()):
            digest.update(name.encode() + _bytes(value))
        local = self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer
        for name, value in _tensors(local.state_dict()["state"]):
            digest.update(name.encode() + _bytes(value))
        digest.update(repr(sorted((name, repr(value)) for name, value in self.scheduler.state_dict().items())).encode())
        digest.update(torch.get_rng_state().numpy().tobytes() + repr(np.random.get_state()).encode())
        digest.update(repr(random.getstate()).encode())
        return digest.hexdigest()[:24]


def _tensors(tree: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, dict):
        for name, value in sorted(tree.items(), key=lambda item: str(item[0])):
            yield from _tensors(value, f"{place}.{name}")
    elif torch.is_tensor(tree):
        yield place, tree


def _bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    made: bytes = local.detach().contiguous().numpy().tobytes()
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--zero", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--fault", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(parse()).run()
    dist.destroy_process_group()
