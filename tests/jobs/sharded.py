"""A training whose ranks hold different parts of the state, under ``mindx-elastic run --recover in-place``.

``--layout``: ``fsdp`` (`fully_shard` on one mesh), ``hsdp`` (two replicas), ``tp`` (`parallelize_module`), ``fsdp_tp``
(both), ``zero`` (DDP and `ZeroRedundancyOptimizer`), ``ddp``. Faults, lines and options as in ``in_place.py``.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mindx_elastic as mx
from tests.jobs.in_place import Faults, Sharing
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


def build(layout: str, network: Network, world_size: int) -> nn.Module:
    """The module to train."""
    if layout in ("ddp", "zero"):
        return nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.005)
    shape, names = {
        "fsdp": ((world_size,), ("shard",)),
        "hsdp": ((2, world_size // 2), ("replicate", "shard")),
        "hsdp_replicas": ((world_size, 1), ("replicate", "shard")),
        "tp": ((world_size,), ("tp",)),
        "fsdp_tp": ((world_size // 2, 2), ("shard", "tp")),
    }[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in layout:
        for block in network.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout != "tp":
        data_mesh = mesh if layout.startswith("hsdp") else mesh["shard"]
        for block in network.blocks:
            fully_shard(block, mesh=data_mesh)
        fully_shard(network, mesh=data_mesh)
    return network


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.pair = dist.new_group([1, 2]) if args.pair else None
        torch.manual_seed(0)
        self.network = Network()
        self.module = build(args.layout, self.network, self.world_size)
        self.faults = Faults(args.fault, self.rank, args.directory)
        self.faults.watch_saves()
        self.network.blocks[1].register_full_backward_hook(lambda *_: self.faults.at(self.step, "mid"))
        self.network.blocks[1].register_forward_hook(lambda *_: self.faults.at(self.step, "inside"))
        parameters = self.module.parameters()
        self.optimizer: torch.optim.Optimizer
        if args.layout == "zero":
            self.optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)
        elif args.share:
            self.optimizer = Sharing(parameters, lr=1e-2)
            self.optimizer.share = self.share
        else:
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        # Tensor parallel ranks work on the same batch.
        data_rank = {"tp": 0, "fsdp_tp": self.rank // 2}.get(args.layout, self.rank)
        replicas = {"tp": 1, "fsdp_tp": self.world_size // 2}.get(args.layout, self.world_size)
        self.loader = mx.data.ResumableLoader(
            Pictures(args.size),
            batch_size=4,
            shuffle=True,
            seed=3,
            num_workers=args.num_workers,
            rank=data_rank,
            world_size=replicas,
        )
        torch.manual_seed(77 + data_rank)
        random.seed(78 + data_rank)
        np.random.seed(79 + data_rank)
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
            for number, (x, y, index) in enumerate(self.loader, start=1):
                step = self.step
                say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {self.rank} {step}")
                self.faults.at(step, "start")
                loss = nn.functional.cross_entropy(self.module(x), y)
                self.faults.at(step, "forward")
                (loss / self.args.accumulate).backward()
                self.faults.at(step, "backward")
                if self.pair is not None:
                    self.wait_for_rank_2()
                if number % self.args.accumulate == 0:
                    if self.args.clip:
                        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                    self.optimizer.step()
                    self.faults.at(step, "update")
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.guard.step_end(loss=loss)
                self.faults.passed(step, "share")
                self.faults.at(step, "after")

    def share(self) -> None:
        """In the middle of the update, all ranks."""
        self.faults.passed(self.step, "share")
        self.faults.at(self.step, "share", behind=range(dist.get_world_size()))
        dist.all_reduce(torch.zeros(1))

    def wait_for_rank_2(self) -> None:
        """Rank 1 does, while the others go on."""
        self.faults.at(self.step, "share", behind=[0, 3])
        if self.rank in (1, 2):
            dist.broadcast(torch.zeros(1), 2, group=self.pair)

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
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", action="store_true", help="clip gradients: a collective of DTensors")
    parser.add_argument("--share", action="store_true", help="a collective in the update, which may tear a survivor")
    parser.add_argument("--pair", action="store_true", help="rank 1 waits for rank 2 in front of each update")
    parser.add_argument("--fault", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer(parse()).run()
    dist.destroy_process_group()
