"""Trainings under ``mindx-elastic run --recover in-place`` whose functions catch errors, clean up, retry.

``--form NAME`` is one of `FORMS`. Faults and printed lines are those of ``in_place.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import mindx_elastic as mx
from tests.jobs.in_place import Faults, digest_of
from tests.jobs.kit import say
from tests.jobs.loop import Pictures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--compile", choices=("no", "model", "ddp", "loss", "step"), default="no")
    parser.add_argument("--fault", action="append", default=[])
    return parser.parse_args()


class Training:
    """One rank's objects, and the parts of its step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU()]
        self.network: Any = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(24, 5))
        trained: Any = self.network
        if args.compile == "model":
            trained = torch.compile(trained, backend="aot_eager")
        cap = 0.002 if args.compile == "no" else None  # dynamo does not take one that is smaller than the first bucket
        self.ddp: Any = nn.parallel.DistributedDataParallel(trained, bucket_cap_mb=cap)
        if args.compile == "ddp":
            self.ddp = torch.compile(self.ddp, backend="aot_eager")
        self.criterion: Any = nn.functional.cross_entropy
        if args.compile == "loss":
            self.criterion = torch.compile(self.criterion, backend="aot_eager")
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)
        self.do_update: Any = self.optimizer.step
        if args.compile == "step":
            self.do_update = torch.compile(self.optimizer.step, backend="aot_eager")
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.amp, init_scale=1024.0, growth_interval=5)
        self.loader = mx.data.ResumableLoader(
            Pictures(args.size), batch_size=4, shuffle=True, seed=3, num_workers=args.num_workers
        )
        self.faults = Faults(args.fault, self.rank, args.directory)
        self.network[0].register_full_backward_hook(lambda *_: self.faults.at(self.step, "mid"))
        torch.manual_seed(77 + self.rank)
        random.seed(78 + self.rank)
        np.random.seed(79 + self.rank)
        self.guard = mx.Guard(
            model=self.ddp,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler if args.amp else None,
            loader=self.loader,
            directory=args.directory / "ckpt",
            prefix="job",
        )
        self.number = 0

    @property
    def step(self) -> int:
        return int(self.guard.step) + 1

    def epochs(self) -> Iterator[int]:
        say(f"READY {self.rank} {os.getpid()} {self.guard.resumed_from_step}")
        for epoch in self.guard.epochs(self.args.epochs):
            self.number = 0
            yield epoch

    def begin(self, epoch: int, index: torch.Tensor) -> None:
        say(f"SEEN {epoch} {','.join(map(str, index.tolist()))} {self.rank} {self.step}")
        self.number += 1
        self.faults.at(self.step, "start")

    @property
    def updates(self) -> bool:
        """Whether this step ends a window of accumulation."""
        return bool(self.number % self.args.accumulate == 0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor
        reduces = contextlib.nullcontext() if self.updates else self.ddp.no_sync()
        with reduces, torch.autocast("cpu", torch.bfloat16, enabled=self.args.amp):
            loss = self.criterion(self.ddp(x).float(), y) / self.args.accumulate
        self.faults.at(self.step, "forward")
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        with contextlib.nullcontext() if self.updates else self.ddp.no_sync():
            self.scaler.scale(loss).backward()
        self.faults.at(self.step, "backward")

    def update(self) -> None:
        if self.updates:
            if self.args.clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
            if self.args.compile == "step":
                self.do_update()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.faults.at(self.step, "update")
            self.scheduler.step()
            self.optimizer.zero_grad()

    def end(self) -> None:
        step = self.step
        self.guard.step_end()
        self.faults.at(step, "after")

    def do_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.backward(self.forward(x, y))
        self.update()
        self.end()

    def caught(self, error: BaseException) -> None:
        say(f"CAUGHT {self.rank} {type(error).__name__}")

    def digest(self) -> str:
        return digest_of(self.network, self.optimizer, self.scheduler, self.scaler)


# --- the functions of the training ------------------------------------------------------------------------------------

Train = Callable[[Training], None]
FORMS: dict[str, Train] = {}


def form(function: Train) -> Train:
    FORMS[function.__name__] = function
    return function


@form
def plain(t: Training) -> None:
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            t.do_step(x, y)


@form
def catches_what_backward_raises(t: Training) -> None:
    """And steps with the gradients that there are."""
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            loss = t.forward(x, y)
            try:
                t.backward(loss)
            except Exception as error:
                t.caught(error)
            t.update()
            t.end()


@form
def catches_everything_in_a_step(t: Training) -> None:
    for epoch in t.epochs():
        for x, y, index in t.loader:
            try:
                t.begin(epoch, index)
                t.do_step(x, y)
            except BaseException as error:
                t.caught(error)


@form
def catches_everything_around_the_loop(t: Training) -> None:
    try:
        plain(t)
    except BaseException as error:
        t.caught(error)


@form
def translates_errors(t: Training) -> None:
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            try:
                t.do_step(x, y)
            except RuntimeError as error:
                raise ValueError(f"step {t.step} has failed") from error


@form
def leaves_the_process_after_an_error(t: Training) -> None:
    try:
        plain(t)
    except RuntimeError as error:
        t.caught(error)
        sys.exit(3)


@form
def tries_again(t: Training) -> None:
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            for _ in range(3):
                try:
                    t.backward(t.forward(x, y))
                    break
                except RuntimeError as error:
                    t.caught(error)
                    t.optimizer.zero_grad()
            t.update()
            t.end()


@form
def ends_each_step_with_a_collective(t: Training) -> None:
    for epoch in t.epochs():
        for x, y, index in t.loader:
            try:
                t.begin(epoch, index)
                t.do_step(x, y)
            finally:
                dist.all_reduce(torch.ones(3))


def with_a_collective_at_its_end(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from batches
    finally:
        dist.all_reduce(torch.ones(3))


@form
def closes_a_named_generator_with_a_collective(t: Training) -> None:
    """It lives as long as the name does."""
    for epoch in t.epochs():
        batches = with_a_collective_at_its_end(t.loader)
        for x, y, index in batches:
            t.begin(epoch, index)
            t.do_step(x, y)


def scaled(loss: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """A loss that depends on what the ranks have told each other."""
    return loss * (1.0 + 0.1 * mean.item())


@form
def suppresses_a_failed_wait(t: Training) -> None:
    """The last collective of the step, and what it was to bring is used in the update."""
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            loss = t.forward(x, y)
            t.backward(loss)
            mean = loss.detach().clone()
            work = dist.all_reduce(mean, async_op=True)
            t.faults.at(t.step, "inside")
            with contextlib.suppress(RuntimeError):
                work.wait()
            for parameter in t.network.parameters():
                parameter.grad *= 1.0 + 0.1 * mean.item()
            t.update()
            t.end()


@form
def averages_by_hand_and_suppresses(t: Training) -> None:
    """Gradients without DDP's reduction, with waits whose errors are swallowed."""
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            with t.ddp.no_sync():
                loss = t.criterion(t.ddp(x), y)
                t.faults.at(t.step, "forward")
                loss.backward()
            t.faults.at(t.step, "backward")
            works = [dist.all_reduce(p.grad, async_op=True) for p in t.network.parameters()]
            t.faults.at(t.step, "inside")
            for work in works:
                with contextlib.suppress(RuntimeError):
                    work.wait()
            t.update()
            t.end()


@form
def suppresses_a_failed_functional_collective(t: Training) -> None:
    """Where the result does not come, the first use of it fails, and the next one does not."""
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            loss = t.forward(x, y)
            t.backward(loss)
            group: Any = dist.group.WORLD
            mean = functional.all_reduce(loss.detach(), "sum", group)
            t.faults.at(t.step, "inside")
            with contextlib.suppress(RuntimeError):
                functional.wait_tensor(mean)
            for parameter in t.network.parameters():
                parameter.grad *= 1.0 + 0.1 * mean.item()
            t.update()
            t.end()


@form
def asks_whether_collectives_are_over(t: Training) -> None:
    """And never waits for one."""
    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            loss = t.forward(x, y)
            t.backward(loss)
            mean = loss.detach().clone()
            work = dist.all_reduce(mean, async_op=True)
            t.faults.at(t.step, "inside")
            while not work.is_completed():
                time.sleep(0)
            for parameter in t.network.parameters():
                parameter.grad *= 1.0 + 0.1 * mean.item()
            t.update()
            t.end()


HISTORY: list[torch.Tensor] = []


@form
def keeps_tensors_outside(t: Training) -> None:
    """The mean of all losses so far, in a list that the guard does not keep, has a part in the next loss."""

    def note(loss: torch.Tensor) -> None:
        HISTORY.append(loss.detach().clone())

    for epoch in t.epochs():
        for x, y, index in t.loader:
            t.begin(epoch, index)
            loss = t.forward(x, y)
            note(loss)
            t.backward(scaled(loss, torch.stack(HISTORY).mean()))
            t.update()
            t.end()


def main() -> None:
    args = parse()
    t = Training(args)
    t.guard.run(lambda: FORMS[args.form](t))
    say(f"DONE {t.rank} {t.digest()} {t.guard.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
