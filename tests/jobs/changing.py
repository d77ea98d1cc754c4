"""Trainings whose flags, parameter groups, masks or helper objects change in mid-run: ``changing.py directory scenario``.

Prints ``READY rank pid resumed_from`` and ``DONE rank sha256 step``; ``--stop-at STEP`` (several) sends a real SIGTERM to
this process in the middle of that step. One rank, or several with DDP under torchrun.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import mindx_elastic as mx
from mindx_elastic.guard.stop_state import StopPhase

EPOCHS, BATCHES = 3, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class Training:
    """A loop without surprises; the scenarios override what surprises."""

    ddp: ClassVar[dict[str, Any]] = {}

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.rank = rank
        self.build()
        self.model: nn.Module = self.network
        if world_size > 1:
            self.model = DistributedDataParallel(self.network, **self.ddp)
        self.optimizer = self.make_optimizer()
        self.wrapped()
        data = TensorDataset(torch.randn(BATCHES * 4, 8), torch.randint(0, 4, (BATCHES * 4,)))
        self.loader = mx.data.ResumableLoader(data, batch_size=4 // world_size, shuffle=True, seed=1)
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, **self.more()}
        self.guard = mx.Guard(directory=directory, prefix="changing", **parts)

    def build(self) -> None:
        self.network: nn.Module = Net()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.parameters(), lr=1e-2)

    def wrapped(self) -> None:
        """DDP and the optimizer exist, the guard does not."""

    def more(self) -> dict[str, Any]:
        return {}

    def head(self, epoch: int) -> None:
        """At the epoch's beginning."""
        self.model.train()

    def batch(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def before(self, step: int) -> None:
        """At the step's beginning."""

    def after(self, step: int) -> None:
        """After the update, before the boundary."""

    def tail(self, epoch: int) -> None:
        """After the inner loop."""

    def run(self, stop_at: list[int]) -> None:
        with self.guard as guard:
            say(f"READY {self.rank} {os.getpid()} {guard.resumed_from_step}")
            for epoch in guard.epochs(EPOCHS):
                self.head(epoch)
                for x, y in self.loader:
                    step = guard.position.step + 1
                    self.before(step)
                    self.optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(self.model(self.batch(x)), y)
                    loss.backward()
                    if step in stop_at and self.rank == 0:
                        os.kill(os.getpid(), signal.SIGTERM)
                        wait_for_stop(guard)
                    self.optimizer.step()
                    self.after(step)
                    guard.step_end()
                self.tail(epoch)
        say(f"DONE {self.rank} {self.digest()} {guard.position.step}")

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def wait_for_stop(guard: mx.Guard) -> None:
    """Until the alarm is heard: the coming boundary is then the last, or the one after it on other ranks."""
    end = time.monotonic() + 120
    while guard.stopper.phase is StopPhase.TRAINING:
        assert time.monotonic() < end, "no alarm came"
        time.sleep(0.001)


# --- flags ---


class FrozenNorm(Training):
    """Batch norm stops learning in mid-epoch 2, and only there: no head of an epoch sets it."""

    def head(self, epoch: int) -> None:
        if epoch == 1:
            self.model.train()

    def before(self, step: int) -> None:
        if step == BATCHES + 3:
            self.network.backbone[1].eval()


class FrozenNormInEpoch(Training):
    """The head of each epoch calls train(); batch norm is frozen in the middle of each."""

    def before(self, step: int) -> None:
        if step % BATCHES == 3:
            self.network.backbone[1].eval()


class LeftInEval(Training):
    """An evaluation after epoch 1 leaves evaluation mode behind: a mistake, and the program's own."""

    def head(self, epoch: int) -> None:
        if epoch == 1:
            self.model.train()

    def tail(self, epoch: int) -> None:
        if epoch == 1:
            self.model.eval()


class Unfreezing(Training):
    """The backbone is trained from step 8 on."""

    ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def wrapped(self) -> None:
        self.network.backbone.requires_grad_(False)  # after DDP, which must know all parameters

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.backbone.requires_grad_(True)


class Freezing(Training):
    """The backbone is frozen from step 8 on, and its gradients stay zeros: weight decay and momentum go on."""

    ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.backbone.requires_grad_(False)


class Generators(Training):
    """Noise from generators of one's own, drawn by the loop; an evaluation draws from one as well."""

    def build(self) -> None:
        super().build()
        self.torch_generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng()
        self.numpy_generator = np.random.default_rng(4)
        self.old_generator = np.random.RandomState(5)
        self.python_generator = random.Random(6)

    def more(self) -> dict[str, Any]:
        return {
            "stateful": {
                "torch_generator": self.torch_generator,
                "numpy_generator": self.numpy_generator,
                "old_generator": self.old_generator,
                "python_generator": self.python_generator,
            }
        }

    def head(self, epoch: int) -> None:
        super().head(epoch)
        if epoch == 1:
            self.draw()

    def draw(self) -> float:
        numbers = [
            torch.rand(1, generator=self.torch_generator).item(),
            self.numpy_generator.normal(),
            self.numpy_generator.spawn(1)[0].normal(),
            self.old_generator.normal(),
            self.python_generator.gauss(0, 1),
        ]
        return sum(numbers)

    def before(self, step: int) -> None:
        if step % 3 == 0:
            with self.guard.outside_step():
                self.model.eval()
                self.draw()

    def batch(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw()


SCENARIOS: dict[str, type[Training]] = {
    "frozen_norm": FrozenNorm,
    "frozen_norm_in_epoch": FrozenNormInEpoch,
    "left_in_eval": LeftInEval,
    "unfreezing": Unfreezing,
    "freezing": Freezing,
    "generators": Generators,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--stop-at", type=int, action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    SCENARIOS[args.scenario](args.directory, rank, world_size).run(args.stop_at)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
