"""A training on one GPU, alone or with several ranks over NCCL, with faults at given places (see ``in_place.py``).

Several ranks share the machine's first GPU: each tells NCCL that it is on a machine of its own, so that NCCL does not
refuse them, and its data goes over the loopback interface.

Prints ``READY rank pid resumed_from``, ``SEEN epoch index,... rank step``, ``SYNC rank step count where`` for the steps
in which the guard has waited for the device, and ``DONE rank sha256 step``.
"""

from __future__ import annotations

import argparse
import os
import random
import warnings
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["NCCL_HOSTID"] = f"rank-{os.environ.get('RANK', '0')}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import mindx_elastic as mx
from tests.jobs.in_place import Faults, digest_of
from tests.jobs.kit import say
from tests.jobs.loop import Pictures

PRECISIONS = ("fp32", "fp16", "bf16")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--megabytes", type=int, default=0, help="of further weights, which every step changes")
    parser.add_argument("--depth", type=int, default=0, help="further layers: their kernels fill the device's queue")
    parser.add_argument("--plain-optimizer", action="store_true", help="a dozen kernels for each parameter")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--tell-syncs", action="store_true")
    parser.add_argument("--with-guard", action="store_true")
    return parser.parse_args()


class Residual(nn.Module):
    """One of many small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.tanh(self.linear(x))


class Trainer:
    """One rank's training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size > 1:
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()]
        layers += [Residual() for _ in range(args.depth)]
        self.network = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(24, 5))
        if args.megabytes:
            self.network.register_parameter("bulk", nn.Parameter(torch.zeros(args.megabytes << 18)))
        self.network.cuda()
        self.model: nn.Module = self.network
        bucket = 0.05 if args.depth else 0.002
        if args.fsdp:
            fully_shard(self.network)
        elif self.world_size > 1:
            self.model = nn.parallel.DistributedDataParallel(self.network, device_ids=[0], bucket_cap_mb=bucket)
        foreach = False if args.plain_optimizer else None
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2, foreach=foreach)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler(
            "cuda", enabled=args.precision == "fp16", init_scale=1024.0, growth_interval=5
        )
        self.loader = mx.data.ResumableLoader(
            Pictures(args.size), batch_size=4, shuffle=True, seed=3, num_workers=args.num_workers, pin_memory=True
        )
        self.faults = Faults(args.fault, self.rank, args.directory)
        self.network[0].register_full_backward_hook(lambda *_: self.faults.at(self.step, "mid"))
        self.forward = torch.compile(self.model) if args.compile else self.model
        torch.manual_seed(77 + self.rank)
        random.seed(78 + self.rank)
        np.random.seed(79 + self.rank)
        self.guard = mx.Guard(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler if args.precision == "fp16" else None,
            loader=self.loader,
            directory=args.directory / "ckpt",
            prefix="job",
        )

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return self.guard.step + 1

    def run(self) -> None:
        if self.args.with_guard:
            with self.guard:
                self.train()
        else:
            self.guard.run(self.train)
        say(f"DONE {self.rank} {self.digest()} {self.guard.step}")

    def train(self) -> None:
        say(f"READY {self.rank} {os.getpid()} {self.guard.resumed_from_step}")
        for epoch in self.guard.epochs(self.args.epochs):
            for x, y, index in self.loader:
                self.train_step(epoch, x.cuda(non_blocking=True), y.cuda(non_blocking=True), index)

    def train_step(self, epoch: int, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> None:
        faults, step = self.faults, self.step
        say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {self.rank} {step}")
        faults.at(step, "start")
        kind = torch.bfloat16 if self.args.precision == "bf16" else torch.float16
        with torch.autocast("cuda", kind, enabled=self.args.precision != "fp32"):
            loss = nn.functional.cross_entropy(self.forward(x).float(), y)
            if self.args.megabytes:
                loss = loss + self.network.get_parameter("bulk").sub(1e-3).square().mean()
        faults.at(step, "forward")
        self.scaler.scale(loss).backward()
        faults.at(step, "backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        faults.at(step, "update")
        self.scheduler.step()
        if self.args.tell_syncs:
            self.end_step_counting_syncs(step)
        else:
            self.guard.step_end()
        faults.at(step, "after")

    def end_step_counting_syncs(self, step: int) -> None:
        """The guard's own share of the step, in which it should not wait for the device."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.guard.step_end()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [f"{Path(w.filename).name}:{w.lineno}" for w in found if "synchroniz" in str(w.message)]
        if waits:
            say(f"SYNC {self.rank} {step} {len(waits)} {' '.join(sorted(set(waits)))}")

    def digest(self) -> str:
        return digest_of(self.network, self.optimizer, self.scheduler, self.scaler)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    Trainer(parse()).run()
    if dist.is_initialized():
        dist.destroy_process_group()
