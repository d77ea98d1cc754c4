"""Trainings whose flags, groups, masks or helper objects change in mid-run: ``changing.py directory scenario``.

Prints ``READY rank pid resumed_from`` and ``DONE rank sha256 step``; ``--stop-at STEP`` (several) sends a real SIGTERM
to this process in the middle of that step. One rank, or several with DDP under torchrun.
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
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import mindx_elastic as mx
from mindx_elastic.guard.stop_state import StopPhase
from tests.jobs.kit import say

EPOCHS, BATCHES = 3, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


class Training:
    """A loop without surprises; the scenarios override what surprises."""

    ddp: ClassVar[dict[str, Any]] = {}
    network: Any

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.rank = rank
        self.build()
        self.model = self.wrap(world_size)
        self.optimizer = self.make_optimizer()
        self.wrapped()
        data = TensorDataset(torch.randn(BATCHES * 12, 8), torch.randint(0, 4, (BATCHES * 12,)))
        self.loader = mx.data.ResumableLoader(data, batch_size=12 // world_size, shuffle=True, seed=1)
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, **self.more()}
        self.guard = mx.Guard(directory=directory, prefix="changing", **parts)

    def build(self) -> None:
        self.network = Net()

    def wrap(self, world_size: int) -> nn.Module:
        return DistributedDataParallel(self.network, **self.ddp) if world_size > 1 else self.network

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.parameters(), lr=1e-2)

    def wrapped(self) -> None:
        """DDP and the optimizer exist, the guard does not."""

    def more(self) -> dict[str, Any]:
        return {}

    def head(self, epoch: int) -> None:
        """At the epoch's beginning."""
        self.model.train()

    def batch(self, x: torch.Tensor) -> Any:
        return x

    def before(self, step: int) -> None:
        """At the step's beginning."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

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
                    self.zero_grad()
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


def wait_for_stop(guard: mx.Guard) -> None:
    """Until the alarm is heard: the coming boundary is then the last, or the one after it on other ranks."""
    end = time.monotonic() + 120
    while guard.stopper.phase is StopPhase.TRAINING:
        assert time.monotonic() < end, "no alarm came"
        time.sleep(0.001)


# --- flags ---


class Unfreezing(Training):
    """The backbone is trained from step 8 on."""

    ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def wrapped(self) -> None:
        self.network.backbone.requires_grad_(False)  # after DDP, which must know all parameters

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.backbone.requires_grad_(True)


class Rewrapped(Training):
    """DDP was built while the backbone was frozen; later another one is, that knows it."""

    def build(self) -> None:
        super().build()
        self.network.backbone.requires_grad_(False)

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.backbone.requires_grad_(True)
            self.model = DistributedDataParallel(self.network)


class Sharded(Training):
    """FSDP2, with an average that is sharded as well; unfreezing in step 8."""

    def build(self) -> None:
        super().build()
        self.network.backbone[1] = nn.LayerNorm(16)
        self.average: Any = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def wrap(self, world_size: int) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for part in (self.network.backbone, self.network, self.average.module):
            fully_shard(part)
        return self.network  # type: ignore[no-any-return]

    def wrapped(self) -> None:
        self.network.backbone.requires_grad_(False)

    def more(self) -> dict[str, Any]:
        return {"stateful": {"average": self.average}}

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.backbone.requires_grad_(True)
            self.network.backbone[3].eval()

    def after(self, step: int) -> None:
        self.average.update_parameters(self.network)
        with torch.no_grad():
            self.network.head.bias.lerp_(self.average.module.head.bias, 0.1)

    def digest(self) -> str:
        digest = hashlib.sha256(str(self.average.n_averaged).encode())
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(name.encode() + tensor.full_tensor().contiguous().numpy().tobytes())
        return digest.hexdigest()


# --- groups ---


class AddedGroup(Training):
    """The backbone joins in step 8 with a learning rate of its own; two schedulers go on."""

    ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.head.parameters(), lr=1e-2)

    def wrapped(self) -> None:
        self.network.backbone.requires_grad_(False)
        self.steps: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)

    def more(self) -> dict[str, Any]:
        return {"lr_scheduler": self.steps}

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.backbone.requires_grad_(True)
            group = {"params": list(self.network.backbone.parameters()), "lr": 1e-3, "weight_decay": 0.3}
            self.optimizer.add_param_group(group)

    def after(self, step: int) -> None:
        self.steps.step()


class ReplacedHead(Training):
    """Another head of the same shape, known to the optimizer."""

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            old = list(self.network.head.parameters())
            self.network.head = nn.Linear(16, 4)
            new = dict(zip(map(id, old), self.network.head.parameters(), strict=True))
            for parameter in old:
                self.optimizer.state.pop(parameter, None)
            group = self.optimizer.param_groups[0]
            group["params"][:] = [new.get(id(p), p) for p in group["params"]]


class ForgottenHead(Training):
    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.head = nn.Linear(16, 4)


class WiderHead(Training):
    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            self.network.head = nn.Linear(16, 5)
            self.optimizer.param_groups[0]["params"][-2:] = list(self.network.head.parameters())


class Shrunk(Training):
    """A part that the forward does not use goes."""

    def build(self) -> None:
        super().build()
        self.network.spare = nn.Linear(2, 2)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.network.backbone.parameters(), *self.network.head.parameters()], lr=1e-2)

    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            del self.network.spare


class LateParametrization(Training):
    def before(self, step: int) -> None:
        if step == BATCHES + 2:
            parametrizations.weight_norm(self.network.head)


class LeftForExport(Training):
    """The norm is taken off inside the block, after the training."""

    def build(self) -> None:
        super().build()
        nn.utils.weight_norm(self.network.head)

    def tail(self, epoch: int) -> None:
        if epoch == EPOCHS:
            nn.utils.remove_weight_norm(self.network.head)


class HeadOfLoop(Training):
    """What people write at the head of an epoch, and what runs again in a resumed one."""

    def build(self) -> None:
        super().build()
        self.meter = {"sum": 0.0, "history": []}

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.head.parameters(), lr=1e-2)

    def head(self, epoch: int) -> None:
        super().head(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
        if epoch == 2:
            self.optimizer.add_param_group({"params": self.network.backbone.parameters(), "lr": 1e-3})
        if epoch == 3:
            with torch.no_grad():
                self.network.head.bias.zero_()
            self.optimizer.state.clear()
        prune.random_unstructured(self.network.head, "weight", amount=2)


# --- buffers ---


class Buffered(Net):
    """Buffers that no state_dict has, that are made late, and that begin with None."""

    noise: torch.Tensor
    running: torch.Tensor
    center: torch.Tensor | None
    late: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        seed = torch.get_rng_state()
        torch.seed()
        noise = torch.rand(8) if "NOISE" not in os.environ else torch.full((8,), float(os.environ["NOISE"]))
        torch.set_rng_state(seed)
        self.register_buffer("noise", noise, persistent=False)
        self.register_buffer("running", torch.zeros(8), persistent=False)
        self.register_buffer("positions", torch.arange(4).expand(3, -1), persistent=False)
        self.register_buffer("center", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.mean(0))
            if self.center is None:
                self.center = x.mean(0)
            if not hasattr(self, "late"):
                self.register_buffer("late", x.std(0))
        return super().forward(x - self.running + self.noise + self.center + self.late)


class Buffers(Training):
    def build(self) -> None:
        self.network = Buffered()


# --- objects that hide state ---


class PowerSgd(Training):
    """Gradients are compressed from step 3 on, with error feedback."""

    named = True

    def wrapped(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        self.state = power.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(self.state, power.powerSGD_hook)

    def more(self) -> dict[str, Any]:
        return {"stateful": {"powersgd": self.state}} if self.named else {}


class UnnamedPowerSgd(PowerSgd):
    named = False


class OwnHookState:
    def __init__(self) -> None:
        self.scale, self.calls = 1.0, 0


class UnnamedOwnHook(Training):
    def wrapped(self) -> None:
        def hook(state: OwnHookState, bucket: dist.GradBucket) -> Any:
            state.calls += 1
            return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

        # DDP compares the classes, and annotations are strings here.
        hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}

        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(OwnHookState(), hook)


SCENARIOS: dict[str, type[Training]] = {
    "unfreezing": Unfreezing,
    "rewrapped": Rewrapped,
    "sharded": Sharded,
    "added_group": AddedGroup,
    "head_of_loop": HeadOfLoop,
    "replaced_head": ReplacedHead,
    "forgotten_head": ForgottenHead,
    "wider_head": WiderHead,
    "shrunk": Shrunk,
    "late_parametrization": LateParametrization,
    "left_for_export": LeftForExport,
    "buffers": Buffers,
    "powersgd": PowerSgd,
    "unnamed_powersgd": UnnamedPowerSgd,
    "unnamed_own_hook": UnnamedOwnHook,
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
