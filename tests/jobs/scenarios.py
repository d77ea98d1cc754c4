"""Trainings that change, keep or set something that no state_dict has: ``scenarios.py DIRECTORY SCENARIO [options]``.

A scenario is a class below, by its name in lower case with underscores. One rank, or several with DDP.

Prints ``READY rank pid resumed_from``, ``KILLED rank`` and ``DONE rank sha256 step``. ``--kill RANK:STEP:PLACE`` is
a SIGKILL, once in a job, when the other ranks have come as far as they can without this one.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

import mindx_elastic as mx
from tests.jobs.kit import kill_here, say, wait_for

PER_STEP = 12
"""Samples of all ranks."""
OTHERS = {
    "forward": ("forward", 0),  # the loss is there
    "backward": ("boundary", 0),  # the gradients are
    "update": ("boundary", 0),
    "end": ("boundary", 0),  # the program has done all of the step
    "boundary": ("start", 0),
    "tail": ("boundary", 0),  # the epoch has ended; the program's code for its end comes
    "late": ("start", 1),  # that code has run
}
"""The places of a kill, and where the other ranks have to be by then: a place, and how many steps later."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.backbone(x))
        return made


class Training:
    """A loop without surprises; the scenarios override what surprises."""

    known: ClassVar[dict[str, type[Training]]] = {}
    ddp: ClassVar[dict[str, Any]] = {}
    epochs = 3
    steps_per_epoch = 6
    network: Any
    model: Any

    def __init_subclass__(cls) -> None:
        Training.known[re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()] = cls

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int) -> None:
        self.args, self.rank, self.world_size = args, rank, world_size
        self.marks = Path(f"{args.directory}-marks")
        self.marks.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.build()
        self.model = self.wrap()
        self.optimizer = self.make_optimizer()
        self.wrapped()
        size = PER_STEP * self.steps_per_epoch
        self.data: Any = self.make_data(torch.randn(size, 8), torch.randint(0, 4, (size,)))
        self.loader: Any = self.make_loader(PER_STEP // world_size)
        torch.manual_seed(rank)
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, **self.more()}
        self.guard = mx.Guard(directory=args.directory, prefix="job", **parts)

    # --- what scenarios override ---

    def build(self) -> None:
        self.network = Net()

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.network, **self.ddp) if self.world_size > 1 else self.network

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.network.parameters() if p.requires_grad], lr=1e-2)

    def wrapped(self) -> None:
        """DDP and the optimizer exist, the guard does not."""

    def make_data(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return TensorDataset(x, y)

    def make_loader(self, batch_size: int) -> Any:
        return mx.data.ResumableLoader(self.data, batch_size=batch_size, shuffle=True, seed=1)

    def more(self) -> dict[str, Any]:
        """Further arguments of the guard."""
        return {}

    def head(self, epoch: int) -> None:
        """At the epoch's beginning."""

    def before(self, step: int) -> None:
        """At the step's beginning."""

    def loss(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.model(batch[0]), batch[1])

    def after(self, step: int, loss: torch.Tensor) -> None:
        """After the update, before the boundary."""

    def passed(self, step: int, batch: Any) -> None:
        """Behind the boundary."""

    def tail(self, epoch: int) -> None:
        """Behind the epoch."""

    def kept(self) -> list[Any]:
        """What has to be equal in the end beside the weights and the random numbers: tensors, and what has a repr."""
        return []

    # --- the training ---

    def train(self) -> None:
        guard = self.guard
        say(f"READY {self.rank} {os.getpid()} {guard.resumed_from_step}")
        for epoch in guard.epochs(self.epochs):
            self.head(epoch)
            for batch in self.loader:
                self.end_step(batch, self.begin_step(batch))
            self.come_to("tail", guard.step)
            self.tail(epoch)
            self.come_to("late", guard.step)

    def begin_step(self, batch: Any) -> torch.Tensor:
        step = self.guard.step + 1
        self.come_to("start", step)
        self.before(step)
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        self.come_to("forward", step)
        return loss

    def end_step(self, batch: Any, loss: torch.Tensor) -> None:
        step = self.guard.step + 1
        loss.backward()
        self.come_to("backward", step)
        self.optimizer.step()
        self.come_to("update", step)
        self.after(step, loss)
        self.come_to("end", step)
        self.guard.step_end()
        self.come_to("boundary", step)
        self.passed(step, batch)

    def come_to(self, place: str, step: int) -> None:
        (self.marks / f"{place}-{step}-{self.rank}").touch()
        if f"{self.rank}:{step}:{place}" not in self.args.kill:
            return
        try:
            (self.marks / f"killed-{step}-{self.rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        where, later = OTHERS[place]
        victims = [order.split(":")[0] for order in self.args.kill if order.split(":")[1] == str(step)]
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        wait_for(*(self.marks / f"killed-{step}-{rank}" for rank in victims))
        wait_for(*(self.marks / f"{where}-{step + later}-{rank}" for rank in others))
        kill_here(self.rank)

    def digest(self) -> str:
        digest = hashlib.sha256()
        tensors = [value for _, value in sorted(self.network.state_dict().items())]
        for value in (*tensors, *self.kept(), torch.get_rng_state()):
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                digest.update(whole.detach().contiguous().numpy().tobytes())
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()


# --- buffers ---


class MomentumEncoder(Training):
    """A second network follows the first one by ``.data``, which no version counter shows, before each step."""

    def build(self) -> None:
        self.network = nn.ModuleDict({"query": nn.Linear(8, 4)})
        self.network["key"] = copy.deepcopy(self.network["query"]).requires_grad_(False)

    def wrap(self) -> nn.Module:
        query: nn.Module = self.network["query"]
        return DistributedDataParallel(query) if self.world_size > 1 else query

    def more(self) -> dict[str, Any]:
        return {"model": [self.model, self.network["key"]]}

    def before(self, step: int) -> None:
        self.follow()

    def follow(self) -> None:
        for key, new in zip(self.network["key"].parameters(), self.network["query"].parameters(), strict=True):
            key.data.mul_(0.9).add_(new.data, alpha=0.1)

    def loss(self, batch: Any) -> torch.Tensor:
        query: torch.Tensor = self.model(batch[0])
        loss: torch.Tensor = (query - self.network["key"](batch[0])).pow(2).mean() + query.mean()
        return loss


# --- hooks of DDP ---


class PowerSgd(Training):
    """Gradients are compressed from step 3 on, with error feedback."""

    def wrapped(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        self.state = power.PowerSGDState(
            None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        self.model.register_comm_hook(self.state, power.powerSGD_hook)

    def more(self) -> dict[str, Any]:
        return {"stateful": {"powersgd": self.state}}


# --- what each rank has of its own ---


class Centred(nn.Module):
    """Keeps a running mean of this rank's own."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class OwnObjects(Training):
    """Generators, counts and a buffer that move before the forward; an average and a count, which all ranks have
    alike, behind the update."""

    ddp: ClassVar[dict[str, Any]] = {"broadcast_buffers": False}

    def build(self) -> None:
        self.network = nn.Sequential(Centred(), nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))

    def more(self) -> dict[str, Any]:
        self.noise, self.own = np.random.default_rng(self.rank), torch.Generator().manual_seed(self.rank)
        self.drawn: dict[str, Any] = {"count": 10 * self.rank, "last": []}
        self.average, self.updates = AveragedModel(self.network[3]), {"done": 0}
        self.losses: list[float] = []
        names = ("noise", "own", "drawn", "average", "updates")
        return {"stateful": {name: getattr(self, name) for name in names}}

    def loss(self, batch: Any) -> torch.Tensor:
        self.drawn["count"] += 1
        self.drawn["last"] = [float(self.noise.normal()), float(torch.rand((), generator=self.own))]
        return super().loss([batch[0] + 0.1 * float(self.noise.normal()), batch[1]])

    def after(self, step: int, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        self.average.update_parameters(self.network[3])
        self.updates["done"] += 1

    def kept(self) -> list[Any]:
        say(f"LOSSES {self.rank} {len(self.losses)}")
        kept: list[Any] = [*self.average.state_dict().values(), self.network[0].mean, self.own.get_state()]
        return [*kept, self.updates, self.noise.bit_generator.state, self.drawn]


class OwnLosses(OwnObjects):
    """Also a list that is changed behind the update."""

    def more(self) -> dict[str, Any]:
        return {"stateful": {**super().more()["stateful"], "losses": self.losses}}


class RankZeroDict(Training):
    """An average in a dict, on rank 0 alone; the other ranks name nothing."""

    def more(self) -> dict[str, Any]:
        values = self.network.state_dict() if self.rank == 0 else {}
        self.ema = {name: value.clone() for name, value in values.items()}
        return {"stateful": {"ema": self.ema}} if self.rank == 0 else {}

    def after(self, step: int, loss: torch.Tensor) -> None:
        for name, value in self.network.state_dict().items() if self.ema else ():
            if value.is_floating_point():
                self.ema[name].mul_(0.9).add_(value, alpha=0.1)


class RankZeroAverages(Training):
    """An average of the weights that rank 0 alone updates."""

    def more(self) -> dict[str, Any]:
        self.average = copy.deepcopy(self.network.head)
        return {"stateful": {"average": self.average}}

    def after(self, step: int, loss: torch.Tensor) -> None:
        if self.rank == 0:
            with torch.no_grad():
                self.average.weight.lerp_(self.network.head.weight, 0.1)


class LocalSgd(Training):
    """Each rank trains by itself, and all average their weights in each fourth step; the loss in each one."""

    def loss(self, batch: Any) -> torch.Tensor:
        with self.model.no_sync():
            loss = super().loss(batch)
        dist.all_reduce(loss.detach().clone())
        return loss

    def after(self, step: int, loss: torch.Tensor) -> None:
        if step % 4 == 0:
            for parameter in self.network.parameters():
                dist.all_reduce(parameter.data.div_(self.world_size))


class OwnAverages(Training):
    """Two averages. One is copied before DDP gives all ranks the weights of rank 0, as DeiT has it; one behind that."""

    def build(self) -> None:
        torch.manual_seed(self.rank)
        self.network = nn.Linear(8, 4)
        self.early = copy.deepcopy(self.network).requires_grad_(False)

    def more(self) -> dict[str, Any]:
        self.late = copy.deepcopy(self.network).requires_grad_(False)
        return {"stateful": {"early": self.early, "late": self.late}}

    def after(self, step: int, loss: torch.Tensor) -> None:
        with torch.no_grad():
            for average in (self.early, self.late):
                for mine, new in zip(average.parameters(), self.network.parameters(), strict=True):
                    mine.lerp_(new, 0.1)


# --- data ---


class Drawn(Sampler[int]):
    """Samples of the whole data set, drawn with numbers of the rank's own."""

    def __init__(self, rank: int, size: int, number: int) -> None:
        self.generator, self.size, self.number = torch.Generator().manual_seed(rank), size, number

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.size, (self.number,), generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.number


class OwnOrder(Training):
    """Each rank draws its samples with a generator of its own. ``ORDER rank step targets`` after each step."""

    epochs, steps_per_epoch = 4, 3

    def make_loader(self, batch_size: int) -> Any:
        sampler = Drawn(self.rank, len(self.data), len(self.data) // self.world_size)
        return DataLoader(self.data, batch_size, sampler=sampler)

    def passed(self, step: int, batch: Any) -> None:
        say(f"ORDER {self.rank} {step} {batch[0][:, 0].tolist()}")


class Pictures(Dataset[Any]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.mosaic, self.level = x, y, True, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index] + 0.1 * self.level * torch.randn(8)
        return (x + self.x[int(torch.randint(len(self), ()))] if self.mosaic else x), self.y[index]


class SetData(Training):
    """The augmentation is switched off at the head of epoch 2, and a level goes up at the end of each epoch."""

    epochs, steps_per_epoch = 4, 5
    num_workers = 0

    def make_data(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return Pictures(x, y)

    def make_loader(self, batch_size: int) -> Any:
        sampler: Any = DistributedSampler(self.data)
        return DataLoader(self.data, batch_size, sampler=sampler, num_workers=self.num_workers)

    def head(self, epoch: int) -> None:
        if epoch == 2:
            self.data.mosaic = False

    def tail(self, epoch: int) -> None:
        self.data.level += 1

    def kept(self) -> list[Any]:
        return [self.data.mosaic, self.data.level]


class SetDataOfWorkers(SetData):
    num_workers = 1


class EpochTail(Training):
    """Code behind each epoch reads its last loss, has a collective and sets the rate: ``LOSS rank epoch sum``."""

    epochs, steps_per_epoch = 4, 3

    def make_loader(self, batch_size: int) -> Any:
        return DataLoader(self.data, batch_size, sampler=DistributedSampler(self.data))

    def more(self) -> dict[str, Any]:
        self.plan = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        return {"lr_scheduler": self.plan}

    def train(self) -> None:
        guard = self.guard
        say(f"READY {self.rank} {os.getpid()} {guard.resumed_from_step}")
        for epoch in guard.epochs(self.epochs):
            for batch in self.loader:
                loss = self.whole_step(batch)
            self.come_to("tail", guard.step)
            total = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(total)
            say(f"LOSS {self.rank} {epoch} {float(total).hex()}")
            self.plan.step(float(total) + epoch)
            torch.rand(self.rank + 1)  # a stream of each rank's own
            self.come_to("late", guard.step)

    def whole_step(self, batch: Any) -> torch.Tensor:
        """Its caller binds the loss after the boundary."""
        loss = self.begin_step(batch)
        self.end_step(batch, loss)
        return loss

    def kept(self) -> list[Any]:
        return [self.optimizer.param_groups[0]["lr"]]


# --- steps that are not the same on all ranks ---


class InJoin(Training):
    """In DDP's join()."""

    def train(self) -> None:
        for _ in self.guard.epochs(2):
            with self.model.join():
                for batch in self.loader:
                    self.end_step(batch, self.begin_step(batch))


class OwnLengths(Training):
    """Each rank cycles through another number of batches."""

    def make_loader(self, batch_size: int) -> Any:
        return DataLoader(TensorDataset(*self.data[: len(self.data) - 12 * self.rank]), batch_size)

    def train(self) -> None:
        batches = iter(self.loader)
        for _ in self.guard.steps(20):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(self.loader)
                batch = next(batches)
            self.end_step(batch, self.begin_step(batch))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("scenario", choices=Training.known)
    parser.add_argument("--kill", action="append", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    training = Training.known[args.scenario](args, rank, world_size)
    training.guard.run(training.train)
    say(f"DONE {rank} {training.digest()} {training.guard.step}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
