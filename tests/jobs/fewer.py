"""A job whose places can break: a process in a place that has its mark ends before it does anything.

``fewer.py DIRECTORY``; see `parse`. Prints READY, SEEN (epoch, samples, rank, step, world), FAULT, BROKEN and DONE.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mindx_elastic as mx
from mindx_elastic.config import ShrinkSettings
from mindx_elastic.train import Callback, ExceptionCheckpoint, Model, RunContext, TrainOneStep
from tests.jobs.kit import say


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=("loop", "block", "model", "fsdp"), default="loop")
    parser.add_argument("--size", type=int, default=90)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--stock", action="store_true", help="a DataLoader with a DistributedSampler")
    parser.add_argument("--each-batch", action="store_true", help="step_end after each batch")
    parser.add_argument("--break", dest="breaks", default="", help="PLACE:STEP,...: dies, its place is broken")
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    return parser.parse_args()


def meet(directory: Path, step: int, rank: int, world_size: int, *, waits: bool) -> None:
    """Who is about to die at this step waits until all have passed the boundary before it: two jobs are cut alike."""
    (directory / f"at_{step}_{rank}").touch()
    while waits and len([*directory.glob(f"at_{step}_*")]) < world_size:
        time.sleep(0.005)


class Points(Dataset[Any]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Job:
    def __init__(self, args: argparse.Namespace, place: int) -> None:
        self.args, self.place = args, place
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.model: Any = self.network
        if args.kind == "fsdp":
            from torch.distributed.fsdp import fully_shard

            self.model = fully_shard(self.network)
        elif args.kind != "model":
            self.model = nn.parallel.DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        data = Points(args.size)
        if args.stock:
            sampler: Any = DistributedSampler(data, seed=3, drop_last=args.drop_last)
            self.loader: Any = DataLoader(data, 4, sampler=sampler, drop_last=args.drop_last)
        else:
            self.loader = mx.data.ResumableLoader(data, 4, shuffle=True, seed=3, drop_last=args.drop_last)

    def at_batch(self, epoch: int, index: torch.Tensor, step: int) -> None:
        args = self.args
        say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {self.rank} {step} {self.world_size}")
        for word in filter(None, args.breaks.split(",")):
            place, at = map(int, word.split(":"))
            done = args.directory / f"done_{place}_{at}"
            if at == step:
                meet(args.directory, step, self.rank, self.world_size, waits=place == self.place)
            if (place, at) == (self.place, step) and not done.exists():
                done.touch()
                (args.directory / f"broken_{place}").touch()
                say(f"FAULT {place} {step}")
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(args.step_s)

    def run(self) -> None:
        args = self.args
        if args.kind == "model":
            return self.run_model()
        guard = mx.Guard(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.loader,
            directory=args.directory / "ckpt",
            prefix="job",
        )
        if args.kind == "block":
            with guard:
                self.train(guard)
        else:
            guard.run(lambda: self.train(guard))
        self.end(guard.step)

    def train(self, guard: mx.Guard) -> None:
        args = self.args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        say(f"READY {self.rank} {self.world_size} {guard.resumed_from_step}")
        for epoch in guard.epochs(args.epochs):
            window = guard.accumulation(args.accumulate)
            whole = len(self.loader) // window * window
            for number, (x, y, index) in guard.enumerate(self.loader, start=1):
                self.at_batch(epoch, index, guard.step + 1)
                updates = number % window == 0 or number == len(self.loader)
                count = window if number <= whole else len(self.loader) - whole
                no_sync = not updates and args.kind != "fsdp"
                with self.model.no_sync() if no_sync else nullcontext():
                    (nn.functional.cross_entropy(self.model(x), y) / count).backward()
                if updates:
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if updates or args.each_batch:
                    guard.step_end()
                if updates and guard.step == args.stop_at:
                    guard.request_stop("enough", 75)

    def run_model(self) -> None:
        job = self

        class Step(TrainOneStep):
            def compute_loss(self, batch: Any) -> torch.Tensor:
                x, y, index = batch
                job.at_batch(job.loader.epoch, index, model.position.step + 1)
                return nn.functional.cross_entropy(self.model.network(x), y)

        model = Model(
            self.network,
            None,
            self.optimizer,
            lr_scheduler=self.scheduler,
            grad_accum=self.args.accumulate,
            train_step=Step,
        )

        class Begin(Callback):
            def on_train_begin(self, run_context: RunContext) -> None:
                job.rank, job.world_size = dist.get_rank(), run_context.original_args().device_number
                say(f"READY {job.rank} {job.world_size} -")

        callbacks = [ExceptionCheckpoint(prefix="job", directory=str(self.args.directory / "ckpt")), Begin()]
        model.train(self.args.epochs, self.loader, callbacks=callbacks)
        self.end(model.position.step)

    def end(self, step: int) -> None:
        digest, total = hashlib.sha256(), 0.0
        for name, value in sorted(self.network.state_dict().items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.encode() + whole.contiguous().numpy().tobytes())
            total += float(whole.double().abs().sum())
        rate = self.optimizer.param_groups[0]["lr"]
        say(f"DONE {self.rank} {digest.hexdigest()[:16]} {step} {total:.9f} {rate!r}")


def main() -> None:
    torch.set_num_threads(1)
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    settings = ShrinkSettings.from_env()
    place = settings.places[local_rank] if settings.places else local_rank
    if (args.directory / f"broken_{place}").exists():
        say(f"BROKEN {place}")
        sys.exit(3)
    dist.init_process_group("gloo")
    Job(args, place).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
