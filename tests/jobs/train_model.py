"""A training job for the system tests: `Model` with the documented callbacks, alone or under torchrun.

Prints ``READY rank pid resumed_from``, ``HOLD rank step``, ``EVAL epoch value`` and ``DONE rank sha256 step``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any
from unittest import mock

import torch
from torch import nn

import mindx_elastic as mx
from mindx_elastic.guard import saver as saving_module
from mindx_elastic.guard.stop_state import StopPhase
from mindx_elastic.terminating_message import ExceptionCheckpoint
from tests.jobs.kit import say
from tests.jobs.loop import Pictures, build_network, weights_hash


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--plain-loader", action="store_true")
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--rank0-only", action="store_true")
    parser.add_argument(
        "--tft", action="store_true", help="TFTRegister and its wrapper, in place of ExceptionCheckpoint"
    )
    parser.add_argument("--gan", action="store_true", help="a custom training step with two optimizers")
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--hold-in-eval", type=int, default=-1)
    parser.add_argument(
        "--hold-in-step-eval", type=int, default=-1, help="evaluate in this step, until the process ends"
    )
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=-1, help="rank 1 kills itself in a callback of this step")
    parser.add_argument("--eval-only", action="store_true", help="no training; OnRequestExit on rank 0")
    return parser.parse_args()


class Drop(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """`Pictures` without the index, as networks want it."""

    def __init__(self) -> None:
        self.pictures = Pictures(90)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index][:2]


def wait_for_alarm(model: mx.Model, rank: int, step: int) -> None:
    say(f"HOLD {rank} {step}")
    end = time.monotonic() + 60
    guard: Any = model._guard
    while guard.stopper.phase is StopPhase.TRAINING:
        if time.monotonic() > end:
            sys.exit("no alarm came in 60 s")
        time.sleep(0.005)
    alarm = guard.stopper.alarm
    if alarm is not None and alarm.kind not in ("exception", "peer"):  # then the coming boundary is the one to stop at
        guard.stopper.step_gate.wait_for_limit(60)


class Watch(mx.Callback):
    """Counts steps (the counter must resume), holds, fails and evaluates where it is told to."""

    def __init__(self, args: argparse.Namespace, model: mx.Model, rank: int) -> None:
        self.args, self.model, self.rank = args, model, rank
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_begin(self, run_context: mx.RunContext) -> None:
        say(f"READY {self.rank} {os.getpid()} {self.model.resumed_from_step}")

    def on_train_step_end(self, run_context: mx.RunContext) -> None:
        self.steps += 1
        step = run_context.original_args().cur_step_num
        if step % 3 == 0:
            self.evaluate(step)
        if self.model.resumed_from_step is not None:
            return
        if step == self.args.hold_at:
            wait_for_alarm(self.model, self.rank, step)
        if step == self.args.kill_at and self.rank == 1:
            say(f"KILL {self.rank} {step}")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.args.fail_at and self.rank == self.args.fail_rank:
            raise RuntimeError("injected in a callback")

    def evaluate(self, step: int) -> None:
        holds = step == self.args.hold_in_step_eval and self.model.resumed_from_step is None
        loader = torch.utils.data.DataLoader(Drop(), batch_size=10, shuffle=True)
        metrics = self.model.eval(loader, callbacks=[HoldInEval(self, for_ever=True)] if holds else [])
        say(f"STEP_EVAL {self.rank} {step} {metrics['loss']:.12f}")

    def on_train_epoch_end(self, run_context: mx.RunContext) -> None:
        params = run_context.original_args()
        loader = torch.utils.data.DataLoader(Drop(), batch_size=10)
        holds = params.cur_epoch_num == self.args.hold_in_eval and self.model.resumed_from_step is None
        metrics = self.model.eval(loader, callbacks=[HoldInEval(self)] if holds else [])
        say(f"EVAL {params.cur_epoch_num} {self.rank} {metrics['loss']:.12f}")

    def on_train_end(self, run_context: mx.RunContext) -> None:
        say(f"STEPS {self.rank} {self.steps}")


class HoldInEval(mx.Callback):
    """Keeps an evaluation at its second batch until an alarm is heard; `for_ever`: until the guard has had enough."""

    def __init__(self, watch: Watch, *, for_ever: bool = False) -> None:
        self.watch, self.batches, self.for_ever = watch, 0, for_ever

    def on_eval_step_begin(self, run_context: mx.RunContext) -> None:
        self.batches += 1
        if self.batches == 2:
            wait_for_alarm(self.watch.model, self.watch.rank, 0)
            guard: Any = self.watch.model._guard
            while self.for_ever:
                guard.poll()
                time.sleep(0.005)


class TwoSteps(mx.Model):
    """Two optimizers that step one after the other, as in a GAN."""

    def train_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        assert self.loss_fn is not None
        losses = []
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            loss = self.loss_fn(self.network(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def build_model(args: argparse.Namespace) -> mx.Model:
    network = build_network()
    half = list(network.parameters())
    optimizers: Any = torch.optim.Adam(network.parameters(), lr=1e-2)
    if args.gan:
        optimizers = [torch.optim.Adam(half[:6], lr=1e-2), torch.optim.SGD(half[6:], lr=1e-2, momentum=0.9)]
    if args.tft:
        optimizers = mx.OptTFTWrapper(optimizers)
    first = optimizers[0] if args.gan else optimizers
    return (TwoSteps if args.gan else mx.Model)(
        network,
        nn.CrossEntropyLoss(),
        optimizers,
        metrics={"loss"},
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(first, 100),
        grad_accum=args.grad_accum,
    )


def main() -> None:
    torch.set_num_threads(1)
    args = parse()
    rank = int(os.environ.get("RANK", "0"))
    if os.environ.get("MODEL_SLOW_PERIODIC"):
        slow_down_periodic_saves()
    model = build_model(args)
    config = mx.CheckpointConfig(
        save_checkpoint_steps=args.save_steps or 10**6,
        keep_checkpoint_max=35,
        append_info=[{"epoch_num": 1}],
        exception_save=True,
        async_save=args.async_save,
    )
    callbacks: list[mx.Callback] = [Watch(args, model, rank)]
    if args.tft:
        callbacks.append(mx.TFTRegister(0, "127.0.0.1", 30051, args.directory))
    elif rank == 0 or not args.rank0_only:
        callbacks.append(ExceptionCheckpoint(prefix="net", directory=args.directory, config=config))
        if args.save_steps:
            callbacks.append(mx.ModelCheckpoint(prefix="net", directory=args.directory, config=config))
    loader: Any = torch.utils.data.DataLoader(Drop(), batch_size=5, shuffle=True, num_workers=args.num_workers)
    if not args.plain_loader:
        loader = mx.data.ResumableLoader(Drop(), batch_size=5, shuffle=True, num_workers=args.num_workers)
    if args.eval_only:
        asked = [mx.OnRequestExit(directory=args.directory)] if rank == 0 else []
        say(f"LOSS {rank} {model.eval(loader, asked)['loss']:.6f}")
        return
    model.train(args.epochs, loader, callbacks=callbacks)
    say(f"DONE {rank} {weights_hash(model.bare_network)} {model.position.step}")


def slow_down_periodic_saves() -> None:
    """The first periodic save says that it has begun and ends only once an alarm is heard."""
    write = getattr(saving_module, "write_checkpoint")  # noqa: B009

    def slow(path: Any, state: Any, info: Any, **kwargs: Any) -> Any:
        from mindx_elastic.guard.active import entered as active_guards

        stopper = active_guards[0].stopper
        if info.kind == "periodic" and stopper.phase is StopPhase.TRAINING:
            say(f"PERIODIC {info.rank} {info.step}")
            end = time.monotonic() + 60
            while stopper.phase is StopPhase.TRAINING and time.monotonic() < end:
                time.sleep(0.005)
        return write(path, state, info, **kwargs)

    mock.patch.object(saving_module, "write_checkpoint", slow).start()


if __name__ == "__main__":
    main()
